"""The formula between points: from one set to another, against a loop over pairs."""

import itertools
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import PointSelfAttention, working_memory
from escnn_attention.functional import BETWEEN_POINTS, PointCall
from escnn_attention.functional.points.call import PairScores, PairTables
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Points
from tests.functional.points.calls import GivenBias

RULES = {
    "everything": Neighbourhood(),
    "ball": Neighbourhood(radius=1.5),
    "nearest": Neighbourhood(num_neighbours=2),
    "edges": torch.tensor([[0, 3, 3, 4, 1, 0], [0, 0, 1, 2, 2, 4]]),
}


def relate(query, key):
    return (key - query).unsqueeze(1).unsqueeze(3).expand(-1, 2, -1, -1, -1, -1)


def keys_of(kind, place, batch, others, other_batch, query):
    """The keys that a query sees, one by one."""
    if kind == "edges":
        return RULES["edges"][0, RULES["edges"][1] == query].tolist()
    found = [j for j in range(len(others)) if other_batch[j] == batch]
    distances = {j: (others[j] - place).norm().item() for j in found}
    if kind == "ball":
        return [j for j in found if distances[j] <= 1.5]
    return sorted(found, key=distances.__getitem__)[:2] if kind == "nearest" else found


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("backend", ["reference", "neighbours", "auto"])
def test_attention_from_points_to_others_is_a_loop_over_pairs(kind, query, normalization, backend):
    torch.manual_seed(0)
    asking, asked = (torch.randn(n, 2, dtype=torch.float64) for n in (6, 5))
    batch, other_batch = torch.tensor([0, 1, 0, 1, 2, 0]), torch.tensor([1, 0, 0, 1, 0])  # the cloud 2 has no keys
    q, k, v = (torch.randn(2, 1, n, 2, 4, dtype=torch.float64) for n in (6, 5, 5))
    measure, weight = torch.randn(5, 2, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)

    def scores(q, keys, seen, mutual):
        assert not mutual
        extra = torch.einsum("ghapkd,hd->hpgak", seen, weight)[None, :, None]
        return PairScores(q / 2, extra=extra)

    tables = PairTables(relate, torch.zeros(2, 2, 2), torch.zeros(2, 1, dtype=torch.long), None, query, "all", measure)
    rule, edges = (Neighbourhood(), RULES[kind]) if kind == "edges" else (RULES[kind], None)
    queries = Points(asking, asking, edges, batch, rule)
    keys = Points(asked, asked, None, other_batch, Neighbourhood())
    options = {"query": query, "normalization": normalization}
    call = PointCall(q, k, v, GivenBias(tables, scores), queries, keys, **options)
    expected = torch.zeros(2, 1, 6, 2, 4, dtype=torch.float64)
    for m, i, h in itertools.product(range(2), range(6), range(2)):
        near = keys_of(kind, asking[i], batch[i], asked, other_batch, i)
        pairs = list(itertools.product(near, range(2)))
        if not pairs:
            continue
        mass = torch.stack([measure[j, p] for j, p in pairs])
        for other in [h] if query == "own" else range(2):
            found = [q[m, 0, i, other] @ k[m, 0, j, p] / 2 + (asked[j] - asking[i]) @ weight[h] for j, p in pairs]
            found = torch.stack(found)
            p = (found + mass).softmax(0) if normalization == "softmax" else found * mass.exp() / mass.exp().sum()
            expected[m, 0, i, h] += p @ torch.stack([v[m, 0, j, p] for j, p in pairs])
    for memory in (None, 1):
        with working_memory(memory):
            out = BETWEEN_POINTS.compute(call, backend)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"'dense' .*other positions"):
        BETWEEN_POINTS.compute(call, "dense")


@pytest.mark.parametrize("encoding", ["rotary", "absolute", "fourier", "none"])
@pytest.mark.parametrize("keys", ["all", "own"])
def test_an_encoding_between_two_sets_is_that_within_their_union(encoding, keys):
    """Edges lead from the second set to the first alone."""
    torch.manual_seed(0)
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(fields, fields, head_fields=4, encoding=encoding, keys=keys).double().plain
    x, coords = torch.randn(9, 4, dtype=torch.float64), 3 + torch.randn(9, 2, dtype=torch.float64)
    edges = torch.cartesian_prod(torch.arange(4, 9), torch.arange(4)).T
    one = layer.call(x, Points(coords, coords, edges, None, Neighbourhood()), None)
    queries, others = (Points(t, t, None, None, Neighbourhood()) for t in (coords[:4], coords[4:]))
    two = replace(one, q=one.q[:, :, :4], k=one.k[:, :, 4:], v=one.v[:, :, 4:])
    two = replace(two, query_points=queries, key_points=others)
    expected = BETWEEN_POINTS.compute(one, "reference")[:, :, :4]
    for backend in ("reference", "neighbours", "auto"):
        torch.testing.assert_close(BETWEEN_POINTS.compute(two, backend), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(BETWEEN_POINTS.compute(one, "neighbours")[:, :, :4], expected, rtol=1e-11, atol=1e-11)


def test_edges_between_two_sets_are_checked():
    x = torch.zeros(3, 2)
    points = Points(x, x, torch.tensor([[4], [0]]), None, Neighbourhood())
    with pytest.raises(ValueError, match=r"edge_index: .*needed numbers from"):
        points.neighbours(Points(x[:2], x[:2], None, None, Neighbourhood()))


@pytest.mark.parametrize(
    "clouds", [{"edge_index": torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]])}, {"batch": torch.tensor([0, 1, 1])}]
)
@pytest.mark.parametrize("backend", ["reference", "neighbours"])
def test_what_is_not_finite_does_not_fill_up_lists(clouds, backend):
    """Of lists of different lengths and of clouds of different sizes, of which the first point is in none but one."""
    fields = FieldType(gspaces.rot2dOnR2(2), [gspaces.rot2dOnR2(2).regular_repr])
    layer = PointSelfAttention(fields, fields, head_fields=2, backend=backend)
    x = torch.randn(3, 2)
    x[0] = torch.nan
    x.requires_grad_()
    y = layer.plain(x, torch.randn(3, 2), **clouds)
    (grad,) = torch.autograd.grad(y.sum(), x)
    for found in (y, grad):
        assert found.isfinite().all(1).tolist() == [False, True, True]
