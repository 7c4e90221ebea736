import hashlib

import numpy as np
import pytest
import torch
from scipy.interpolate import RectBivariateSpline

from escnn_attention.training import Digits
from escnn_attention.training.data.images.digits import read
from escnn_attention.training.errors import UserError


def test_batches_are_normalised_and_complete():
    data = Digits(batch_size=64, drop_last=False)
    data.prepare_data()
    data.setup()
    batches = list(data.train_dataloader())
    assert [len(labels) for _, labels in batches] == 15 * [64] + [40]
    images = torch.cat([images for images, _ in batches])
    assert images.shape == (1000, 1, 8, 8)
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 197
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 600


def test_the_split_is_always_the_same_and_no_image_is_in_two_parts():
    parts = read(16)
    digest = hashlib.sha256(b"".join(array.tobytes() for name in ("train", "test") for array in parts[name]))
    assert digest.hexdigest()[:16] == "0a63815d422d6aed"
    images = np.concatenate([images for images, _ in parts.values()])
    assert len({image.tobytes() for image in images}) > 1787  # a few are published twice
    for images, labels in parts.values():
        assert (images.min(), images.max()) == (0, 255)
        assert np.bincount(labels, minlength=10).min() > 0.08 * len(labels)


def test_another_normalisation():
    data = Digits(batch_size=64, mean=[0.0], std=[1.0], limit_train=64)
    data.setup("fit")
    ((images, _),) = data.train_dataloader()
    assert (images.min(), images.max()) == (0, 1)
    assert data.mean == (0.0,)
    assert Digits.mean != (0.0,)
    with pytest.raises(UserError, match=r"std: .*one for each"):
        Digits(std=[1.0, 1.0])


def test_a_finer_grid_is_that_of_the_spline_through_the_pixels():
    coarse, fine = read(), read(16)
    for part, (images, labels) in fine.items():
        assert images.shape == (len(labels), 16, 16)
        assert np.array_equal(labels, coarse[part][1])
    assert np.abs(_spline(coarse["train"][0][:20]) - fine["train"][0][:20]).max() < 1
    assert np.abs(fine["train"][0].mean((1, 2)) - coarse["train"][0].mean((1, 2)) * 255 / 16).max() < 6


def _spline(images):
    pixels, finer = np.arange(-8, 16) + 0.5, (np.arange(16) + 0.5) / 2
    splines = [RectBivariateSpline(pixels, pixels, 255 / 16 * np.pad(image, 8)) for image in images]
    return np.stack([spline(finer, finer).clip(0, 255) for spline in splines])


def test_a_data_module_of_a_finer_grid():
    data = Digits(16, batch_size=10, limit_train=10)
    data.setup("fit")
    ((images, _),) = data.train_dataloader()
    assert images.shape == (10, 1, 16, 16)
    assert images.min() == pytest.approx(-data.mean[0] / data.std[0])
    assert data.size == 16
    assert (Digits().size, Digits.size) == (8, 8)


def test_no_coarser_grid():
    with pytest.raises(UserError, match=r"size .*at least 8"):
        Digits(7)
