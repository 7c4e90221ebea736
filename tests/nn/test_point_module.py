"""What attention on points is given besides features: edges, clouds, masks and measures."""

from __future__ import annotations

import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import PointSelfAttention, PointTransformerBlock
from tests.nn.points import cloud, mixed


def test_points_that_have_nothing_to_attend_to():
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type)
    x = GeometricTensor(torch.randn(3, in_type.size), in_type, torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(2 such"):
        layer(x, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(3 such"):
        layer(x, torch.zeros(2, 0, dtype=torch.long))
    # An edge from a point that is not there does not count, and a point that is not there needs none.
    edges, mask = torch.tensor([[0, 1, 2], [1, 0, 2]]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(1 such"):
        layer(x, edges, mask=mask)
    assert not layer(x, torch.tensor([[0, 1, 2], [0, 0, 2]]), mask=mask).tensor[1].any()
    with pytest.raises(ValueError, match="mask: hides all points"):
        layer(x, mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"input: .*without points"):
        layer(GeometricTensor(x.tensor[:0], in_type, x.coords[:0]))


def test_masked_points_are_not_there():
    torch.manual_seed(10)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = torch.tensor([True, False, True, True, True, False])
    for rule in ({}, {"radius": 1.5}, {"num_neighbours": 2}):
        layer = PointSelfAttention(in_type, in_type, head_fields=2, **rule).double()
        x = cloud(in_type, 6)
        x.tensor[~mask] = torch.nan
        x.coords[1] = torch.nan
        y = layer(x, batch=batch, mask=mask).tensor
        alone = GeometricTensor(x.tensor[mask], in_type, x.coords[mask])
        torch.testing.assert_close(y[mask], layer(alone, batch=batch[mask]).tensor, rtol=1e-10, atol=1e-11)
        assert not y[~mask].any()
    everyone = torch.combinations(torch.arange(6), with_replacement=True).T
    edges = torch.cat([everyone, everyone.flip(0)], dim=1).unique(dim=1)
    layer = PointSelfAttention(in_type, in_type, head_fields=2).double()
    torch.testing.assert_close(layer(x, edges, mask=mask).tensor, layer(x, mask=mask).tensor, rtol=1e-9, atol=1e-10)


def test_not_a_number_stays_where_it_is_seen():
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type, radius=1.0).double()
    coords = torch.tensor([[0.0, 0.0], [0.5, 0.0], [5.0, 0.0], [5.5, 0.0], [5.2, 0.0]]).double()
    x = torch.randn(5, 4).double()
    x[0] = torch.nan
    y = layer(GeometricTensor(x, in_type, coords)).tensor
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()


def test_a_measure_of_two_is_two_points():
    torch.manual_seed(11)
    space = gspaces.rot2dOnR2(3)
    in_type = mixed(space)
    x = cloud(in_type, 4)
    twice = GeometricTensor(torch.cat([x.tensor, x.tensor[:1]]), in_type, torch.cat([x.coords, x.coords[:1]]))
    measure = torch.tensor([2.0, 1.0, 1.0, 1.0]).double()
    for normalization in ("softmax", "count"):
        layer = PointSelfAttention(in_type, in_type, head_fields=2, normalization=normalization).double()
        torch.testing.assert_close(layer(x, measure=measure).tensor, layer(twice).tensor[:4], rtol=1e-10, atol=1e-11)


def test_bad_inputs():
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, 2 * [space.regular_repr])
    layer = PointSelfAttention(fields, fields)
    x = GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2))
    long = torch.long
    with pytest.raises(TypeError, match="GeometricTensor"):
        layer(x.tensor)
    with pytest.raises(ValueError, match="coords"):
        layer(GeometricTensor(torch.randn(1, 8, 4, 4), fields))
    for error, message, arguments in (
        (TypeError, "edge_index", {"edge_index": torch.zeros(2, 3)}),
        (ValueError, "edge_index", {"edge_index": torch.zeros(3, 2, dtype=long)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), 4)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), -1)}),
        (
            ValueError,
            "different clouds",
            {"edge_index": torch.tensor([[0, 1], [1, 2]]), "batch": torch.tensor([0, 0, 1, 1])},
        ),
        (TypeError, "batch", {"batch": torch.zeros(4)}),
        (ValueError, "batch", {"batch": torch.zeros(3, dtype=long)}),
        (ValueError, "batch", {"batch": torch.full((4,), -1)}),
        (ValueError, "mask", {"mask": torch.ones(4)}),
        (ValueError, "mask", {"mask": torch.ones(3, dtype=torch.bool)}),
        (ValueError, "measure", {"measure": torch.ones(3)}),
        (ValueError, "measure", {"measure": torch.zeros(4)}),
        (ValueError, "measure", {"measure": torch.full((4,), math.inf)}),
        (TypeError, "edge_index", {"edge_index": [[0], [1]]}),
        (TypeError, "mask", {"mask": [True] * 4}),
        (TypeError, "measure", {"measure": 1.0}),
    ):
        with pytest.raises(error, match=message):
            layer(x, **arguments)
    for rule in ({}, {"radius": 1.0}):
        with pytest.raises(ValueError, match=r"coords: .*not finite"):
            PointSelfAttention(fields, fields, **rule)(
                GeometricTensor(torch.randn(4, 8), fields, torch.tensor([[0.0, 1.0]] * 3 + [[math.nan, 0.0]]))
            )
    with pytest.raises(ValueError, match="edge_index"):
        PointSelfAttention(fields, fields, radius=1.0)(x, torch.zeros(2, 1, dtype=long))
    with pytest.raises(ValueError, match="dense"):
        PointSelfAttention(fields, fields, radius=1.0, backend="dense")(x)
    with pytest.raises(ValueError, match="input_shape"):
        layer.evaluate_output_shape((4, 8, 3))
    other = FieldType(space, [space.regular_repr])
    with pytest.raises(ValueError, match="type"):
        layer(GeometricTensor(torch.randn(4, 4), other, torch.randn(4, 2)))


