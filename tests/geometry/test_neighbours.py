"""Neighbourhoods against all distances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import grad

from escnn_attention.geometry.neighbours import Lists, Nearest, Neighbourhood, Neighbours, WholeClouds, stretches


def listed(neighbours: Neighbours, number: int, limit: int = 2**40) -> list[set[int]]:
    """The keys of every point, from chunks in which each query occurs once at most, and no key twice."""
    rows: dict[int, set[int]] = {}
    for queries, keys, padded, first, *_ in neighbours.chunks(limit):
        if first is not None:
            assert queries is keys
            assert queries.flatten().tolist() == [*range(first, first + queries.numel())]
        assert queries.shape[0] == keys.shape[0]
        assert queries.shape[1] * keys.numel() <= max(limit, keys.shape[1])
        fills_up = bool((queries < 0).any() or (keys < 0).any())
        # How many of the nearest are within a radius is not read.
        assert padded >= fills_up if isinstance(neighbours, Nearest) else padded == fills_up
        for group, row in zip(queries.tolist(), keys.tolist(), strict=True):
            seen = [j for j in row if j >= 0]
            assert len(set(seen)) == len(seen)
            assert not rows.keys() & {i for i in group if i >= 0}
            rows.update({i: set(seen) for i in group if i >= 0})
    return [rows.get(i, set()) for i in range(number)]


def by_all_distances(distance: torch.Tensor, batch: torch.Tensor, rule: Neighbourhood) -> list[set[int]]:
    """The keys of every point, by the distances ``(N, N)`` of all pairs."""
    expected = []
    for i in range(len(batch)):
        order = sorted((float(distance[i, j]), j) for j in range(len(batch)) if batch[i] == batch[j])
        expected.append({j for d, j in order[: rule.num_neighbours] if rule.radius is None or d <= rule.radius})
    return expected


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_rule_against_all_distances(data):
    number, clouds, dim = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    coords = 10 ** data.draw(st.integers(-3, 3)) * torch.randn(number, dim, generator=generator, dtype=torch.float64)
    batch = torch.randint(clouds, (number,), generator=generator)
    if data.draw(st.booleans()):
        batch = batch.sort().values
    distance = (coords[:, None] - coords).norm(dim=-1)
    radius = data.draw(st.sampled_from([None, 0.3, 0.97, 2.0]))
    if radius is not None:
        radius *= float(distance.max()) if number else 1.0
        radius = radius or 1.0
    nearest = data.draw(st.sampled_from([None, 1, 2, 5, 30]))
    rule = Neighbourhood(radius, nearest)
    expected = by_all_distances(distance, batch, rule)
    assert rule.is_global == (radius is None and nearest is None)
    limit = data.draw(st.sampled_from([1, 5, 20, 2**40]))
    assert listed(rule(coords, batch), number, limit) == expected
    if number and not rule.is_global:
        assert listed(rule._by_distances(coords, WholeClouds(batch)), number, limit) == expected


@pytest.mark.parametrize(("radius", "nearest"), [(None, 2), (1.5, None), (1.5, 2)])
def test_a_distance_of_ones_own(radius, nearest):
    coords, batch = torch.randn(9, 2), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 1])

    def metric(query, key):
        return (query - key).abs().amax(-1)

    rule = Neighbourhood(radius, nearest, metric)
    assert listed(rule(coords, batch), 9) == by_all_distances(metric(coords[:, None], coords), batch, rule)
    assert "metric" not in repr(rule)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_periodic_box_against_all_images(data):
    number, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    period = tuple(data.draw(st.sampled_from([1.0, 2.5, 4.0])) for _ in range(dim))
    sides = torch.tensor(period, dtype=torch.float64)
    coords = 3 * sides * torch.randn(number, dim, generator=generator, dtype=torch.float64)
    batch = torch.randint(3, (number,), generator=generator)
    within = coords - sides * (coords / sides).floor()
    images = torch.cartesian_prod(*dim * [torch.arange(-1.0, 2.0)]).view(-1, dim).double() * sides
    distance = (within[:, None, None] + images - within[None, :, None]).norm(dim=-1).amin(-1)
    radius = data.draw(st.sampled_from([None, 0.2, 0.5])), data.draw(st.sampled_from([None, 1, 3, 30]))
    rule = Neighbourhood(None if radius[0] is None else radius[0] * min(period), radius[1], period=period)
    if rule.is_global:
        return
    expected = by_all_distances(distance, batch, rule)
    assert listed(rule(coords, batch), number) == expected
    assert listed(rule._by_distances(coords, WholeClouds(batch)), number) == expected
    assert listed(rule.between(coords, batch, coords + 2 * sides, batch), number) == expected
    assert "period" not in repr(rule)


def test_points_on_the_faces_of_a_box_are_at_one_place():
    """Rounding may take a coordinate below zero to a whole period, which is none within the box."""
    coords = torch.tensor([[0.0], [5.0], [-1e-30], [-5.0], [2.5]], dtype=torch.float64)
    for rule in (Neighbourhood(0.1, period=(5.0,)), Neighbourhood(None, 4, period=(5.0,))):
        rows = listed(rule(coords), 5)
        assert rows[:4] == [{0, 1, 2, 3}] * 4
        assert listed(Neighbourhood(rule.radius, rule.num_neighbours)(coords), 5) != rows


def test_a_point_is_its_own_neighbour_and_coordinates_may_repeat():
    coords = torch.zeros(3, 2)
    assert listed(Neighbourhood(radius=0.1)(coords), 3) == [{0, 1, 2}] * 3
    for number in (1, 2):
        rule = Neighbourhood(num_neighbours=number)
        for found in (rule(coords), rule._by_distances(coords, WholeClouds(torch.zeros(3, dtype=torch.long)))):
            rows = listed(found, 3)
            assert [len(row) for row in rows] == [number] * 3
            assert all(i in row for i, row in enumerate(rows))


def test_clouds_may_have_any_numbers():
    torch.manual_seed(0)
    coords, batch = torch.randn(12, 2), torch.randint(3, (12,))
    for rule in (Neighbourhood(1.5), Neighbourhood(None, 3), Neighbourhood()):
        assert listed(rule(coords, 2**60 + batch), 12) == listed(rule(coords, batch), 12)


def test_distances_a_few_at_a_time(monkeypatch):
    torch.manual_seed(0)
    coords, batch = torch.randn(30, 3), torch.randint(4, (30,))
    for rule in (Neighbourhood(1.5), Neighbourhood(None, 4), Neighbourhood(1.5, 4)):
        expected = listed(rule(coords, batch), 30)
        for limit in (1, 50, 2**22):
            monkeypatch.setattr("escnn_attention.geometry.neighbours._DISTANCES", limit)
            assert listed(rule._by_distances(coords, WholeClouds(batch)), 30) == expected


@pytest.mark.parametrize("period", [None, (2.0, 2.0)])
def test_distances_need_no_memory_for_all_pairs(monkeypatch, period):
    """As many at once as are asked for, of a few queries each."""
    monkeypatch.setattr("escnn_attention.geometry.neighbours._DISTANCES", 1000)
    sizes = []
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda x, *a, f=torch.Tensor.topk, **k: sizes.append(x.numel()) or f(x, *a, **k)
    )
    one = WholeClouds(torch.zeros(200, dtype=torch.long))
    Neighbourhood(num_neighbours=3, period=period)._by_distances(torch.randn(200, 2), one)
    assert max(sizes) <= 1000
    assert sum(sizes) == 200**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 7])
def test_the_radius_is_the_same_by_tree_and_by_distances(size, dtype):
    """On a lattice many distances are the radius, up to rounding."""
    places = torch.arange(size, dtype=dtype) / 10
    coords = torch.cartesian_prod(places, places)
    cloud = torch.zeros(len(coords), dtype=torch.long)
    for radius in (0.1, 0.2, 0.3, 0.1 * 2**0.5):
        rule = Neighbourhood(radius)
        distances = rule._by_distances(coords, WholeClouds(cloud))
        assert listed(rule(coords, cloud), len(coords)) == listed(distances, len(coords))


def test_edges_go_from_keys_to_queries():
    edges = torch.tensor([[4, 0, 1], [2, 2, 0]])
    assert listed(Lists(edges, 5), 5) == [{1}, set(), {4, 0}, set(), set()]
    assert Lists(torch.zeros(2, 0, dtype=torch.long), 3).chunks(7) == []


def test_a_hub_is_not_paid_for_by_others():
    """Queries with few keys are not filled up to one with many."""
    number = 1000
    hub = torch.stack([torch.arange(number), torch.zeros(number, dtype=torch.long)])
    ring = torch.stack([torch.arange(number).roll(1), torch.arange(number)])
    chunks = Lists(torch.cat([hub, ring[:, 1:]], dim=1), number).chunks(2 * number)
    assert sum(chunk.keys.numel() for chunk in chunks) <= 4 * number


def test_whole_clouds_of_one_size_go_together_and_a_large_one_goes_in_parts():
    chunks = WholeClouds(torch.tensor([5, 5, 3, 3, 3, 3, 9, 9])).chunks(8)
    assert [tuple(p.queries.shape) + tuple(p.keys.shape) for p in chunks] == [(1, 2, 1, 4), (1, 2, 1, 4), (2, 2, 2, 2)]
    assert [p.padded for p in chunks] == [False] * 3
    (chunk,) = WholeClouds(torch.tensor([0, 0, 1])).chunks(100)
    assert chunk.padded
    assert chunk.keys.tolist() == chunk.queries.tolist() == [[0, 1], [2, -1]]


def test_clouds_that_are_filled_up_to_one_size():
    clouds = WholeClouds(torch.tensor([0, 1, 1, 1, 2, 2, 3, 3]))
    assert clouds.sizes == [3, 2, 2, 1]
    assert [chunk.keys.tolist() for chunk in clouds.alike(1.0)] == [[[1, 2, 3]], [[4, 5], [6, 7]], [[0]]]
    assert [chunk.padded for chunk in clouds.alike(1.0)] == [False] * 3
    assert [chunk.keys.tolist() for chunk in clouds.alike(0.0)] == [[[1, 2, 3]], [[4, 5]], [[6, 7]], [[0]]]
    assert [chunk.first for chunk in clouds.alike(1.0)] == [1, 4, 0]
    assert [chunk.first for chunk in WholeClouds(torch.tensor([0, 0, 1, 2, 2])).alike(1.0)] == [None, 2]
    assert [chunk.first for chunk in WholeClouds(torch.tensor([0, 0, 1])).alike(2.0)] == [None]
    first, last = clouds.alike(1.5)
    assert first.keys.tolist() == [[1, 2, 3], [4, 5, -1], [6, 7, -1]]
    assert (first.padded, last.padded, last.keys.tolist()) == (True, False, [[0]])
    assert clouds.alike(1.5)[0] is first
    assert WholeClouds(torch.zeros(0, dtype=torch.long)).alike(1.5) == []


def test_a_single_cloud_is_that_of_one_number():
    for number in (0, 1, 5):
        one, same = WholeClouds.single(number, torch.device("cpu")), WholeClouds(torch.zeros(number, dtype=torch.long))
        for some, others in ((one.alike(1.0), same.alike(1.0)), (one.chunks(4), same.chunks(4))):
            assert [(c.queries.tolist(), c.keys.tolist(), *c[2:]) for c in some] == [
                (c.queries.tolist(), c.keys.tolist(), *c[2:]) for c in others
            ]


@pytest.mark.parametrize("edges", [[[0, 3], [1, 2]], [[0, 1], [1, 3]], [[-1, 1], [0, 2]]])
def test_edges_of_points_that_are_not_there(edges):
    with pytest.raises(ValueError, match=r"edge_index: .*numbers from 0"):
        Lists(torch.tensor(edges), 3)


def test_edges_of_narrow_integers():
    edges = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    for a, b in zip(Lists(edges.int(), 3).chunks(100), Lists(edges, 3).chunks(100), strict=True):
        assert torch.equal(a.queries, b.queries)
        assert torch.equal(a.keys, b.keys)
        assert a.keys.dtype == torch.long


def test_numbered_lists_know_their_edges():
    edges = torch.tensor([[0, 2, 1, 0, 2, 1], [1, 1, 2, 1, 0, 1]])
    for limit in (1, 100):
        found = {}
        for some in Lists(edges, 4, numbered=True).chunks(limit):
            for query, keys, numbers in zip(some.queries, some.keys, some.edges, strict=True):
                assert torch.equal(numbers < 0, keys < 0)
                found |= {n: (k, int(query)) for k, n in zip(keys.tolist(), numbers.tolist(), strict=True) if n >= 0}
        assert [found[n] for n in range(6)] == [tuple(edge) for edge in edges.T.tolist()]
    assert all(some.edges is None for some in Lists(edges, 4).chunks(100))


@pytest.mark.parametrize("numbers", [[4, 4, 7, 5, 5], [2], [], [1, 1, 1], [1, 2, 1]], ids=str)
def test_stretches(numbers):
    which, start = stretches(torch.tensor(numbers, dtype=torch.long))
    _, expected, counts = torch.unique_consecutive(
        torch.tensor(numbers, dtype=torch.long), return_inverse=True, return_counts=True
    )
    assert torch.equal(which, expected)
    assert torch.equal(start, counts.cumsum(0) - counts)


@pytest.mark.parametrize("method", ["chunks", "alike"])
def test_what_a_transform_makes_of_a_cloud_is_not_kept(method):
    def function(x):
        getattr(WholeClouds.single(len(x), x.device), method)(7)
        return x.sum()

    grad(function)(torch.randn(37))
    for some in getattr(WholeClouds.single(37, torch.device("cpu")), method)(7):
        assert not is_functorch_wrapped_tensor(some.queries)
