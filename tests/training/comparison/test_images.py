import numpy as np
import pytest
import torch

from escnn_attention.training import Digits
from escnn_attention.training.comparison.images import load_images
from escnn_attention.training.errors import UserError


def test_digits_are_the_real_ones(digits):
    assert (len(digits.train), len(digits.valid), len(digits.test)) == (1000, 197, 600)
    assert digits.size == 16
    for part in (digits.train, digits.valid, digits.test):
        assert part.images.dtype == np.float32
        assert part.images.min() == 0
        assert part.images.max() == 1
        # Every class is there in about equal parts.
        counts = np.bincount(part.labels, minlength=10)
        assert counts.min() > 0.08 * len(part)
    everything = np.concatenate([part.images for part in (digits.train, digits.valid, digits.test)])
    assert len({image.tobytes() for image in everything}) > 1790  # no image is in two parts


def test_the_split_is_always_the_same(digits):
    assert load_images("digits").fingerprint() == digits.fingerprint() == "fa408c987934bb54"
    assert digits.limited(10, None).fingerprint() != digits.fingerprint()


def test_digits_are_in_no_folder(tmp_path):
    with pytest.raises(UserError, match="--data-dir"):
        load_images("digits", tmp_path)


def test_unknown_data():
    with pytest.raises(UserError, match="choose one of digits, rotmnist"):
        load_images("imagenet")


def test_an_experiment_trains_on_the_same_images(digits):
    data = digits.limited(100, None)
    described = data.describe(batch_size=64)
    assert described["class_path"] == "escnn_attention.training.Digits"
    module = Digits(**described["init_args"], seed=0)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [64, 36]
    images = torch.cat([images for images, _ in batches])
    expected = data.normalised(data.train.images)
    assert {image.numpy().tobytes() for image in images} == {image.numpy().tobytes() for image in expected}
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3
    valid = list(module.val_dataloader())
    assert torch.equal(torch.cat([images for images, _ in valid]), data.normalised(data.valid.images))
