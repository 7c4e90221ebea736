import pytest
import torch

from escnn_attention.geometry.clouds import Neighbourhood
from escnn_attention.geometry.pairs import only_visible, times_seen
from escnn_attention.geometry.points import Points

COORDS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [4.0, 0.0], [4.5, 0.0], [9.0, 9.0]])
BATCH = torch.tensor([0, 1, 0, 1, 0, 1])


def stretched(query, key):
    """A distance that stretches the second axis."""
    return (torch.tensor([1.0, 50.0]) * (key - query)).abs().sum(-1)


def from_chunks(points: Points) -> torch.Tensor:
    """The table by the lists that other backends take."""
    number = points.num_positions
    times = torch.zeros(number, number)
    for some in points.neighbours().chunks(2**20):
        for queries, keys in zip(some.queries, some.keys, strict=True):
            for query in queries[queries >= 0]:
                times[query].index_add_(0, keys[keys >= 0], torch.ones(int((keys >= 0).sum())))
    return times


@pytest.mark.parametrize("batch", [None, BATCH], ids=["one", "several"])
@pytest.mark.parametrize("radius", [None, 1.0, 3.5])
@pytest.mark.parametrize("number", [None, 1, 2, 9])
def test_the_table_is_that_of_the_lists(batch, radius, number):
    rule = Neighbourhood(radius, number)
    coords = COORDS + 0.01 * torch.randn(COORDS.shape)  # of those that are as near any may be taken
    found, expected = times_seen(coords, None, batch, rule), from_chunks(Points(coords, coords, None, batch, rule))
    assert found is None if rule.is_global and batch is None else torch.equal(found, expected)
    if found is None:
        assert bool((expected == 1).all())


@pytest.mark.parametrize("rule", [Neighbourhood(2.0, None, stretched), Neighbourhood(None, 2, stretched)], ids=str)
def test_the_table_is_that_of_the_lists_by_another_distance(rule):
    coords = COORDS + torch.randn(COORDS.shape)
    found = times_seen(coords, None, BATCH, rule)
    assert torch.equal(found, from_chunks(Points(coords, coords, None, BATCH, rule)))
    assert not torch.equal(found, times_seen(coords, None, BATCH, Neighbourhood(rule.radius, rule.num_neighbours)))


def test_edges_that_are_there_twice_count_twice():
    edges = torch.tensor([[0, 0, 3], [1, 1, 4]])
    points = Points(COORDS, COORDS, edges, None, Neighbourhood())
    found = times_seen(COORDS, edges, None, Neighbourhood())
    assert found[1, 0] == 2
    assert torch.equal(found, from_chunks(points))


def test_hidden_points_are_clouds_of_their_own():
    mask = torch.tensor([True, False, True, True, False, True])
    measure = torch.tensor([1.0, torch.nan, 1.0, 2.0, torch.nan, 1.0])
    x, coords, _, batch, measure, _ = only_visible(mask, COORDS * torch.nan, COORDS, None, BATCH, measure)
    assert batch[mask].tolist() == BATCH[mask].tolist()
    assert len(set(batch[~mask].tolist())) == 2
    assert not set(batch[~mask].tolist()) & set(batch[mask].tolist())
    assert bool((x[~mask] == 0).all() and (coords[~mask] == 0).all())
    assert measure.tolist() == [1.0, 1.0, 1.0, 2.0, 1.0, 1.0]
