"""The picture of a segmentation that turns with its image."""

from __future__ import annotations

import torch
from escnn import gspaces

from escnn_attention.models import FieldUNet
from examples.segmentation import picture


def test_classes_turn_with_the_image_if_the_network_is_equivariant():
    torch.manual_seed(0)
    image = torch.rand(16, 16)
    for group, turns in ((gspaces.rot2dOnR2(4), True), (gspaces.trivialOnR2(), False)):
        network = FieldUNet(group, 1, 11, widths=(4, 8), convolutions=(1, 1), attention=(0, 0)).eval()
        still, quarter = picture.classes(network, image), picture.classes(network, image.rot90(1))
        assert still.unique().numel() > 1
        assert ((quarter == still.rot90(1)).float().mean() > 0.99) == turns


def test_a_row_for_each_network():
    network = FieldUNet(gspaces.trivialOnR2(), 1, 11, widths=(2, 2), convolutions=(1, 1), attention=(0, 0)).eval()
    figure = picture.draw({"a": network, "b": network}, torch.rand(16, 16), angles=(0.0, 90.0))
    assert len(figure.axes) == 3 * 2 + 1
