import torch

from escnn_attention.plain.resample import Crop, HalvingPool


def test_crop():
    x = torch.arange(5.0).expand(1, 1, 1, 5)
    assert Crop(1)(x[:, :, 0]).tolist() == [[[1.0, 2.0, 3.0]]]


def test_halving_pool_in_three_dimensions():
    x = torch.randn(2, 3, 4, 5, 6)
    for kind, expected in (("max", x[:, :, :2, :3, :2].amax((2, 3, 4))), ("avg", x[:, :, :2, :3, :2].mean((2, 3, 4)))):
        y = HalvingPool(kind, 3)(x)
        assert y.shape == (2, 3, 2, 2, 3)
        torch.testing.assert_close(y[:, :, 0, 0, 0], expected)
