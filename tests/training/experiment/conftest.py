"""A small training that commands can be called with."""

import json
import shutil

import numpy as np
import pytest
import yaml

from tests import samples


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with a small rotMNIST."""
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "rotmnist.npz", **samples.rotmnist(train=24, valid=11, test=13))
    return folder


@pytest.fixture
def configuration(tmp_path, data):
    """A small GSA-Net on a small rotMNIST: a file to call with, and what may be changed in it."""
    config = {
        "seed_everything": 3,
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
        "model": {
            "network": {
                "class_path": "escnn_attention.models.GSANet",
                "init_args": {
                    "gspace": {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 4}},
                    "in_channels": 1,
                    "num_classes": 10,
                    "channels": 2,
                    "blocks": [1],
                    "crops": [8],
                    "pool": [True],
                    "num_heads": 1,
                    "kernel_size": 3,
                    "query": "own",
                    "encoding": "mlp",
                },
            },
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
            "schedule": "cosine",
            "warm_up": 1,
        },
        "data": {
            "class_path": "escnn_attention.training.RotMNIST",
            "init_args": {"batch_size": 8, "folder": str(data)},
        },
    }

    def write(**changes):
        changed = json.loads(json.dumps(config))
        for name, value in changes.items():
            part = changed
            *path, last = name.split("__")
            for key in path:
                part = part[key]
            part[last] = value
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(changed), encoding="utf-8")
        return file

    return write


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    """``fit`` in a new folder, which is a copy where another test has trained the same."""
    from tests.training.experiment.runs import call

    kept = {}

    def fit(file, folder):
        content = file.read_text(encoding="utf-8")
        if content not in kept:
            kept[content] = tmp_path_factory.mktemp("fitted") / "run"
            call("fit", file, kept[content])
        shutil.copytree(kept[content], folder)

    return fit
