"""The recipes: what they train, and that they run."""

import functools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("sklearn")

from matplotlib.figure import Figure
from typer.testing import CliRunner

from escnn_attention.training import Classifier
from escnn_attention.training.comparison import Settings
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.network import build_described
from escnn_attention.training.modules.scheduled import adam
from examples.experiments.report import mean_and_error
from examples.experiments.runs import NETWORK, Run
from examples.experiments.twins import parameters
from examples.recipes import ablations, cli, figures, heads, tables
from tests import samples

TINY = ["--seeds", "2", "--epochs", "1", "--group", "c2", "--limit-train", "32", "--limit-test", "10"]


def _call(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [tables.rotmnist, functools.partial(tables.rotmnist, full_train=True), tables.short])
@pytest.mark.slow
def test_the_hybrid_and_its_twin_differ_in_their_attention_only(make):
    steerable, hybrid, *_ = make()
    assert parameters(hybrid) == pytest.approx(parameters(steerable), rel=0.05)
    ours, theirs = hybrid.configuration(), steerable.configuration()
    network, twin = (config["model"].pop("network")["init_args"] for config in (ours, theirs))
    assert ours == theirs
    assert network.pop("class_token")
    assert not any(twin["attention"])
    assert not twin["class_token"]
    assert network["gspace"] == twin["gspace"]


def test_trainings_of_rotated_mnist():
    runs, every = tables.rotmnist(), tables.rotmnist(full_train=True)
    for alone in runs[2:]:
        assert parameters(alone) < 44_670  # of the published networks
    assert [run.configuration()["data"]["init_args"].pop("full_train", False) for run in every] == [True] * len(runs)
    names = [run.name for run in (*runs, *every, *tables.short())]
    assert len({*names}) == len(names)  # each has a folder of its own
    # A network knows the rotations of its group, and gets the others.
    for run in runs:
        config = run.configuration()
        order = config["model"]["network"]["init_args"]["gspace"]["init_args"]["N"]
        assert config["data"]["init_args"]["rotate_train"] == 360 / order


@pytest.mark.sampled(4, of="commands of the examples")
def test_rotmnist_writes_its_table(tmp_path, monkeypatch):
    np.savez(tmp_path / "rotmnist.npz", **samples.rotmnist(train=64, valid=8, test=8))
    narrow = {f"{NETWORK}.widths": [2, 2, 2], "trainer.enable_progress_bar": False}
    runs = [Run(run.label, run.base, narrow, run.group, run.published, run.kind) for run in tables.rotmnist()[:1]]
    monkeypatch.setattr(tables, "rotmnist", lambda: runs)
    options = ["--epochs", "1", "--accelerator", "cpu", "--data-dir", tmp_path, "--out", tmp_path / "out"]
    assert "steerable CNN" in _call("rotmnist", *options)
    (row,) = json.loads((tmp_path / "out" / "rotmnist.json").read_text(encoding="utf-8"))
    assert (row["label"], row["group"], row["kind"]) == ("steerable CNN", "C8", "convolution")
    assert (tmp_path / "out" / "rotmnist.png").stat().st_size > 1000


def test_the_figure_shows_means_and_errors(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1])
    curves = [
        [{"seconds": 90.0, "valid_accuracy": a}, {"seconds": 60.0, "valid_accuracy": a + 0.02}] for a in (0.9, 0.96)
    ]
    found = [
        {"accuracy": a, "parameters": 60_000, "curve": curve} for a, curve in zip((0.97, 0.99), curves, strict=True)
    ]
    figures.draw_accuracies(tmp_path / "figure.png", tables.rotmnist()[:1], [found])
    left, right = drawn[0].axes
    np.testing.assert_allclose(left.lines[0].get_xydata(), [[1, 93], [2, 95]])
    np.testing.assert_allclose(left.collections[0].get_paths()[0].get_extents().get_points()[:, 1], [90, 98])
    np.testing.assert_allclose(right.containers[0].lines[0].get_xydata(), [[60, 98]])
    assert len(right.texts) == len(figures.PUBLISHED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ablations.VARIANTS)
@pytest.mark.slow
def test_every_variant_is_another_training(name):
    settings = Settings(group="c4", parameters=900, epochs=5)
    variants, seen = ablations.VARIANTS[name], set()
    for changes in variants.values():
        config = ablations.configuration(name, changes, settings)
        model, augmented = config["model"], config["data"]["init_args"].get("rotate_train")
        options = model["optimizer"]["init_args"]
        module = Classifier(**model | {"network": build_described(model["network"]), "optimizer": adam})
        torch.optim.AdamW(module.parameters(), **options)
        told = (model["schedule"], model["warm_up"], model["label_smoothing"], options, augmented)
        seen.add(f"{module.network} {module.ema} {module.decay} {told}")
    assert len(seen) == len(variants)


@pytest.mark.sampled(4, of="commands of the examples")
def test_means_and_errors_of_a_table(tmp_path, monkeypatch):
    variants = {"the recipe": {}, "wider": {f"{NETWORK}.widths": [3, 3]}}
    monkeypatch.setattr(ablations, "VARIANTS", {"steerable": variants})
    monkeypatch.setattr(ablations, "Settings", functools.partial(Settings, parameters=600))
    arguments = ["ablations", *TINY, "--out", tmp_path, "--networks", "steerable"]
    _call(*arguments)
    page = (tmp_path / "ablations.md").read_text(encoding="utf-8")
    assert [line.split(" | ")[1] for line in page.splitlines()[2:]] == ["the recipe", "wider"]
    assert all(line.count(" ± ") == 2 for line in page.splitlines()[2:])
    monkeypatch.setattr(ablations, "train", None)  # what is finished is not trained again
    _call(*arguments)
    assert (tmp_path / "ablations.md").read_text(encoding="utf-8") == page
    with pytest.raises(UserError, match=r"--out: .* another network"):  # nor given for another
        _call(*arguments, "--epochs", "2")


def test_every_network_of_the_ablations_has_a_name():
    assert [network.value for network in cli.Network] == list(ablations.VARIANTS)


def test_mean():
    assert mean_and_error([1.0, 2.0, 3.0], 1) == "2.0 ± 0.6"
    assert mean_and_error([1.0], 1) == "1.0"


def test_heads_look_at_as_many_keys_as_they_do():
    uniform = torch.full((2, 3, 1, 4, 5, 5), 1 / 100)
    torch.testing.assert_close(heads.numbers_of_keys(uniform), torch.full((3,), 100.0))
    single = torch.zeros(2, 1, 2, 7, 1, 4, 5, 5)
    single[..., 2, 1, 3] = 1
    torch.testing.assert_close(heads.numbers_of_keys(single), torch.ones(1))
    # Half of the images see one key, the other half 4: the mean of the entropies is that of 2.
    single[0], single[0, ..., 0, 0] = 0, 0.25
    torch.testing.assert_close(heads.numbers_of_keys(single), torch.full((1,), 2.0))


@pytest.mark.sampled(4, of="commands of the examples")
def test_heads_of_every_attention_of_a_network(tmp_path):
    text = _call("heads", "hybrid-digits", "gsa-net-digits", "--images", "4", "--out", tmp_path / "out")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| hybrid", "| gsa"))]
    assert (tmp_path / "out" / "heads.md").read_text(encoding="utf-8").strip() in text
    assert len(rows) == 1 + 3  # of a block; of a lifting and two blocks
    for _, _, untrained, trained in rows:
        before, after = ([float(number) for number in cell.strip(" |").split(", ")] for cell in (untrained, trained))
        assert len(before) == len(after) > 1
        assert min(before + after) >= 1
        assert before != after
