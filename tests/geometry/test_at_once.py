"""A single chunk of all points, as programs that are written down have it."""

import pytest
import torch
import torch.nn.functional as F

from escnn_attention.geometry.at_once import Rows, all_at_once
from escnn_attention.geometry.neighbours import Chunk, Neighbourhood
from escnn_attention.geometry.points import Points
from tests.packages import in_onnx

COORDS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [4.0, 0.0], [4.5, 0.0], [9.0, 9.0]])
BATCH = torch.tensor([3, 1, 3, 1, 3, 1])


def stretched(query, key):
    """A distance that stretches the second axis."""
    return (torch.tensor([1.0, 50.0]) * (key - query)).abs().sum(-1)


def times_seen(chunks: list[Chunk], number: int) -> torch.Tensor:
    """How many times every point sees every other; what fills up is at the end of each row."""
    times = torch.zeros(number, number)
    for some in chunks:
        there = (some.keys >= 0).long()
        assert bool((there.diff(dim=1) <= 0).all())
        assert some.padded or bool((some.queries >= 0).all() & (some.keys >= 0).all())
        for queries, keys in zip(some.queries, some.keys, strict=True):
            for query in queries[queries >= 0]:
                times[query].index_add_(0, keys[keys >= 0], torch.ones(int((keys >= 0).sum())))
    return times


def of_lists(coords, edges, batch, rule) -> torch.Tensor:
    points = Points(coords, coords, edges, batch, rule)
    return times_seen(points.neighbours(points).chunks(2**20), len(coords))


RULES = [
    *(Neighbourhood(radius, number) for radius in (None, 1.0, 3.5) for number in (None, 1, 2, 9)),
    *(Neighbourhood(radius, number, period=(5.0, 3.0)) for radius, number in ((1.5, None), (None, 2), (1.5, 2))),
    *(Neighbourhood(radius, number, stretched) for radius, number in ((2.0, None), (None, 2))),
]


