import hashlib

import numpy as np
import pytest
import torch
from escnn import nn

from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.training import Digits
from escnn_attention.training.comparison.compare import configure
from escnn_attention.training.comparison.measure import (
    grid_symmetries,
    load_images,
    measure_accuracies,
    measure_equivariance_error,
    orient,
)
from escnn_attention.training.comparison.networks import describe_network, gspace_by_name
from escnn_attention.training.comparison.settings import Settings
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.network import build_described


def test_digits_are_the_real_ones(digits):
    assert [len(labels) for _, labels in (digits.train, digits.test)] == [1000, 600]
    assert digits.size == 16
    for images, labels in (digits.train, digits.test):
        assert images.dtype == np.float32
        assert (images.min(), images.max()) == (0, 1)
        # Every class is there in about equal parts.
        assert np.bincount(labels, minlength=10).min() > 0.08 * len(labels)
    everything = np.concatenate([images for images, _ in (digits.train, digits.test)])
    assert len({image.tobytes() for image in everything}) > 1590  # no image is in two parts


def test_the_split_is_always_the_same(digits):
    digest = hashlib.sha256(b"".join(array.tobytes() for part in (digits.train, digits.test) for array in part))
    assert digest.hexdigest()[:16] == "e5bab00686d4cd1c"


def test_digits_are_in_no_folder(tmp_path):
    with pytest.raises(UserError, match="--data-dir"):
        load_images("digits", tmp_path)


def test_unknown_data():
    with pytest.raises(UserError, match="needed digits or rotmnist"):
        load_images("imagenet")


def test_an_experiment_trains_on_the_same_images():
    data = load_images("digits", None, 100)
    described = configure("cnn", data, Settings(group="c4", batch_size=64, parameters=300))["data"]
    assert described["class_path"] == "escnn_attention.training.Digits"
    module = Digits(**described["init_args"], seed=0)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [64, 36]
    images = torch.cat([images for images, _ in batches])
    expected = data.normalised(data.train[0])
    assert {image.numpy().tobytes() for image in images} == {image.numpy().tobytes() for image in expected}
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3


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
    images = np.random.default_rng(0).random((3, size, size), dtype=np.float32)
    found = orient(images, gspace)
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


def test_the_error_tells_the_cnn_apart():
    network = build_described(describe_network("cnn", "c4", 8, 10, 2_000))
    assert measure_equivariance_error(network, gspace_by_name("c4"), 8, 10) > 1e-3
    assert measure_equivariance_error(network, gspace_by_name("c3"), 8, 10) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["steerable", "hybrid", "gsa-net"])
def test_transformed_images_are_recognised_as_well_as_upright_ones(name):
    torch.manual_seed(0)
    network = build_described(describe_network(name, "d4", 8, 10, 1_500)).train()
    with torch.no_grad():  # batch norms see data
        data = load_images("digits", None, 64, 100)
        network(torch.from_numpy(data.train[0][:, None]))
    oriented = orient(data.test[0], gspace_by_name("d4"))
    accuracies = measure_accuracies(network, oriented, data, torch.device("cpu"), 64)
    assert list(accuracies) == list(oriented)
    assert len(accuracies) == 9  # upright, seven elements, any angle
    for element in list(accuracies)[1:-1]:
        assert accuracies[element] == pytest.approx(accuracies["upright"], abs=1e-6)
