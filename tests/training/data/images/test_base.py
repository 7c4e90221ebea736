from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
import requests
import torch

from escnn_attention.training import CIFAR10, MNIST, QM9, Digits, ModelNet40, PatchCamelyon, RotMNIST
from escnn_attention.training.data.base import Draw, InMemory
from escnn_attention.training.data.images.base import (
    flip_and_crop,
    image_batches,
    random_crops,
    random_rotations,
    rotate_images,
)
from escnn_attention.training.errors import UserError
from tests import samples


def images(count=6, channels=3, size=8):
    return torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8)


def test_batches_are_normalised_channel_by_channel():
    pixels = images()
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    batches = image_batches(InMemory(pixels, torch.arange(6)), mean, std)
    chosen, labels = batches[Draw(range(4, 0, -2))]
    assert labels.tolist() == [4, 2]
    assert chosen.dtype == torch.float32
    expected = (pixels[[4, 2]].double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(chosen.double(), expected, rtol=0, atol=1e-6)
    assert pixels.dtype == torch.uint8  # and unchanged
    torch.testing.assert_close(batches[Draw([4])][0], chosen[:1])


def test_windows_of_framed_images():
    pixels = images(count=5)
    flips = torch.tensor([False, True, False, True, False])
    corners = torch.tensor([[2, 2], [2, 2], [0, 4], [3, 1], [2, 2]])
    found = flip_and_crop(pixels, flips, corners, 2)
    for image, flip, (row, column), result in zip(pixels, flips, corners.tolist(), found, strict=True):
        framed = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)))
        window = framed[:, row : row + 8, column : column + 8]
        np.testing.assert_array_equal(result, window[..., ::-1] if flip else window)
    assert torch.equal(found[0], pixels[0])
    assert not torch.equal(found[1], pixels[1])


def test_all_moves_and_both_sides_come_about_equally_often():
    flips, moves = random_crops(20_000, 4, 0).numbers(np.random.default_rng(3))
    assert abs(flips.mean() - 0.5) < 0.02
    for axis in (0, 1):
        counts = np.bincount(moves[:, axis], minlength=9)
        assert len(counts) == 9
        assert abs(counts / 20_000 - 1 / 9).max() < 0.02