@pytest.mark.parametrize("batch", [None, BATCH], ids=["one", "several"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_points_see_whom_the_lists_have(batch, rule):
    for noise in (0.01, 1.0):  # of those that are as near any may be taken
        coords = COORDS + noise * torch.randn(COORDS.shape)
        found = times_seen([all_at_once(coords, None, batch, rule)], 6)
        assert torch.equal(found, of_lists(coords, None, batch, rule))
    if rule.metric is not None:
        euclidean = Neighbourhood(rule.radius, rule.num_neighbours)
        assert not torch.equal(found, times_seen([all_at_once(coords, None, batch, euclidean)], 6))


def test_edges_that_are_there_twice_and_queries_without_keys():
    edges = torch.tensor([[3, 0, 2, 0], [4, 1, 4, 1]])
    some = all_at_once(COORDS, edges, None, Neighbourhood(), numbered=True)
    found = times_seen([some], 6)
    assert found[1, 0] == 2
    assert torch.equal(found, of_lists(COORDS, edges, None, Neighbourhood()))
    assert some.queries.flatten().tolist() == [-1, 1, -1, -1, 4, -1]
    # The numbers are those of the edges.
    there = some.keys >= 0
    assert torch.equal(edges[0][some.edges[there]], some.keys[there])
    assert torch.equal(edges[1][some.edges[there]], some.queries.expand_as(there)[there])
    assert all_at_once(COORDS, edges, None, Neighbourhood()).edges is None


@pytest.mark.parametrize("rule", [Neighbourhood(), Neighbourhood(3.5), Neighbourhood(None, 2)], ids=str)
def test_points_of_no_cloud_are_none(rule):
    there = torch.tensor([True, False, True, True, False, True])
    found = times_seen([all_at_once(COORDS, None, torch.where(there, BATCH, -1), rule)], 6)
    assert not found[~there].any()
    assert not found[:, ~there].any()
    assert torch.equal(found[there][:, there], of_lists(COORDS[there], None, BATCH[there], rule))
    assert not times_seen([all_at_once(COORDS, None, torch.full((6,), -1), rule)], 6).any()


@pytest.mark.parametrize(
    "rule", [Neighbourhood(3.5), Neighbourhood(3.5, 2), Neighbourhood(3.5, None, stretched)], ids=str
)
@pytest.mark.parametrize("batch", [None, BATCH], ids=["one", "several"])
@pytest.mark.parametrize("nowhere", [torch.nan, torch.inf, -torch.inf])
def test_points_that_are_nowhere_see_themselves_and_nobody_sees_them(nowhere, batch, rule):
    """So that what is not finite stays where it is, and is not lost there."""
    coords = COORDS + 0.01 * torch.randn(COORDS.shape)
    coords[2, 1] = nowhere
    found = times_seen([all_at_once(coords, None, batch, rule)], 6)
    others = torch.arange(6) != 2
    assert found[2].tolist() == found[:, 2].tolist() == [0, 0, 1, 0, 0, 0]
    alone = of_lists(coords[others], None, None if batch is None else batch[others], rule)
    assert torch.equal(found[others][:, others], alone)


@pytest.mark.parametrize("rule", [Neighbourhood(), Neighbourhood(1.0), Neighbourhood(None, 2)], ids=str)
@pytest.mark.parametrize("batch", [None, BATCH[:0]], ids=["one", "several"])
def test_no_points(rule, batch):
    some = all_at_once(COORDS[:0], None, batch, rule)
    assert not (some.queries >= 0).any()


def test_one_long_cloud_does_not_make_all_as_long():
    """Clouds that are about alike are one group each."""
    uneven = all_at_once(torch.randn(200, 2), None, torch.arange(200).clamp(min=100) - 100, Neighbourhood())
    pairs = uneven.queries.numel() * uneven.keys.shape[1]
    assert uneven.keys.shape[1] == 101
    assert pairs <= 3 * 200 * 101
    whole = len(torch.arange(200).clamp(min=100).unique()) * 101**2
    assert pairs < whole / 10
    even = all_at_once(torch.randn(200, 2), None, torch.arange(200) % 13, Neighbourhood())
    assert even.queries.shape == even.keys.shape == (13, 16)
    one = all_at_once(COORDS, None, None, Neighbourhood())
    assert one.queries is one.keys


@pytest.mark.parametrize("batch", [None, BATCH], ids=["one", "several"])
@pytest.mark.parametrize("rule", [Neighbourhood(), Neighbourhood(1.0), Neighbourhood(None, 2)], ids=str)
@pytest.mark.parametrize("pairs", [1, 13, 2**20])
def test_rows_have_the_same_pairs_some_at_a_time(batch, rule, pairs):
    one = all_at_once(COORDS, None, batch, rule)
    chunks = taken(Rows(one, pairs))
    assert torch.equal(times_seen(chunks, 6), times_seen([one], 6))
    assert not torch.equal(times_seen(chunks[1:], 6), times_seen([one], 6))
    sizes = {some.queries.numel() * some.keys.shape[1] for some in chunks}
    assert len({some.queries.shape for some in chunks}) == 1
    of_two = 2 * one.keys.shape[1] * (1 if one.first is not None else one.queries.shape[1])
    assert max(sizes) <= max(pairs, of_two)
    rows = one.queries.shape[1 if one.first is not None else 0]
    assert len(chunks) == -(-rows // max(2, pairs * rows // (one.queries.numel() * one.keys.shape[1])))


def taken(rows: Rows) -> list[Chunk]:
    """What a loop takes."""
    firsts = range(0, int(rows.number), int(rows.step))
    return [rows.some(torch.tensor(first)) for first in firsts]


def test_rows_have_their_edges():
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 0, 0, 0, 0, 1, 2]])
    chunks = taken(Rows(all_at_once(COORDS, edges, None, Neighbourhood(), numbered=True), 24))
    assert [tuple(some.keys.shape) for some in chunks] == [(4, 6), (4, 6)]
    for some in chunks:
        there = (some.keys >= 0) & (some.queries >= 0)
        assert torch.equal(edges[0][some.edges[there]], some.keys[there])
        assert torch.equal(edges[1][some.edges[there]], some.queries.expand_as(there)[there])


class WhoSeesWhom(torch.nn.Module):
    def __init__(self, rule: Neighbourhood):
        super().__init__()
        self.rule = rule

    def forward(self, coords: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        some = all_at_once(coords, None, batch, self.rule)
        return some.queries, some.keys


@pytest.mark.sampled(1, of="exported files")
@pytest.mark.parametrize("rule", [Neighbourhood(None, 5), Neighbourhood(1.1), Neighbourhood(1.1, 5)], ids=str)
def test_onnx_finds_those_that_are_there_and_near(rule):
    """Also in clouds of fewer points than neighbours, at just about the radius, and nowhere."""
    axis = torch.tensor([0.0, 1.1 - 1e-9, 2.2, 3.3 - 2e-9, 0.0, 1.1 + 1e-9, 0.0, 9.0, 9.5], dtype=torch.float64)
    coords, batch = F.pad(axis[:, None], (0, 1)), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3])
    free = {0: torch.export.Dim.AUTO}
    run = in_onnx(WhoSeesWhom(rule), coords[:7], batch[:7], dynamic_shapes=(free, free))
    queries, keys = run(coords, batch)
    found = times_seen([Chunk(queries, keys.sort(1, descending=True)[0], True)], 9)
    assert torch.equal(found, of_lists(coords, None, batch, rule))
    if rule.num_neighbours is None:
        coords[1, 0] = torch.nan
        _, keys = run(coords, batch)
        assert (keys == 1).sum(1).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
