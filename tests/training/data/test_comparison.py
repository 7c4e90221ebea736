import numpy as np
import pytest

from escnn_attention.training.data import load_data, load_digits
from escnn_attention.training.datamodule import EpochSampler, ImageDataModule
from escnn_attention.training.errors import UserError


def test_digits_are_the_real_ones(digits):
    assert (len(digits.train), len(digits.valid), len(digits.test)) == (1000, 197, 600)
    assert digits.size == 8
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
    assert load_data("digits").fingerprint() == digits.fingerprint()
    assert digits.limited(10, None).fingerprint() != digits.fingerprint()


def test_digits_are_in_no_folder(tmp_path):
    with pytest.raises(UserError, match="--data-dir"):
        load_digits(tmp_path)


def test_unknown_data():
    with pytest.raises(UserError, match="choose one of digits, rotmnist"):
        load_data("imagenet")


def test_batches_are_normalised_and_complete(digits):
    module = ImageDataModule(digits, batch_size=64, seed=0)
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == 15 * [64] + [40]
    images = np.concatenate([images for images, _ in batches])
    assert images.shape == (1000, 1, 8, 8)
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3
    assert sum(len(labels) for _, labels in module.val_dataloader()) == 197


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = EpochSampler(10, 4, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 3) == order(0, 3)
    assert order(0, 3) != order(0, 4)
    assert order(0, 3) != order(1, 3)
    assert sorted([i for batch in order(5, 7) for i in batch]) == list(range(10))
    assert len(EpochSampler(10, 4, 0)) == len(order(0, 0)) == 3