@pytest.mark.parametrize("size", [8, 9])
def test_quarter_turns_move_pixels_only(size):
    pixels = images(size=size)
    for turns in range(-1, 5):
        angles = torch.full((6,), turns * math.pi / 2, dtype=torch.float64)
        expected = torch.rot90(pixels, turns, (2, 3)).float()  # counterclockwise, as in escnn
        torch.testing.assert_close(rotate_images(pixels, angles), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("shape", [(21, 21), (31, 21)])
def test_what_is_somewhere_comes_to_where_its_rotation_is(shape):
    """A smooth bump, of images that need not be squares."""
    y, x = ((torch.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, (-1, 1), strict=True))  # y grows upwards

    def bump(at):
        return 200 * torch.exp(-((x[None] - at[0]) ** 2 + (y[:, None] - at[1]) ** 2) / 8)[None, None]

    for angle in (0.3, 2.0, 4.5):
        rotated = rotate_images(bump((4.0, 1.5)), torch.tensor([angle], dtype=torch.float64))
        c, s = math.cos(angle), math.sin(angle)
        torch.testing.assert_close(rotated, bump((4 * c - 1.5 * s, 4 * s + 1.5 * c)), rtol=0, atol=5.0)
        # The control: the other way round.
        assert (rotated - bump((4 * c + 1.5 * s, -4 * s + 1.5 * c))).abs().max() > 20


def test_angles_are_uniform_up_to_the_largest():
    (angles,) = random_rotations(20_000, 45.0, 0).numbers(np.random.default_rng(3))
    degrees = np.degrees(angles)
    assert 0 <= degrees.min() < 0.1
    assert 44.9 < degrees.max() <= 45
    assert abs(np.histogram(degrees, 9, (0, 45))[0] / 20_000 - 1 / 9).max() < 0.02


def test_rotated_pixels_are_no_darker_than_black_and_no_lighter_than_white():
    pixels = 16 * torch.randint(0, 2, (20, 1, 8, 8), dtype=torch.uint8)
    found = random_rotations(20, 360.0, 0, white=16)(pixels, Draw(range(20)))
    assert found.min() == 0
    assert found.max() == 16
    assert ((found > 1) & (found < 15)).any()


def test_training_images_are_rotated_and_no_others():
    def batches(**options):
        data = Digits(batch_size=50, limit_train=50, limit_valid=20, limit_test=20, **options)
        data.setup()
        return [next(iter(make()))[0] for make in (data.train_dataloader, data.val_dataloader, data.test_dataloader)]

    plain, rotated = batches(), batches(rotate_train=90.0)
    assert (plain[0] - rotated[0]).abs().max() > 0.5
    assert torch.equal(plain[1], rotated[1])
    assert torch.equal(plain[2], rotated[2])
    for degrees, message in ((-1, "rotate_train must be at least 0, got -1"), (400, "must be at most 360, got 400")):
        with pytest.raises(UserError, match=message):
            Digits(rotate_train=degrees)


@pytest.fixture
def folder(tmp_path):
    """A rotmnist.npz with 20 images to train, 7 to validate and 9 to test, labelled by their numbers modulo 10."""
    arrays = samples.rotmnist(train=20, valid=7, test=9)
    numbers = {name: np.arange(len(array)) % 10 for name, array in arrays.items() if name.endswith("labels")}
    np.savez(tmp_path / "rotmnist.npz", **arrays | numbers)
    return tmp_path


def loaded(folder, **options):
    module = RotMNIST(folder, **options)
    module.prepare_data()
    module.setup()
    return module


def test_limits(folder):
    with pytest.warns(UserWarning, match=r"limit_test: .*them are used") as warned:
        module = loaded(folder, batch_size=2, limit_train=5, limit_valid=3, limit_test=100, eval_batch_size=4)
    assert len(warned) == 1
    loaders = module.train_dataloader(), module.val_dataloader(), module.test_dataloader()
    train, valid, test = ([labels.tolist() for _, labels in loader] for loader in loaders)
    assert [len(batch) for batch in train] == [2, 2]
    assert set(itertools.chain(*train)) < set(range(5))
    assert valid == [[0, 1, 2]]
    assert test == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train": 0}, "limit_train must be at least 1"),
        ({"limit_valid": 0}, "limit_valid must be at least 1"),
        ({"limit_test": 0}, "limit_test must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"eval_batch_size": -1}, "eval_batch_size must be at least 1, got -1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_workers": -2}, "num_workers must be at least 0"),
        ({"batch_size": True}, "batch_size must be an integer, got True"),
        ({"batch_size": "8"}, "batch_size must be an integer, got '8'"),
        ({"eval_batch_size": 2.0}, r"eval_batch_size must be an integer, got 2\.0"),
        ({"limit_train": 0.5}, r"limit_train must be an integer, got 0\.5"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"num_workers": False}, "num_workers must be an integer, got False"),
    ],
)
@pytest.mark.parametrize("module", [RotMNIST, MNIST, CIFAR10, PatchCamelyon])
def test_arguments_are_checked_at_once(module, options, message):
    with pytest.raises(UserError, match=message):
        module(**options)


def test_fewer_images_than_processes(folder):
    module = loaded(folder, batch_size=3, limit_test=2)
    module.trainer = samples.process(0, 3)
    with pytest.raises(UserError, match=r"test images .*processes, got 2 for 3"):
        module.test_dataloader()


PUBLISHED = [RotMNIST, MNIST, CIFAR10, PatchCamelyon, ModelNet40, QM9]


@pytest.mark.parametrize("module", PUBLISHED)
def test_without_a_download_the_error_says_what_to_put_where(tmp_path, module):
    data = module(tmp_path, download=False)
    data.prepare_data()
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError) as caught:
        data.setup("fit")
    for part in (str(tmp_path), module.files, "`folder`", "ESCNN_ATTENTION_DATA", "`download`"):
        assert part in str(caught.value)


@pytest.mark.parametrize("module", PUBLISHED)
def test_a_folder_that_does_not_exist(tmp_path, module):
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        module(tmp_path / "nowhere").prepare_data()


@pytest.mark.parametrize("module", PUBLISHED)
def test_offline(tmp_path, module, monkeypatch):
    def refuse(*_, **__):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr("requests.get", refuse)
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)
    with pytest.raises(UserError, match=r"cannot download .*no route"):
        module(tmp_path).prepare_data()
    assert not list(tmp_path.glob("[!.]*"))
