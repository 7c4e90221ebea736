"""The experiments of attentive group convolutions: what they train, and that they run."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("jsonargparse")
from jsonargparse import ArgumentParser
from typer.testing import CliRunner

from escnn_attention.training import CIFAR10, PatchCamelyon, RotMNIST
from escnn_attention.training.modules.classifier import Classifier
from examples.attentive_convolutions import cli, costs, tables
from examples.experiments.runs import DATA, NETWORK
from examples.experiments.twins import parameters
from tests import samples

h5py = pytest.importorskip("h5py")

CONFIGURATIONS = sorted((Path(tables.__file__).parent / "configurations").glob("*.yaml"))
DATA_SETS = {"rotmnist": RotMNIST, "cifar10": CIFAR10, "pcam": PatchCamelyon}
QUIET = samples.QUIET | {f"{DATA}.{name}": 4 for name in ("batch_size", "limit_valid", "limit_test")}


def rounded(count):
    """As the paper prints it: in thousands with two decimals, or in millions."""
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.2f}K"


def test_table_1_is_that_of_the_paper():
    runs = tables.table_1(small=False)
    assert [(run.label, round(100 - run.published, 3), rounded(parameters(run))) for run in runs] == [
        ("p4-CNN", 2.048, "24.61K"),
        ("α_RH-p4-CNN", 1.980, "24.85K"),
        ("BIG19-p4-CNN", 1.796, "77.54K"),
        ("α-p4-CNN", 1.696, "73.13K"),
        ("BIG15-p4-CNN", 1.848, "50.41K"),  # printed as 50.42K; it is 50,415
        ("α_CH-p4-CNN", 1.825, "48.63K"),
        ("α_SP-p4-CNN", 1.761, "49.11K"),
        ("BIG11-p4-CNN", 1.996, "29.05K"),
        ("α_F-p4-CNN", 1.795, "29.46K"),
    ]


@pytest.mark.sampled(1, of="networks of attentive convolutions")
def test_table_1_by_the_recipe_has_the_networks_of_the_paper():
    """But for the dropout; and the training is that of the small versions."""
    paper, (*ours, plain, attentive) = tables.table_1(small=False), tables.table_1(small=False, recipe=True)

    def described(run):
        network = run.configuration()["model"]["network"]
        return run.label, run.published, network | {"init_args": network["init_args"] | {"dropout": 0}}

    assert list(map(described, ours)) == list(map(described, paper))
    assert {run.name for run in ours}.isdisjoint(run.name for run in paper)
    small = tables.table_1(small=True)[0].configuration()["model"]
    for run in (*ours, plain, attentive):
        config = run.configuration()
        order = config["model"]["network"]["init_args"]["gspace"]["init_args"]["N"]
        assert order == (4 if run in ours else 8)
        assert config["trainer"]["max_epochs"] == 15
        assert config["model"]["network"]["init_args"]["dropout"] == 0
        assert config["data"]["init_args"] == {"batch_size": 32, "rotate_train": 360 / order}
        for name in ("optimizer", "decay", "schedule", "label_smoothing"):
            assert config["model"][name] == small[name]
    assert (plain.group, plain.kind, attentive.group, attentive.kind) == ("C8", "plain", "C8", "attention")
    assert (plain.published, attentive.published) == (None, None)
    assert (parameters(plain), parameters(attentive)) == (52_892, 55_248)


@pytest.mark.sampled(1, of="networks of attentive convolutions")
def test_table_2_is_that_of_the_paper():
    runs = tables.table_2(small=False)
    plain, augmented = runs[:6], runs[6:]
    assert [rounded(parameters(run)) for run in plain[:4]] == ["1.37M", "1.40M", "1.22M", "1.25M"]
    assert [rounded(parameters(run)) for run in plain[4:]] == ["2.62M", "2.69M"]  # the paper has 2.70
    assert [round(100 - run.published, 2) for run in runs] == [
        *(9.32, 8.8, 7.61, 6.93, 15.72, 10.82),
        *(8.91, 7.05, 7.48, 6.53, 15.4, 10.12),
    ]
    for one, other in zip(plain, augmented, strict=True):
        configurations = [run.configuration() for run in (one, other)]
        assert configurations[1]["data"]["init_args"].pop("augment") is True
        assert configurations[0] == configurations[1]
    assert len({run.name for run in runs}) == len(runs)
    for run in tables.table_2(small=False, learning_rate=0.25):
        rate = run.configuration()["model"]["optimizer"]["init_args"]["lr"]
        assert rate == (0.05 if "ResNet" in run.label else 0.25)


def test_table_3_is_that_of_the_paper():
    runs = tables.table_3(small=False)
    assert [rounded(parameters(run)) for run in runs] == ["130.60K", "129.65K", "140.45K", "124.21K", "141.22K"]
    assert [round(100 - run.published, 2) for run in runs] == [15.93, 12.45, 11.34, 11.64, 10.88]


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.stem)
def test_configurations(file):
    """Every file can be read by the training command, and belongs to a table."""
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Classifier, "model", skip={"network"})
    model = {name: value for name, value in config["model"].items() if name != "network"}
    assert parser.parse_object({"model": model})
    data = DATA_SETS[file.stem.partition("_")[0]]
    assert config["data"]["class_path"].endswith(data.__name__)
    assert config["model"]["network"]["init_args"]["in_channels"] == data.in_channels
    assert config["model"]["network"]["init_args"]["num_classes"] == data.num_classes
    runs = tables.table_1(False) + tables.table_2(False) + tables.table_3(False)
    assert file in {run.base for run in runs}


def test_the_published_training():
    """Appendix B, and the published code where it says nothing."""

    def of(name):
        file = next(file for file in CONFIGURATIONS if file.stem == name)
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = config["model"]
        rest = {name: value for name, value in model.items() if name not in ("network", "optimizer")}
        optimizer = model["optimizer"]["class_path"].rpartition(".")[2], model["optimizer"]["init_args"]
        return config["trainer"]["max_epochs"], config["data"]["init_args"]["batch_size"], *optimizer, rest

    adam = {"lr": 0.001, "weight_decay": 0.0001}
    sgd = {"lr": 0.05, "momentum": 0.9}
    steps = {"schedule": "steps", "milestones": [200, 250, 300]}
    assert of("rotmnist_p4_alpha") == (100, 128, "Adam", adam, {})
    assert of("cifar10_all_cnn_p4m_alpha_f") == (350, 128, "SGD", sgd | {"weight_decay": 0.001}, steps)
    assert of("cifar10_resnet44_p4m") == (300, 128, "SGD", sgd, steps | {"milestones": [50, 100, 150]})
    assert of("pcam_p4_alpha_f") == (100, 64, "Adam", adam, {"schedule": "plateau", "gamma": 0.5, "patience": 20})


@pytest.mark.sampled(1, of="networks of attentive convolutions")
def test_the_small_table_1_has_plain_networks_of_as_many_parameters():
    runs = tables.table_1(small=True)
    plain, attentive = ([parameters(run) for run in runs if run.kind == kind] for kind in ("plain", "attention"))
    for count in attentive:
        assert max(one for one in plain if one <= count) > 0.75 * count


def _run(command, folder, out, monkeypatch, tiny, *more, name=None):
    name = name or command
    monkeypatch.setattr(tables, "_SMALL", tables._SMALL | QUIET | tiny)
    options = ["--small", "--epochs", "1", "--accelerator", "cpu", "--data-dir", str(folder), "--out", str(out), *more]
    result = CliRunner().invoke(cli.app, [command, *options], catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads((out / f"{name}-small.json").read_text(encoding="utf-8"))
    page = (out / f"{name}-small.md").read_text(encoding="utf-8")
    assert tables.SMALL[name] in page
    for row in rows:
        assert len(row["curve"]) == 1
        assert f"| {row['label']} | {100 * row['accuracy']:.2f} |" in page
    return rows


@pytest.mark.sampled(4, of="commands of the examples")
def test_table_1_runs(tmp_path, monkeypatch):
    np.savez(tmp_path / "rotmnist.npz", **samples.rotmnist(train=8, valid=4, test=4))
    monkeypatch.setattr(tables, "_TABLE_1", [row for row in tables._TABLE_1 if row[1] in ("p4", "p4_alpha_f")])
    monkeypatch.setattr(tables, "_WIDTH", 2)
    rows = _run("table1", tmp_path, tmp_path / "out", monkeypatch, {})
    assert [row["label"] for row in rows[:2]] == ["p4-CNN", "α_F-p4-CNN"]
    assert all(row["label"].startswith("BIG") for row in rows[2:])
    assert rows[1]["published"] == 98.205


@pytest.mark.sampled(4, of="commands of the examples")
def test_table_3_runs(tmp_path, monkeypatch):
    """On files that are like those of PatchCamelyon."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 8), ("valid", 4), ("test", 4)):
        arrays = {"x": draw.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)}
        arrays["y"] = (np.arange(count) % 2).astype(np.uint8).reshape(count, 1, 1, 1)
        for name, array in arrays.items():
            with h5py.File(tmp_path / f"camelyonpatch_level_2_split_{part}_{name}.h5", "w") as file:
                file.create_dataset(name, data=array)
    monkeypatch.setattr(tables, "_TABLE_3", tables._TABLE_3[2:3])
    (row,) = _run("table3", tmp_path, tmp_path / "out", monkeypatch, {f"{NETWORK}.blocks": 2})
    assert (row["label"], row["group"]) == ("α_F-p4 DenseNet", "p4")


