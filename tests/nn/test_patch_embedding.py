"""Patches of images as fields."""

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import PatchEmbedding
from tests import spaces

D4 = gspaces.flipRot2dOnR2(4)
GROUPS = [D4, gspaces.flipRot2dOnR2(4, axis=0.0), gspaces.rot2dOnR2(4), gspaces.flip2dOnR2(), gspaces.mirOnR3()]


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("gspace", GROUPS, ids=lambda g: g.name)
def test_equivariant(gspace, size):
    layer = PatchEmbedding(spaces.scalars(gspace, 2), spaces.mixed(gspace), size).double()
    torch.nn.init.normal_(layer.plain.bias)
    x = spaces.random_field(layer.in_type, *[2 * size] * gspace.dimensionality)
    assert spaces.grid_error(layer, x) < 1e-12
    assert layer(x).tensor.std() > 0.1
    torch.testing.assert_close(layer.export()(x.tensor), layer(x).tensor)


def test_any_kernel_without_its_symmetry_is_not():
    """The negative control."""
    layer = PatchEmbedding(spaces.scalars(D4, 2), spaces.mixed(D4), 4).double()
    x = spaces.random_field(layer.in_type, 8, 8)
    kernel = torch.randn(2, 11, 4, 4, dtype=torch.float64)
    layer.plain.table.forward = lambda: kernel
    assert spaces.grid_error(layer, x) > 0.1


def test_without_a_group_it_is_the_embedding_of_every_vision_transformer():
    gspace = gspaces.trivialOnR2()
    layer = PatchEmbedding(spaces.scalars(gspace, 3), FieldType(gspace, 5 * [gspace.trivial_repr]), 4)
    kernel, x = torch.randn(5, 3, 4, 4), torch.randn(2, 3, 8, 12)
    layer.plain.table.fill(kernel.transpose(0, 1))
    torch.testing.assert_close(layer(layer.in_type(x)).tensor, F.conv2d(x, kernel, stride=4))


def test_the_kernel_of_regular_fields_is_any_kernel_rotated():
    """As many numbers as without a group, and what was filled in comes out."""
    layer = PatchEmbedding(spaces.scalars(D4, 3), spaces.regular(D4, 1), 4)
    assert sum(w.numel() for w in layer.plain.table.weights) == 3 * 4 * 4
    kernels = layer.plain.table().detach()
    with torch.no_grad():
        for weight in layer.plain.table.weights:
            weight.zero_()
    layer.plain.table.fill(kernels)
    torch.testing.assert_close(layer.plain.table(), kernels)


def test_bad_arguments():
    scalars, fields = spaces.scalars(D4, 1), spaces.mixed(D4)
    with pytest.raises(ValueError, match=r"^size: got 0"):
        PatchEmbedding(scalars, fields, 0)
    with pytest.raises(ValueError, match=r"^in_type: PatchEmbedding needs trivial \(scalar\) fields only"):
        PatchEmbedding(fields, fields, 2)
    for gspace in gspaces.rot2dOnR2(8), gspaces.flipRot2dOnR2(4, axis=0.3):
        with pytest.raises(ValueError, match="does not map a square grid onto itself, needed a group that does"):
            PatchEmbedding(spaces.scalars(gspace, 1), spaces.mixed(gspace), 2)
    point = spaces.POINT["D4 on a point"]()
    with pytest.raises(ValueError, match="has no base space"):
        PatchEmbedding(spaces.scalars(point, 1), spaces.mixed(point), 2)
    with pytest.raises(ValueError, match=r"^input: patches of 2 do not divide a grid of 4×5"):
        PatchEmbedding(scalars, fields, 2)(scalars(torch.zeros(1, 1, 4, 5)))
