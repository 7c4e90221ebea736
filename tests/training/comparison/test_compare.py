import copy
import importlib.metadata
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import yaml
from escnn import nn

from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.models.registry import description_of
from escnn_attention.nn.summary import count_parameters
from escnn_attention.training import Digits, load_network
from escnn_attention.training.comparison import TITLES, Settings
from escnn_attention.training.comparison.compare import (
    _outline,
    compare,
    configure,
    describe_network,
    grid_symmetries,
    gspace_by_name,
    measure_equivariance_error,
    orient,
    train,
)
from escnn_attention.training.data.base import InMemory
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.network import build_described
from escnn_attention.training.modules.classifier import Classifier
from tests.training.experiment.runs import rows

ALL = ("cnn", "steerable", "hybrid")


def same(results, others):
    """Whether results agree but for the times that they took."""
    return [replace(r, seconds_per_epoch=0) for r in results] == [replace(r, seconds_per_epoch=0) for r in others]


@pytest.mark.slow
def test_the_whole_comparison(tiny):
    results = compare(replace(tiny, networks=",".join(ALL)))
    folder = tiny.folder
    assert [result.network for result in results] == list(ALL)

    table = rows(folder, "results.csv")
    stored = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for row, result, kept in zip(table, results, stored["networks"], strict=True):
        assert kept == asdict(result)
        assert int(row["parameters"]) == result.parameters
        assert float(row["accuracy_upright"]) == result.accuracy_upright
        assert set(result.accuracy_by_element) == {"90°", "180°", "270°"}
        assert result.seconds_per_epoch > 0
        if result.network == "cnn":
            assert result.equivariance_error > 1e-3
        else:
            assert result.equivariance_error < 1e-5
            assert result.accuracy_rotated == pytest.approx(result.accuracy_upright, abs=1e-6)
    assert stored["configuration"]["seed"] == 0
    assert stored["versions"]["torch"] == importlib.metadata.version("torch")  # PyTorch may add a device to its own
    assert stored["hardware"]["cores"] > 0
    tested = json.loads((folder / "hybrid" / "test.json").read_text(encoding="utf-8"))
    assert tested["accuracy"] == tested["accuracy_upright"] == results[2].accuracy_upright
    assert tested["trained"]["configuration"] == tested["tested"]["configuration"]
    for name in ALL:
        assert [row["epoch"] for row in rows(folder / name)] == ["1"]
        assert (folder / name / "last.ckpt").exists()
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.slow
def test_finished_networks_are_measured_and_not_trained_again(tiny, compared, monkeypatch):
    first = compared(tiny)
    monkeypatch.setattr(Classifier, "training_step", lambda *_: 1 / 0)
    assert same(compare(tiny), first)
    with pytest.raises(ZeroDivisionError):  # the control: another network would be trained
        compare(replace(tiny, networks="steerable"))


@pytest.mark.slow
def test_changed_options(tiny, compared):
    compared(tiny)
    with pytest.raises(UserError, match=r"seed_everything \(0 there, 1 now"):
        compare(replace(tiny, seed=1))
    compare(replace(tiny, seed=1, restart=True))
    seeds = [json.loads((tiny.folder / name / "test.json").read_text())["seed"] for name in ("cnn", "cnn.old-1")]
    assert seeds == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"networks": "cnn,resnet"}, "unknown network resnet"),
        ({"networks": ""}, "choose from cnn, steerable"),
        ({"group": "q8"}, "unknown group"),
        ({"learning_rate": 0.0}, "--learning-rate must be positive"),
        ({"learning_rate": float("inf")}, "--learning-rate must be positive and finite"),
        ({"epochs": -1}, "--epochs must be positive"),
        ({"parameters": 0}, "--parameters must be positive"),
        ({"batch_size": -1}, "batch_size"),
        ({"seed": -1}, "seed_everything: got -1, needed an integer from 0"),
        ({"seed": 2**80}, "seed_everything: got"),
        ({"accelerator": "gaudi"}, "accelerator"),
    ],
)
def test_options_that_cannot_be_met(tiny, change, message):
    with pytest.raises(UserError, match=message):
        compare(replace(tiny, **change))


@pytest.mark.slow
def test_group_without_turns_that_keep_the_grid(tiny):
    (result,) = compare(replace(tiny, networks="steerable", group="c3"))
    assert result.accuracy_by_element == {}
    assert result.accuracy_rotated is None
    assert result.equivariance_error is None


@pytest.fixture(scope="module")
def trained(tiny_in, tmp_path_factory):
    """The configuration and the result of a training, of which none is to be changed."""
    settings = tiny_in(tmp_path_factory.mktemp("trained"))
    config = configure("hybrid", settings)
    config["model"]["network"] = describe_network("hybrid", "c4", 16, 10, 300)
    return config, settings.folder, train(config, settings.folder).model.network


@pytest.mark.slow
def test_its_folder_is_that_of_an_experiment(trained, tmp_path):
    _, folder, network = trained
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["model"]["network"]["class_path"] == "escnn_attention.models.HybridNet"
    images, network = torch.randn(2, 1, 16, 16), copy.deepcopy(network.train()).eval()
    with torch.no_grad():
        assert torch.equal(load_network(folder)(images), network(images))
    # The same from a file, to the last bit.
    run_experiment(["fit", "--config", str(folder / "config.yaml"), "--folder", str(tmp_path / "fit")])
    with torch.no_grad():
        assert torch.equal(load_network(tmp_path / "fit")(images), network(images))


