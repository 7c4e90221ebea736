"""What sets of experiments have in common: runs, twins and tables."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("typer")

from escnn_attention.training import CIFAR10, RotMNIST
from escnn_attention.training.data.base import InMemory
from escnn_attention.training.errors import UserError
from examples.experiments.half_size import HalfCIFAR10, HalfPatchCamelyon, HalfRotMNIST
from examples.experiments.report import execute_all, markdown, marked
from examples.experiments.runs import DATA, NETWORK, Run, execute
from examples.experiments.twins import parameters, parameters_of, widest
from examples.experiments.two_classes import AirplanesAndCars
from tests import samples
from tests.training.experiment.runs import files

_SPACE = {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 2}}


def _network(widths):
    options = {"gspace": _SPACE, "in_channels": 1, "num_classes": 10, "widths": widths}
    options |= {"convolutions": [1] * len(widths), "attention": [0] * len(widths)}
    return {"class_path": "escnn_attention.models.HybridNet", "init_args": options}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small network on small data."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    np.savez(folder / "data" / "rotmnist.npz", **samples.rotmnist(train=32, valid=8, test=8))
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
    config["data"]["init_args"]["folder"] = str(folder / "data")
    file = folder / "rotmnist_c2.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return Run("a CNN 3×3", file, {f"{DATA}.limit_test": 5}, "C2", 96.5, "convolution")


@pytest.fixture(scope="module")
def three(run, tmp_path_factory):
    """A table of three seeds: its folder, the results, and what a figure was to be drawn of."""
    out, drawn = tmp_path_factory.mktemp("three"), []
    (results,) = execute_all(
        "table", [run], out, seeds=3, accelerator="cpu", draw=lambda *arguments: drawn.append(arguments)
    )
    return out, results, drawn


@pytest.fixture
def trained(three, tmp_path):
    """A folder with trainings of these seeds."""
    return shutil.copytree(three[0] / "full", tmp_path / "trained")


CPU = {"trainer.accelerator": "cpu", "trainer.devices": 1}


def test_changes_reach_the_configuration(run):
    config = run.configuration({"trainer.max_epochs": 2, f"{NETWORK}.widths": [7], "model.optimizer.init_args.lr": 1})
    assert config["model"]["network"]["init_args"]["widths"] == [7]
    assert config["model"]["network"]["init_args"]["gspace"] == _SPACE
    assert config["model"]["optimizer"] == {"init_args": {"lr": 1}}
    assert config["trainer"]["max_epochs"] == 2
    assert config["data"]["init_args"]["limit_test"] == 5
    assert run.configuration()["model"]["network"]["init_args"]["widths"] == [2]
    assert run.name == "rotmnist_a_cnn_3x3"
    assert Run(run.label, run.base, variant="lr0.25").name == f"{run.name}_lr0_25"
    assert Run("a CNN", run.base, shared=run.label).name == run.name != Run("a CNN", run.base).name


@pytest.mark.slow
def test_a_run_is_trained_once(run, trained, three, monkeypatch):
    requested = yaml.safe_load((trained / f"{run.name}-1" / "requested.yaml").read_text(encoding="utf-8"))
    assert requested["seed_everything"] == 1

    def again(*_):
        raise AssertionError("it was trained again")

    monkeypatch.setattr("examples.experiments.runs.run_experiment", again)
    result = execute(run, trained, CPU, seed=1)
    assert result == three[1][1]
    assert 0 <= result["accuracy"] <= 1
    assert result["seed"] == 1
    assert len(result["curve"]) == 1
    with pytest.raises(AssertionError, match="trained again"):
        execute(run, trained, CPU, seed=3)
    monkeypatch.undo()
    # What is there is never given for the result of another request, however often that is made, and stays.
    before = files(trained / f"{run.name}-1")
    for _ in range(2):
        with pytest.raises(UserError, match="label_smoothing"):
            execute(run, trained, CPU | {"model.label_smoothing": 0.1}, seed=1)
    assert files(trained / f"{run.name}-1") == before


@pytest.mark.slow
def test_tables(run, trained, tmp_path, capsys):
    other = Run("another", run.base, {f"{NETWORK}.widths": [3]}, "C2")
    out = tmp_path / "out"
    shutil.copytree(trained, out / "small")
    results = [result for (result,) in execute_all("table", [run, other], out, small="narrow ones", accelerator="cpu")]
    rows = json.loads((out / "table-small.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in rows] == ["a CNN 3×3", "another"]
    assert [(row["published"], row["kind"]) for row in rows] == [(96.5, "convolution"), (None, "attention")]
    assert [row["weights_sha256"] for row in rows] == [result["weights_sha256"] for result in results]
    assert not any(str(path) in json.dumps(rows) for path in (tmp_path, run.base.parent))
    page = (out / "table-small.md").read_text(encoding="utf-8")
    assert page == markdown([run, other], [[result] for result in results], "narrow ones")
    lines = page.splitlines()
    assert lines[2].startswith(f"| a CNN 3×3 | {100 * results[0]['accuracy']:.2f} | 96.50 | {parameters(run)} | 1 |")
    assert "Images: all to train, 5 to test; seed 0" in page
    assert lines[-1] == "Small version: narrow ones."
    assert "SMALL: narrow ones" in capsys.readouterr().out
    # A full version has other files, and folders of its own.
    execute_all("table", [run], out, epochs=2, accelerator="cpu")
    assert "Small" not in (out / "table.md").read_text(encoding="utf-8")
    (row,) = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert len(row["curve"]) == 2


def test_several_seeds(run, three):
    """Each has a result of its own, of which the table has the mean and the sample deviation."""
    out, results, drawn = three
    accuracies = np.array([100 * result["accuracy"] for result in results])
    assert len({result["weights_sha256"] for result in results}) == 3
    assert drawn == [((run,), (results,))]
    rows = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert [row["seed"] for row in rows] == [0, 1, 2]
    page = (out / "table.md").read_text(encoding="utf-8")
    assert f"| {accuracies.mean():.2f} ± {accuracies.std(ddof=1) / 3**0.5:.2f} |" in page
    assert "means ± standard errors of 3 seeds, 0, 1, 2" in page
    # Another seed by itself does not take the place of these.
    ((alone,),) = execute_all("table", [run], out, seed=2, accelerator="cpu")
    assert alone == results[2]
    assert (out / "table.md").read_text(encoding="utf-8") == page
    assert "seed 2" in (out / "table-seed2.md").read_text(encoding="utf-8")
    assert marked("table", "small", 3, 2) == "table-small-seeds3-4"


def test_only_some_are_trained(run, trained, tmp_path):
    other = Run("another", run.base, {f"{NETWORK}.widths": [3]}, "C2")
    shutil.copytree(trained, tmp_path / "full")
    ((result,),) = execute_all("table", [other, run], tmp_path, only=[run.label], accelerator="cpu")
    assert [row["label"] for row in json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))] == [run.label]
    assert result["seed"] == 0
    with pytest.raises(UserError, match=r"--only: .*labels of table:"):
        execute_all("table", [other, run], tmp_path, only=[run.label, "a third"], accelerator="cpu")


def test_one_that_fails_does_not_stop_the_others(run, trained, tmp_path, capsys):
    broken = Run("a broken one", run.base, {f"{NETWORK}.widths": [0]})
    shutil.copytree(trained, tmp_path / "out" / "full")
    with pytest.raises(SystemExit) as stopped:
        execute_all("table", [broken, run], tmp_path / "out", accelerator="cpu")
    assert str(stopped.value).startswith("1 of 2 runs failed:\na broken one: ")
    assert "widths: got 0" in str(stopped.value)
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    assert row["label"] == run.label


def test_a_network_that_failed_with_one_seed(run, trained, tmp_path, monkeypatch):
    """Its mean is of those that are there, and says so."""
    shutil.copytree(trained, tmp_path / "out" / "full")

    def failing(run, folder, more, seed):
        if (run.label, seed) == ("another", 1):
            raise RuntimeError("out of memory")
        return execute(run, folder, more, seed)

    monkeypatch.setattr("examples.experiments.report.execute", failing)
    other = Run("another", run.base, {f"{NETWORK}.widths": [3]}, "C2")
    with pytest.raises(SystemExit, match=r"1 of 4 .*\nanother, seed 1"):
        execute_all("table", [run, other], tmp_path / "out", seeds=2, accelerator="cpu")
    lines = (tmp_path / "out" / "table.md").read_text(encoding="utf-8").splitlines()
    assert "±" in lines[2]
    assert "(1 of 2) |" in lines[3]


def test_images_of_half_the_size(run):
    batches = {}
    for data in (RotMNIST, HalfRotMNIST):
        module = data(run.base.parent / "data", batch_size=16, limit_test=5)
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


@pytest.mark.parametrize("late", [0, 100])
def test_two_classes_of_cifar10(monkeypatch, late):
    """The first so many of them, however many others are in front."""
    labels = torch.cat([torch.full((late,), 5), torch.arange(60) % 10])
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    asked = []

    def read(_, folder, parts):
        asked.append(dict(parts))
        return {part: InMemory(images[:limit], labels[:limit]) for part, limit in parts.items()}

    monkeypatch.setattr(CIFAR10, "_read", read)
    data = AirplanesAndCars(batch_size=1, limit_train=4, limit_test=2)
    data.setup()
    for part, loader in (("train", data.train_dataloader()), ("test", data.test_dataloader())):
        pixels = [float(image[0, 0, 0, 0] * data.std[0] + data.mean[0]) for image, _ in loader]
        seen = [(round(255 * pixel) - late, int(label)) for pixel, (_, label) in zip(pixels, loader, strict=True)]
        assert sorted(seen) == [(0, 0), (1, 1), (10, 0), (11, 1)][: data.limits[part]]
    assert len(data.val_dataloader()) == 12
    assert len(asked) == (2 if late else 1)  # few are read where that is enough
    assert data.num_classes == 2


@pytest.mark.slow
def test_the_widest_network_within_a_budget():
    for budget in (1_000, 1_500, 1_501):
        widths = widest(_network, (1, 2), budget)["init_args"]["widths"]
        assert widths[1] >= 2 * widths[0]
        assert parameters_of(_network(widths)) <= budget
        assert parameters_of(_network([widths[0], widths[1] + 1])) > budget
        assert parameters_of(_network([widths[0] + 1, 2 * (widths[0] + 1)])) > budget
    assert widest(_network, (1, 2), 0)["init_args"]["widths"] == [1, 2]


def test_fewer_epochs_have_a_shorter_warm_up(run):
    planned = Run(run.label, run.base, {"trainer.max_epochs": 20, "model.warm_up": 10})
    assert planned.configuration()["model"]["warm_up"] == 10
    assert planned.configuration({"trainer.max_epochs": 4})["model"]["warm_up"] == 2
    assert planned.configuration({"trainer.max_epochs": 4, "model.warm_up": 1})["model"]["warm_up"] == 1
    assert "warm_up" not in run.configuration({"trainer.max_epochs": 4})["model"]
