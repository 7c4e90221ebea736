"""Patches of images as fields."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.group import change_basis
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    FourierEncoding,
    PatchDecoder,
    PatchEmbedding,
    PositionEmbedding,
    PositionTable,
    assert_equivariant,
)
from tests import spaces
from tests.layers import BATCH, MASK
from tests.nn.points import cloud, error_of

D4 = gspaces.flipRot2dOnR2(4)
GROUPS = [D4, gspaces.flipRot2dOnR2(4, axis=0.0), gspaces.rot2dOnR2(4), gspaces.flip2dOnR2(), gspaces.mirOnR3()]


def test_any_kernel_without_its_symmetry_is_not():
    """The negative control."""
    for kind in PatchEmbedding, PatchDecoder:
        layer = kind(spaces.scalars(D4, 2), spaces.mixed(D4), 4).double()
        x = spaces.random_field(layer.in_type, 8, 8)
        kernel = torch.randn(2, 11, 4, 4, dtype=torch.float64)
        layer.plain.table.forward = lambda kernel=kernel: kernel
        assert spaces.grid_error(layer, x) > 0.1


def test_a_kernel_between_fields_is_every_one_that_is_equivariant():
    """As many numbers as the projection of kernels onto the equivariant ones has rank, and a decoder is its adjoint."""
    vectors, fields = FieldType(D4, [D4.irrep(1, 1), D4.trivial_repr]), spaces.mixed(D4)
    layer, decoder = PatchEmbedding(vectors, fields, 3).double(), PatchDecoder(fields, vectors, 3).double()
    numbers = sum(w.numel() for name, w in layer.named_parameters() if "bias" not in name)
    # The trace of the projection: fixed pixels times characters, averaged over the group.
    places = spaces.scalars(D4, 1)(torch.arange(9.0, dtype=torch.float64).view(1, 1, 3, 3))
    total = 0.0
    for g in D4.fibergroup.elements:
        fixed = int((places.transform(g).tensor.round() == places.tensor).sum())
        total += fixed * fields.representation(g).trace() * vectors.representation(g).trace()
    assert numbers == round(total / 8)
    x, y = spaces.random_field(vectors, 6, 6), spaces.random_field(fields, 2, 2)
    kernel = layer.plain.kernel_and_bias(x.tensor)[0].detach()
    decoder.plain.kernel_and_bias = lambda like: (kernel.transpose(0, 1), None)
    torch.testing.assert_close((layer(x).tensor * y.tensor).sum(), (x.tensor * decoder(y).tensor).sum())


def test_representations_that_are_not_orthogonal():
    sheared = FieldType(D4, 2 * [change_basis(D4.irrep(1, 1), np.array([[1.0, 2.0], [0.0, 1.0]]), "sheared")])
    for layer in PatchEmbedding(sheared, sheared, 2), PatchDecoder(sheared, sheared, 2):
        assert_equivariant(layer, (2, 4, 4, 4), tolerance=1e-12)


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


def drawn(fields, size):
    layer = PositionTable(fields, size).double()
    for weight in layer.plain.table.weights:
        torch.nn.init.normal_(weight)
    return layer


@pytest.mark.parametrize("grid", [3, 4, 5])
@pytest.mark.parametrize("gspace", GROUPS, ids=lambda g: g.name)
def test_equivariant_position_table(gspace, grid):
    fields = spaces.mixed(gspace)
    layer, x = drawn(fields, 4), spaces.random_field(fields, *[grid] * gspace.dimensionality)
    assert spaces.grid_error(layer, x) < 1e-12
    assert (layer(x).tensor - x.tensor).std() > 1e-2


@pytest.mark.parametrize(("gspace", "mode"), [(D4, "bicubic"), (gspaces.octaOnR3(), "trilinear")])
def test_a_table_is_interpolated(gspace, mode):
    fields = spaces.scalars(gspace, 2)
    layer, x = drawn(fields, 4), spaces.random_field(fields, *[5, 4, 7][: gspace.dimensionality])
    field = torch.nn.functional.interpolate(layer.plain.table(), x.shape[2:], mode=mode)
    torch.testing.assert_close(layer(x).tensor, x.tensor + field)


def test_it_is_every_invariant_field():
    """As many as the field averaged over the group has dimensions, and others are not equivariant."""
    fields = spaces.mixed(D4)
    layer = drawn(fields, 3)
    zeros = fields(torch.zeros(1, fields.size, 3, 3, dtype=torch.float64))
    projection = torch.stack(
        [
            sum(fields(e.view_as(zeros.tensor)).transform(g).tensor.flatten() for g in D4.fibergroup.elements) / 8
            for e in torch.eye(zeros.tensor.numel(), dtype=torch.float64)
        ]
    )
    # The numbers of the table are as many as such fields have dimensions, and none is without an effect.
    dimensions = int(torch.linalg.matrix_rank(projection))
    assert sum(p.numel() for p in layer.parameters()) == dimensions
    columns = [torch.autograd.grad(layer(zeros).tensor.flatten()[i], [*layer.parameters()]) for i in range(99)]
    jacobian = torch.stack([torch.cat([g.flatten() for g in found]) for found in columns])
    assert torch.linalg.matrix_rank(jacobian) == dimensions
    free = fields(torch.randn_like(zeros.tensor))
    assert (free.transform(D4.fibergroup.elements[1]).tensor - free.tensor).abs().max() > 0.1


def test_under_autocast_the_table_keeps_its_precision():
    table = drawn(spaces.mixed(gspaces.rot2dOnR2(4)), 5)
    expected = table.plain.table()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(table.plain.table(), expected)


C4, D3 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", (spaces.PLANE | spaces.VOLUME).values(), ids=spaces.PLANE | spaces.VOLUME)
def test_equivariant_on_grids(make):
    gspace = make()
    fields = spaces.mixed(gspace)
    layer = PositionEmbedding(fields, channels=3).double()
    x = spaces.random_field(fields, *spaces.shape_of(gspace, 4))
    assert spaces.grid_error(layer, x) < 1e-11
    assert (layer(x).tensor - x.tensor).std() > 1e-2


@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", FourierEncoding(3)])
def test_equivariant_at_points(encoding):
    for space in (D3, gspaces.rot2dOnR3(3)):
        fields = spaces.mixed(space)
        layer = PositionEmbedding(fields, encoding=encoding, length_scale=2.0).double()
        x = cloud(fields, 9)
        assert error_of(layer, x, space.fibergroup.elements, batch=BATCH, mask=MASK) < 1e-11
        y = layer(x, BATCH, mask=MASK).tensor
        moved = GeometricTensor(x.tensor, fields, x.coords + 3.0)
        torch.testing.assert_close(layer(moved, BATCH, mask=MASK).tensor, y)
        x.tensor[~MASK] = x.coords[~MASK] = torch.nan
        assert layer(x, BATCH, mask=MASK).tensor.equal(y)
        assert not y[~MASK].any()


def test_equal_from_all_poses_is_not_equivariant():
    fields = spaces.regular(C4, 2)
    layer, x = PositionEmbedding(fields).double(), spaces.random_field(fields, 4, 4)
    assert spaces.grid_error(layer, x) < 1e-12
    layer.plain.inverse_action = torch.eye(2).double().expand(4, -1, -1)
    assert spaces.grid_error(layer, x) > 1e-2


def test_tells_positions_apart_and_takes_any_grid():
    fields = spaces.regular(C4, 1)
    layer = PositionEmbedding(fields)
    y = layer(fields(torch.zeros(1, 4, 5, 7))).tensor
    assert torch.pdist(y[0].flatten(1).T).min() > 1e-4
    assert spaces.grid_error(layer.double(), spaces.random_field(fields, 5, 7)) < 1e-12


def test_bad_arguments():
    scalars, point = spaces.scalars(D4, 1), spaces.POINT["D4 on a point"]()
    fields, square = spaces.regular(C4, 1), "square grid onto itself"

    def embed(gspace, size):
        return lambda: PatchEmbedding(spaces.scalars(gspace, 1), spaces.mixed(gspace), size)

    for message, call in (
        ("^size: got 0", embed(D4, 0)),
        *((square, embed(gspace, 2)) for gspace in (gspaces.rot2dOnR2(8), gspaces.flipRot2dOnR2(4, axis=0.3))),
        ("has no base space", embed(point, 2)),
        (
            r"^input: patches .*4×5",
            lambda: PatchEmbedding(scalars, spaces.mixed(D4), 2)(scalars(torch.zeros(1, 1, 4, 5))),
        ),
        ("^size: got 0", lambda: PositionTable(spaces.mixed(D4), 0)),
        (square, lambda: PositionTable(spaces.mixed(gspaces.rot2dOnR2(3)), 4)),
        *(
            ("needed a function of the position", lambda name=name: PositionEmbedding(fields, encoding=name))
            for name in ("rotary", "none", "convolutional")
        ),
        ("has no base space", lambda: PositionEmbedding(spaces.regular(point, 1))),
        (r"batch: .*a grid", lambda: PositionEmbedding(fields)(fields(torch.zeros(1, 4, 3, 3)), torch.zeros(1))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