def test_weights_are_a_function_of_the_seed(trained, tmp_path):
    config, _, network = trained
    assert config["seed_everything"] == 0
    changed = train({**config, "seed_everything": 1}, tmp_path / "other").model.network.state_dict()
    assert any(not torch.equal(value, changed[name]) for name, value in network.state_dict().items())


def test_an_experiment_trains_on_normalised_images():
    described = configure("cnn", Settings(group="c4", batch_size=64, parameters=300, limit_train=100))["data"]
    assert described["class_path"] == "escnn_attention.training.Digits"
    module = Digits(**described["init_args"], seed=0)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [64, 36]
    images = torch.cat([images for images, _ in batches])
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02


def test_elements_that_keep_the_grid():
    assert list(grid_symmetries(gspace_by_name("c4"))) == ["90°", "180°", "270°"]
    assert set(grid_symmetries(gspace_by_name("c8"))) == {"90°", "180°", "270°"}
    assert list(grid_symmetries(gspace_by_name("c6"))) == ["180°"]
    assert grid_symmetries(gspace_by_name("c3")) == {}
    assert len(grid_symmetries(gspace_by_name("d4"))) == 7


@pytest.mark.parametrize("size", [7, 8])
def test_orientations(size):
    """Elements act as those of escnn; the angles of the rotations are uniform, and part of the test set."""
    gspace = gspace_by_name("d4")
    images = np.random.default_rng(0).integers(256, size=(3, size, size), dtype=np.uint8)
    data = Digits(16, limit_test=3)
    data._sources["test"] = InMemory(torch.from_numpy(images)[:, None])
    found = {name: oriented[:, 0].numpy() for name, oriented in orient(data, gspace).items()}
    images = images.astype(np.float32) / 255
    x = nn.GeometricTensor(torch.from_numpy(images)[:, None], nn.FieldType(gspace, [gspace.trivial_repr]))
    for name, matrix in grid_symmetries(gspace).items():
        element = next(g for g in gspace.fibergroup.elements if np.allclose(gspace.basespace_action(g), matrix))
        np.testing.assert_allclose(found[name], x.transform(element).tensor[:, 0], atol=1e-5, err_msg=name)
        assert sorted(found[name].ravel()) == sorted(images.ravel())
    np.testing.assert_array_equal(found["90°"], np.rot90(images, axes=(1, 2)))
    angles = np.random.default_rng(0).uniform(0, 360, 3)
    for image, angle, rotated in zip(torch.from_numpy(images), angles, found["any angle"], strict=True):
        expected = rotate_images(image, angle).clamp(images.min(), images.max())
        np.testing.assert_allclose(rotated, expected, atol=1e-6)


EQUIVARIANT = ("steerable", "hybrid", "gsa-net")


def build(name, group="c4", size=8, num_classes=10, parameters=900):
    return build_described(describe_network(name, group, size, num_classes, parameters))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", ["c4", "d4"])
@pytest.mark.parametrize("name", TITLES)
@pytest.mark.slow
def test_parameter_counts_are_about_equal(name, group):
    assert count_parameters(build(name, group, parameters=5_000)) == pytest.approx(5_000, rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TITLES)
@pytest.mark.parametrize("size", [7, 8, 12])
def test_sizes(name, size):
    network = build(name, size=size, num_classes=3)
    assert network(torch.randn(2, 1, size, size)).shape == (2, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.parametrize(("group", "size"), [("c4", 7), ("c4", 16), ("d4", 8)])
@pytest.mark.slow
def test_equivariant_networks_are_exactly_so(name, group, size):
    assert measure_equivariance_error(build(name, group, size), gspace_by_name(group), size, 10) < 1e-5


def test_grids_are_halved_where_that_is_exact_and_leaves_enough():
    layers = {}
    for size in (7, 8, 12, 16, 28):
        options = _outline("hybrid", "c4", size)[1]["init_args"]
        layers[size] = [sum(counts) for counts in zip(options["convolutions"], options["attention"], strict=True)]
        assert (sum(options["convolutions"]), sum(options["attention"])) == (3, 1)
    assert layers == {7: [4], 8: [4], 12: [1, 3], 16: [1, 3], 28: [1, 1, 2]}


def test_the_state_of_the_random_numbers_is_left_as_it_was():
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    describe_network("cnn", "c4", 8, 10, 900)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.slow
def test_the_shipped_networks_of_digits_are_those_of_the_defaults(name):
    settings = Settings()
    found = describe_network(name, settings.group, 16, 10, settings.parameters)
    assert found == description_of(f"{name}-digits")


@pytest.mark.parametrize(("name", "order"), [("c2", 2), ("C4", 4), ("c12", 12), ("d1", 2), ("d4", 8), ("D6", 12)])
def test_groups_by_name(name, order):
    assert gspace_by_name(name).fibergroup.order() == order


@pytest.mark.parametrize("name", ["", "so2", "c", "c0", "4", "c4 ", "c-4", "c1", "c64", "d17", "c99999"])
def test_unknown_groups(name):
    with pytest.raises(UserError, match="group"):
        gspace_by_name(name)