def test_the_small_table_2_has_all_kinds_of_networks():
    runs = tables.table_2(small=True)
    assert [run.label for run in runs] == [run.label for run in tables.table_2(small=False)[:6]]
    for plain, attentive in zip(runs[::2], runs[1::2], strict=True):
        assert parameters(plain) < parameters(attentive) < 60_000
        network, other = (run.configuration()["model"]["network"]["init_args"] for run in (plain, attentive))
        assert network["width"] == other["width"]
        assert (network.get("attention"), other["attention"]) == (None, "features")
    for run in runs:
        config = run.configuration()
        assert config["data"]["class_path"].endswith("HalfCIFAR10")
        assert config["model"]["schedule"] == "one-cycle"
        assert not config["model"]["milestones"]


@pytest.mark.sampled(4, of="commands of the examples")
def test_table_3_without_patch_camelyon(tmp_path, monkeypatch):
    """On images like those of CIFAR-10, of which two classes count; nothing of the paper stands beside them."""
    samples.like_cifar10(monkeypatch, 80)
    monkeypatch.setattr(tables, "_TABLE_3", tables._TABLE_3[-1:])
    monkeypatch.setattr(tables, "_TWO_CLASSES", tables._TWO_CLASSES | {f"{DATA}.limit_train": 16})
    options = ["--data", "cifar10"]
    (row,) = _run("table3", tmp_path, tmp_path / "out", monkeypatch, {}, *options, name="table3-cifar10")
    assert (row["label"], row["published"]) == ("α_F-p4m DenseNet", None)
    assert row["tested"]["configuration"]["data"]["class_path"].endswith("AirplanesAndCars")
    names = {run.name for data in ("pcam", "cifar10") for run in tables.table_3(True, data)}
    assert len(names) == 2
    result = CliRunner().invoke(cli.app, ["table3", *options, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--data" in result.output


def test_learning_rates_have_folders_of_their_own():
    names = {rate: [run.name for run in tables.table_2(False, rate)] for rate in (None, 0.01, 0.25)}
    for i, run in enumerate(tables.table_2(False)):
        assert len({names[rate][i] for rate in names}) == (1 if "ResNet" in run.label else 3)


def test_costs(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "LAYERS", dict(list(costs.LAYERS.items())[3:4]))
    pools = []

    def pool(workers, context):
        pools.append((workers, context.get_start_method()))
        return ThreadPoolExecutor(workers)  # which need not import all anew

    monkeypatch.setattr(costs, "ProcessPoolExecutor", pool)
    options = ["--fields", "2", "--size", "8", "--batch", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["costs", *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert pools == [(1, "spawn")]
    lines = (tmp_path / "costs.md").read_text(encoding="utf-8").splitlines()
    assert result.output.splitlines()[-len(lines) :] == lines
    layer, milliseconds, held, parameters = lines[2].strip("| ").split(" | ")
    assert layer == "`FeatureAttention`, then the same"
    assert 0 <= int(milliseconds) < 60_000
    assert int(held) >= 0
    assert int(parameters) == 2 * 2 * 36 + 2 + 2 * 2 * 4 + 2 * 4 * 49  # convolution, bias, channels, positions


@pytest.mark.parametrize("words", ["table2 --small --learning-rate 0.1", "table1 --small --recipe"])
def test_small_tables_have_trainings_of_their_own(words):
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 2
    assert words.split()[2] in result.output
    with pytest.raises(ValueError, match="recipe: "):
        tables.table_1(small=True, recipe=True)
