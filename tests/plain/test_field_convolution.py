"""Convolutions of the fields of each kind."""

import torch

from escnn_attention.plain.field_convolution import FieldConvolution


def test_each_part_reads_its_channels():
    parts = [torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(1, 1, 3, padding=1)]
    x = torch.randn(2, 3, 4, 4)
    expected = torch.cat([parts[0](x[:, [0, 2]]), parts[1](x[:, [1]])], 1)
    torch.testing.assert_close(FieldConvolution(parts, [[0, 2], [1]])(x), expected)
    torch.testing.assert_close(FieldConvolution(parts[:1], [[0, 2]])(x[:, [0, 2]]), expected[:, :3])