def test_bad_features_of_edges():
    fields = FieldType(gspaces.rot2dOnR2(4), 2 * [gspaces.rot2dOnR2(4).regular_repr])
    layer, without = PointSelfAttention(fields, fields, edge_dim=2), PointSelfAttention(fields, fields)
    x, edges = GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2)), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    batch, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, True, False])
    tables, rows = torch.randn(2, 3, 3, 2), torch.randn(4, 2)
    layer(x, batch=batch, edge_attr=tables)
    layer(x, edges, edge_attr=rows)
    nan = torch.where(torch.arange(3)[:, None] == 1, torch.nan, tables)
    for error, message, arguments in (
        (ValueError, r"got None, .* edge_dim=2; needed \(clouds, points, points, 2\) without edge_index", {}),
        (ValueError, r"got None, .* edge_dim=2; needed \(edges, 2\) with edge_index", {"edge_index": edges}),
        (TypeError, "got list", {"edge_attr": [1.0]}),
        (TypeError, "got torch.int64, needed floating-point", {"edge_attr": tables.long(), "batch": batch}),
        (ValueError, r"shape \(3, 2\) for 4 edges", {"edge_attr": rows[:3], "edge_index": edges}),
        (ValueError, r"shape \(2, 3, 3, 2\) for 4 edges", {"edge_attr": tables, "edge_index": edges}),
        (ValueError, r"shape \(4, 2\) for 1 clouds of up to 4 points", {"edge_attr": rows}),
        (ValueError, "for 1 clouds of up to 4 points", {"edge_attr": tables}),
        (ValueError, "for 2 clouds of up to 3 points", {"edge_attr": tables[:1], "batch": batch}),
        (ValueError, "for 2 clouds of up to 3 points", {"edge_attr": tables[:, :, :2], "batch": batch}),
        (ValueError, r"needed \(clouds, points, points, 2\)", {"edge_attr": tables[..., :1], "batch": batch}),
        (ValueError, r"needed \(edges, 2\)", {"edge_attr": rows[:, :1], "edge_index": edges}),
        (ValueError, "not finite", {"edge_attr": nan, "batch": batch}),
        (ValueError, "not finite", {"edge_attr": rows / 0, "edge_index": edges}),
    ):
        with pytest.raises(error, match=f"edge_attr: .*{message}"):
            layer(x, **arguments)
    # What belongs to no pair of points that are there may be anything.
    layer(x, batch=batch, edge_attr=torch.where(torch.arange(2).view(2, 1, 1, 1) == 1, nan, tables), mask=mask)
    padded = torch.full((2, 5, 5, 2), torch.nan)
    padded[:, :3, :3] = tables
    assert torch.equal(layer(x, batch=batch, edge_attr=padded).tensor, layer(x, batch=batch, edge_attr=tables).tensor)
    for module in (without, PointTransformerBlock(fields, fields)):
        with pytest.raises(ValueError, match=r"edge_attr: .*no edge_dim"):
            module(x, edges, edge_attr=rows)
    with pytest.raises(ValueError, match=r"edge_attr: .*\(edges, 2\)"):
        layer.export()(x.tensor, x.coords, edges, edge_attr=rows[:3])
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="edge_dim"):
            PointSelfAttention(fields, fields, edge_dim=wrong)
    with pytest.raises(TypeError, match="edge_dim"):
        PointSelfAttention(fields, fields, edge_dim=1.5)
