import pytest
import torch

from escnn_attention.training import Digits
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


def test_another_normalisation():
    data = Digits(batch_size=64, mean=[0.0], std=[1.0], limit_train=64)
    data.setup("fit")
    ((images, _),) = data.train_dataloader()
    assert (images.min(), images.max()) == (0, 1)
    assert data.mean == (0.0,)
    assert Digits.mean != (0.0,)
    with pytest.raises(UserError, match="std: got 2 numbers, needed one for each channel, 1"):
        Digits(std=[1.0, 1.0])
