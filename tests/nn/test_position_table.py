"""Learned tables of positions as fields."""

import pytest
import torch
from escnn import gspaces

from escnn_attention import PositionTable
from tests import spaces

D4 = gspaces.flipRot2dOnR2(4)
GROUPS = [D4, gspaces.flipRot2dOnR2(4, axis=0.0), gspaces.rot2dOnR2(4), gspaces.flip2dOnR2(), gspaces.mirOnR3()]


def drawn(fields, size):
    layer = PositionTable(fields, size).double()
    for weight in layer.plain.table.weights:
        torch.nn.init.normal_(weight)
    return layer


@pytest.mark.parametrize("grid", [3, 4, 5])
@pytest.mark.parametrize("gspace", GROUPS, ids=lambda g: g.name)
def test_equivariant(gspace, grid):
    fields = spaces.mixed(gspace)
    layer, x = drawn(fields, 4), spaces.random_field(fields, *[grid] * gspace.dimensionality)
    assert spaces.grid_error(layer, x) < 1e-12
    assert (layer(x).tensor - x.tensor).std() > 1e-2
    torch.testing.assert_close(layer.export()(x.tensor), layer(x).tensor)


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


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^size: got 0"):
        PositionTable(spaces.mixed(D4), 0)
    with pytest.raises(ValueError, match="does not map a square grid onto itself"):
        PositionTable(spaces.mixed(gspaces.rot2dOnR2(3)), 4)
