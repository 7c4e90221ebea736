"""What sets of experiments have in common: runs, twins and tables."""

import json

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("typer")

from escnn_attention.training import RotMNIST
from escnn_attention.training.errors import UserError
from examples.experiments.half_size import HalfCIFAR10, HalfPatchCamelyon, HalfRotMNIST
from examples.experiments.report import execute_all, markdown
from examples.experiments.runs import DATA, NETWORK, Run, execute
from examples.experiments.twins import count_parameters, parameters, widest
from tests import samples

_SPACE = {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 2}}


def _network(widths):
    options = {"gspace": _SPACE, "in_channels": 1, "num_classes": 10, "widths": widths}
    options |= {"convolutions": [1] * len(widths), "attention": [0] * len(widths)}
    return {"class_path": "escnn_attention.models.HybridNet", "init_args": options}


@pytest.fixture
def run(tmp_path):
    """A small network on small data."""
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "rotmnist.npz", **samples.rotmnist(train=32, valid=8, test=8))
    config = {
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "model": {"network": _network([2])},
        "data": {"class_path": "escnn_attention.training.RotMNIST", "init_args": {"batch_size": 16}},
    }
    config["data"]["init_args"]["folder"] = str(tmp_path / "data")
    file = tmp_path / "rotmnist_c2.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return Run("a CNN 3×3", file, {f"{DATA}.limit_test": 5}, "C2", 96.5, "convolution")


def test_changes_reach_the_configuration(run):
    config = run.configuration({"trainer.max_epochs": 2, f"{NETWORK}.widths": [7], "model.optimizer.init_args.lr": 1})
    assert config["model"]["network"]["init_args"]["widths"] == [7]
    assert config["model"]["network"]["init_args"]["gspace"] == _SPACE
    assert config["model"]["optimizer"] == {"init_args": {"lr": 1}}
    assert config["trainer"]["max_epochs"] == 2
    assert config["data"]["init_args"]["limit_test"] == 5
    assert run.configuration()["model"]["network"]["init_args"]["widths"] == [2]
    assert run.name == "rotmnist_a_cnn_3x3"


def test_a_run_is_trained_once(run, tmp_path, monkeypatch):
    result = execute(run, tmp_path, {}, seed=1)
    assert 0 <= result["accuracy"] <= 1
    assert result["seed"] == 1
    assert len(result["curve"]) == 1
    requested = yaml.safe_load((tmp_path / f"{run.name}-1" / "requested.yaml").read_text(encoding="utf-8"))
    assert requested["seed_everything"] == 1

    def again(*_):
        raise AssertionError("it was trained again")

    monkeypatch.setattr("examples.experiments.runs.run_experiment", again)
    assert execute(run, tmp_path, {}, seed=1) == result
    monkeypatch.undo()
    # What is there is never given for the result of another request, however often that is made.
    for _ in range(2):
        with pytest.raises(UserError, match="label_smoothing"):
            execute(run, tmp_path, {"model.label_smoothing": 0.1}, seed=1)


def test_tables(run, tmp_path, capsys):
    other = Run("another", run.base, {f"{NETWORK}.widths": [3]}, "C2")
    out = tmp_path / "out"
    results = execute_all("table", [run, other], out, small="narrow ones", seed=2, accelerator="cpu")
    rows = json.loads((out / "table-small.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in rows] == ["a CNN 3×3", "another"]
    assert [(row["published"], row["kind"]) for row in rows] == [(96.5, "convolution"), (None, "attention")]
    assert [row["weights_sha256"] for row in rows] == [result["weights_sha256"] for result in results]
    assert str(tmp_path) not in json.dumps(rows)
    page = (out / "table-small.md").read_text(encoding="utf-8")
    assert page == markdown([run, other], results, "narrow ones")
    lines = page.splitlines()
    assert lines[2].startswith(f"| a CNN 3×3 | {100 * results[0]['accuracy']:.2f} | 96.50 | {parameters(run)} | 1 |")
    assert "Images: all to train, 5 to test; seed 2" in page
    assert lines[-1] == "Small version: narrow ones."
    assert "SMALL: narrow ones" in capsys.readouterr().out
    # A full version has other files, and folders of its own.
    execute_all("table", [run], out, epochs=2, accelerator="cpu")
    assert "Small" not in (out / "table.md").read_text(encoding="utf-8")
    (row,) = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert len(row["curve"]) == 2


def test_runs_of_several_tables_share_their_files(run):
    other = Run("a CNN", run.base, shared=run.label)
    assert other.name == run.name
    assert Run("a CNN", run.base).name != run.name


def test_images_of_half_the_size(run, tmp_path):
    batches = {}
    for data in (RotMNIST, HalfRotMNIST):
        module = data(tmp_path / "data", batch_size=16, limit_test=5)
        module.setup()
        batches[data] = next(iter(module.train_dataloader())), list(module.test_dataloader())
    (images, labels), test = batches[RotMNIST]
    (half, same), test_of_half = batches[HalfRotMNIST]
    assert half.shape == (16, 1, HalfRotMNIST.size, HalfRotMNIST.size) == (16, 1, 14, 14)
    assert torch.equal(labels, same)
    # But for rounding to a byte, the mean of 2×2 pixels: not one of them.
    step = 1 / 255 / RotMNIST.std[0]
    assert (half - torch.nn.functional.avg_pool2d(images, 2)).abs().max() <= 0.51 * step
    assert (half - images[..., ::2, ::2]).abs().max() > 10 * step
    assert [len(labels) for _, labels in test] == [len(labels) for _, labels in test_of_half] == [5]
    assert (HalfCIFAR10.size, HalfPatchCamelyon.size) == (16, 48)


def test_the_widest_network_within_a_budget():
    for budget in (2_000, 3_000, 3_001, 10_000):
        widths = widest(_network, (1, 2), budget)["init_args"]["widths"]
        assert widths[1] >= 2 * widths[0]
        assert count_parameters(_network(widths)) <= budget
        assert count_parameters(_network([widths[0], widths[1] + 1])) > budget
        assert count_parameters(_network([widths[0] + 1, 2 * (widths[0] + 1)])) > budget
    assert widest(_network, (1, 2), 0)["init_args"]["widths"] == [1, 2]
