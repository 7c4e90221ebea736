import torch

from escnn_attention.plain.dense import DenseBlock
from escnn_attention.plain.resample import Crop


def test_new_channels_come_first():
    convolution = torch.nn.Conv2d(2, 3, 3)
    x = torch.randn(4, 2, 6, 6)
    y = DenseBlock(convolution, Crop(1))(x)
    torch.testing.assert_close(y, torch.cat([convolution(x), x[..., 1:-1, 1:-1]], 1))
