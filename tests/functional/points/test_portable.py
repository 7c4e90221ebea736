"""Attention to neighbours: chunks, shapes, measures. The layers' formula: tests/nn/test_point_attention.py."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    PointAttentiveConv,
    PointSelfAttention,
    SphereSelfAttention,
    SphereTransformerBlock,
    assert_equivariant,
    working_memory,
)
from escnn_attention.functional.points.portable import sum_values
from escnn_attention.geometry.neighbours import Lists, WholeClouds
from tests.functional.points.calls import of_offsets_too, point_attention
from tests.nn.points import SPACES, cloud, error_of, mixed, worst_error, written_out

NEIGHBOURS = {
    "lists": Lists(torch.tensor([[0, 1, 2, 3, 4, 4, 1], [0, 0, 0, 2, 2, 3, 4]]), 6),
    "whole clouds": WholeClouds(torch.tensor([1, 0, 1, 1, 0, 2])),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("number", [0, 3])
def test_no_points_and_no_neighbours(number):
    q = random(number, 2, 3, 4)
    out = point_attention(q, q, q, random(number, 2), Lists(torch.zeros(2, 0, dtype=torch.long), number))
    assert torch.equal(out, torch.zeros(number, 2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("backend", ["neighbours", "native"])
def test_pieces_are_dropped_and_made_again(backend, neighbours):
    q, k, v, x = leaves = [t.requires_grad_() for t in (*(random(6, 2, 3, 4) for _ in range(3)), random(6, 2))]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = point_attention(q, k, v, x, NEIGHBOURS[neighbours], scores=of_offsets_too, backend=backend)
        first, second = (torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for _ in range(2))
        torch.testing.assert_close(second, first)
        return first

    whole = gradients()
    with working_memory(1):
        torch.testing.assert_close(gradients(), whole)


EDGES = torch.tensor([[0, 1, 2, 2, 1, 3, 0], [1, 1, 1, 0, 3, 2, 1]])  # one of them twice
BATCH = torch.tensor([1, 0, 1, 0, 0, 2, 1])
MASK = torch.tensor([True, True, False, True, True, False, True])


def features_of(edges: torch.Tensor, edge_dim: int = 2) -> torch.Tensor:
    return torch.randn(edges.shape[1], edge_dim, dtype=torch.float64, requires_grad=True)


def layer_of(kind=PointSelfAttention, space=None, **options):
    fields = mixed(space or gspaces.rot2dOnR2(3))
    return kind(fields, fields, 2, head_fields=3, edge_dim=2, **options).double()


def tables_and_edges(batch: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables of all pairs, NaN where no cloud has points, with all edges within clouds and what they have."""
    rank = torch.tensor([int((batch[:i] == batch[i]).sum()) for i in range(len(batch))])
    queries, keys = (batch[:, None] == batch).nonzero().T
    features = torch.randn(len(keys), 2, dtype=torch.float64)
    tables = torch.full((int(batch.max()) + 1, size, size, 2), torch.nan, dtype=torch.float64)
    tables[batch[queries], rank[queries], rank[keys]] = features
    return tables, torch.stack([keys, queries]), features


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"radius": 1.2}, {"num_neighbours": 2}, {"query": "all"}], ids=str)
def test_tables_say_what_edges_do(options):
    """Clouds in any order, of different sizes; points that are hidden hold anything."""
    torch.manual_seed(3)
    layer = layer_of(**options)
    x = cloud(layer.in_type, 7)
    tables, edges, features = tables_and_edges(BATCH, 4)
    near = (x.coords[edges[0]] - x.coords[edges[1]]).norm(dim=1)
    if "radius" in options:
        edges, features = edges[:, near < 1.2], features[near < 1.2]
    if "num_neighbours" in options:
        first = torch.stack([near[edges[1] == edges[1, e]].sort().values[:2].max() for e in range(len(near))])
        edges, features = edges[:, near <= first], features[near <= first]
    expected = written_out(layer, x, edges, None, features)
    for backend in ("auto", "neighbours"):
        layer.plain.backend = backend
        y = layer(x, batch=BATCH, edge_attr=tables).tensor
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
    if "num_neighbours" in options:
        return
    seen = MASK[edges].all(0)
    expected = written_out(layer, x, edges[:, seen], None, features[seen])
    hidden = GeometricTensor(x.tensor.masked_fill(~MASK[:, None], torch.nan), x.type, x.coords)
    for point, place in {2: 1, 5: 0}.items():
        tables[BATCH[point], place], tables[BATCH[point], :, place] = torch.nan, torch.inf
    y = layer(hidden, batch=BATCH, mask=MASK, edge_attr=tables.requires_grad_()).tensor
    torch.testing.assert_close(y[MASK], expected[MASK], rtol=1e-10, atol=1e-11)
    assert not y[~MASK].any()
    assert all(
        grad.isfinite().all() for grad in torch.autograd.grad(y.square().sum(), [layer.plain.edge_readout, tables])
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [PointSelfAttention, PointAttentiveConv])
@pytest.mark.parametrize("space", ["C3", "D4", "C5 on R3", "inversion"])
def test_equivariance(kind, space):
    torch.manual_seed(4)
    layer = layer_of(kind, SPACES[space]())
    x = cloud(layer.in_type, 7)
    tables, edges, features = tables_and_edges(BATCH, 4)
    assert worst_error(layer, x, batch=BATCH, edge_attr=tables) < 1e-12
    assert worst_error(layer, x, edge_index=edges, edge_attr=features) < 1e-12
    layer.check_equivariance()
    assert_equivariant(layer, (5, layer.in_type.size), tolerance=1e-12)
    if space == "inversion":
        return

    def with_directions(y, **arguments):
        return layer(y, edges, edge_attr=(y.coords[edges[0]] - y.coords[edges[1]])[:, :2])

    with_directions.space = layer.space
    assert worst_error(with_directions, x) > 1e-3  # the coordinates of an offset are no invariants


