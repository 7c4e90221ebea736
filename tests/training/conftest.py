from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import yaml

from tests import samples

# The package is imported by fixtures only: of a folder that is named pytest reads this file before it is told by
# the one at the top how kernels run here, which Triton wants to know when it is first imported.
if TYPE_CHECKING:
    from escnn_attention.training.comparison import Settings
    from escnn_attention.training.comparison.compare import NetworkResult


@pytest.fixture(scope="session")
def tiny_in() -> Callable[[Path], Settings]:
    """A comparison in a folder that takes seconds: small networks, few images, one epoch."""
    from escnn_attention.training.comparison import Settings

    options = {"group": "c4", "parameters": 600, "epochs": 1, "batch_size": 25, "limit_train": 50, "limit_test": 20}
    return lambda folder: Settings(networks="cnn", output=folder, accelerator="cpu", **options)


@pytest.fixture
def tiny(tiny_in: Callable[[Path], Settings], tmp_path: Path) -> Settings:
    return tiny_in(tmp_path / "run")


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Settings], list[NetworkResult]]:
    """``compare``, of which the folder is a copy where another test has compared the same."""
    from escnn_attention.training.comparison.compare import compare

    kept: dict[Settings, tuple[Settings, list[NetworkResult]]] = {}

    def run(settings: Settings) -> list[NetworkResult]:
        wherever = replace(settings, output=None)
        if wherever not in kept:
            original = replace(settings, output=tmp_path_factory.mktemp("compared") / "run")
            kept[wherever] = original, compare(original)
        original, results = kept[wherever]
        shutil.copytree(original.folder, settings.folder)
        return results

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_two_processes(fork: Callable[..., BaseProcess]) -> Callable[..., None]:
    """Runs a function in two processes at once that know of each other, as those that Lightning starts do."""

    def run(function: Callable, *arguments: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        processes = [fork(function, *arguments, LOCAL_RANK=str(rank), **address) for rank in range(2)]
        for process in processes:
            process.join(timeout=200)
        assert [process.exitcode for process in processes] == [0, 0]

    return run


@pytest.fixture
def rotmnist_arrays() -> dict[str, np.ndarray]:
    """A small stand-in for rotmnist.npz: other images, the same format."""
    return samples.rotmnist(train=6, valid=3, test=4)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with a small rotMNIST, for trainings that commands can be called with."""
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "rotmnist.npz", **samples.rotmnist(train=24, valid=11, test=13))
    return folder


@pytest.fixture
def configuration(tmp_path, data):
    """A small GSA-Net on a small rotMNIST: a file to call with, and what may be changed in it."""
    from tests.training.experiment.runs import of

    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    sizes = {"channels": 2, "blocks": [1], "crops": [8], "pool": [True], "num_heads": 1, "kernel_size": 3}
    network = of(
        "escnn_attention.models.GSANet",
        **{"gspace": of("escnn.gspaces.rot2dOnR2", N=4), "in_channels": 1, "num_classes": 10, **sizes},
        **{"query": "own", "block": {"encoding": "mlp"}},
    )
    model = {"network": network, "optimizer": of("torch.optim.SGD", lr=0.05, momentum=0.9)}
    config = {
        "seed_everything": 3,
        "trainer": {"max_epochs": 3, **quiet},
        "model": {**model, "schedule": "cosine", "warm_up": 1},
        "data": of("escnn_attention.training.RotMNIST", batch_size=8, folder=str(data)),
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
