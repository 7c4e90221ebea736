import math

import numpy as np
import pytest
import torch

from escnn_attention.training.data import Digits
from escnn_attention.training.data.images.batches import (
    Batches,
    FlipAndCrop,
    ImagesInMemory,
    RandomRotations,
    flip_and_crop,
    rotate_images,
)
from escnn_attention.training.data.sampling import Draw
from escnn_attention.training.errors import UserError


def images(count=6, channels=3, size=8):
    return torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8)


def test_batches_are_normalised_channel_by_channel():
    pixels = images()
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    batches = Batches(ImagesInMemory(pixels, torch.arange(6)), mean, std)
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
    found = flip_and_crop(pixels, 2, flips, corners)
    for image, flip, (row, column), result in zip(pixels, flips, corners.tolist(), found, strict=True):
        framed = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)))
        window = framed[:, row : row + 8, column : column + 8]
        np.testing.assert_array_equal(result, window[..., ::-1] if flip else window)
    assert torch.equal(found[0], pixels[0])
    assert not torch.equal(found[1], pixels[1])


CHANGES = {
    "flips and crops": lambda seed: FlipAndCrop(40, 4, seed),
    "rotations": lambda seed: RandomRotations(40, 360.0, seed),
}


@pytest.mark.parametrize("make", CHANGES.values(), ids=CHANGES)
def test_what_happens_to_an_image_depends_on_its_index_seed_and_epoch_only(make):
    pixels = images(count=40)

    def augmented(indices, epoch=0, seed=0):
        return make(seed)(pixels[indices], Draw(indices, epoch))

    everything = list(range(40))
    whole = augmented(everything)
    shuffled = [7, 30, 2]
    assert torch.equal(augmented(shuffled), whole[shuffled])
    assert not torch.equal(augmented(everything, epoch=1), whole)
    assert not torch.equal(augmented(everything, seed=1), whole)
    # One object that goes through the epochs does what new ones do.
    one = make(0)
    for epoch in (0, 1, 0):
        assert torch.equal(one(pixels, Draw(everything, epoch)), augmented(everything, epoch))


def test_all_moves_and_both_sides_come_about_equally_often():
    augment = FlipAndCrop(20_000, 4, 0)
    augment(images(count=1), Draw([0], 3))
    assert abs(augment._flips.mean() - 0.5) < 0.02
    for axis in (0, 1):
        counts = np.bincount(augment._moves[:, axis], minlength=9)
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
    rotations = RandomRotations(20_000, 45.0, 0)
    rotations(images(count=1), Draw([0], 3))
    degrees = np.degrees(rotations._angles)
    assert 0 <= degrees.min() < 0.1
    assert 44.9 < degrees.max() <= 45
    assert abs(np.histogram(degrees, 9, (0, 45))[0] / 20_000 - 1 / 9).max() < 0.02


def test_rotated_pixels_are_no_darker_than_black_and_no_lighter_than_white():
    pixels = 16 * torch.randint(0, 2, (20, 1, 8, 8), dtype=torch.uint8)
    found = RandomRotations(20, 360.0, 0, white=16)(pixels, Draw(range(20)))
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