def test_on_the_sphere():
    """Exact under rotations that take frames to frames; with a block, and hidden points."""
    torch.manual_seed(5)
    space = gspaces.rot3dOnR3()
    fields = FieldType(space, [space.trivial_repr, space.fibergroup.irrep(1)])
    tables, edges, features = tables_and_edges(BATCH, 4)
    x = cloud(fields, 7)
    x = GeometricTensor(x.tensor, fields, x.coords / x.coords.norm(dim=1, keepdim=True))
    about_z = [space.fibergroup.element([0, 0, angle], "EV") for angle in (0.4, 2.5)]
    for layer in (
        SphereSelfAttention(fields, fields, 2, head_fields=2, samples=4, edge_dim=2).double(),
        SphereTransformerBlock(fields, fields, 2, head_fields=2, samples=4, edge_dim=2).double(),
    ):
        assert error_of(layer, x, about_z, batch=BATCH, edge_attr=tables) < 1e-12
        y = layer(x, batch=BATCH, edge_attr=tables).tensor
        torch.testing.assert_close(y, layer(x, edges, edge_attr=features).tensor, rtol=1e-10, atol=1e-11)
        assert (y - layer(x, batch=BATCH, edge_attr=2 * tables).tensor).abs().max() > 1e-3
        seen = MASK[edges].all(0)
        expected = layer(x, edges[:, seen], mask=MASK, edge_attr=features[seen]).tensor
        torch.testing.assert_close(layer(x, batch=BATCH, mask=MASK, edge_attr=tables).tensor, expected)


def test_what_the_readout_does():
    """Without it nothing; with factors of -1 attraction becomes repulsion."""
    torch.manual_seed(6)
    space = gspaces.rot2dOnR2(3)
    fields = mixed(space)
    plain = PointSelfAttention(fields, fields, 2, head_fields=3, bias=False).double()
    layer = PointSelfAttention(fields, fields, 2, head_fields=3, bias=False, edge_dim=1).double()
    layer.plain.load_state_dict(plain.plain.state_dict(), strict=False)
    x, features = cloud(fields, 4), torch.ones(EDGES.shape[1], 1, dtype=torch.float64)
    expected = plain(x, EDGES).tensor
    with torch.no_grad():
        layer.plain.edge_readout.zero_()
        torch.testing.assert_close(layer(x, EDGES, edge_attr=features).tensor, expected)
        layer.plain.edge_readout[1] = -2
        torch.testing.assert_close(layer(x, EDGES, edge_attr=features).tensor, -expected)
        layer.plain.edge_readout[1] = 0
        # What adds the same to all scores of a query drops out, and what does not takes all attention.
        layer.plain.edge_readout[0] = 50
        torch.testing.assert_close(layer(x, EDGES, edge_attr=features).tensor, expected)
        alone = plain(x, torch.stack([torch.arange(4), torch.arange(4)])).tensor
        loops = torch.cat([EDGES, torch.arange(4).expand(2, -1)], dim=1)
        itself = (loops[0] == loops[1]).double()[:, None]
        torch.testing.assert_close(layer(x, loops, edge_attr=itself).tensor, alone)


def test_derivatives_of_the_second_order():
    torch.manual_seed(7)
    layer = layer_of(space=gspaces.flip2dOnR2())
    x = cloud(layer.in_type, 3)
    edges = torch.tensor([[0, 1, 2, 2, 1], [1, 0, 2, 0, 2]])

    def output(features, coords):
        return layer(GeometricTensor(x.tensor, x.type, coords), edges, edge_attr=features).tensor

    assert torch.autograd.gradgradcheck(output, (features_of(edges), x.coords.requires_grad_()))


def test_transforms_go_over_features():
    torch.manual_seed(8)
    layer = layer_of()
    x, several = cloud(layer.in_type, 4), torch.randn(3, EDGES.shape[1], 2, dtype=torch.float64)

    def output(features):
        return layer(x, EDGES, edge_attr=features).tensor

    expected = torch.stack([output(features) for features in several])
    torch.testing.assert_close(torch.vmap(output)(several), expected)
    torch.testing.assert_close(
        torch.func.jvp(output, (several[0],), (several[1],))[1],
        torch.func.jacrev(output)(several[0]).mul(several[1]).sum((-1, -2)),
    )


def test_fused_attention_refuses_edges_with_features():
    layer = layer_of(backend="dense", encoding="none")
    x = cloud(layer.in_type, 4)
    with pytest.raises(ValueError, match=r"backend: .*edges without features"):
        layer(x, edge_attr=torch.randn(1, 4, 4, 2, dtype=torch.float64))
    layer.plain.backend = "auto"
    many = cloud(layer.in_type, 70)  # so many that fused attention would be first
    tables = torch.randn(1, 70, 70, 2, dtype=torch.float64)
    y = layer(many, edge_attr=tables).tensor
    layer.plain.backend = "neighbours"
    torch.testing.assert_close(y, layer(many, edge_attr=tables).tensor)


def test_values_of_poses_by_themselves():
    p, v = random(3, 2, 4, 6, 1, 5), random(3, 2, 4, 1, 5, 6)
    torch.testing.assert_close(sum_values(p, v), torch.einsum("gmhapk,gmhpkc->gmhac", p, v))
    p, v = random(3, 2, 4, 6, 7, 5), random(3, 2, 1, 7, 5, 6)
    torch.testing.assert_close(sum_values(p, v), torch.einsum("gmhapk,gmpkc->gmhac", p, v[:, :, 0]))
