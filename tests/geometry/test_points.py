"""Points, which of them see each other, and features of their edges."""

import pytest
import torch

from escnn_attention.geometry.neighbours import Lists, Neighbourhood, WholeClouds
from escnn_attention.geometry.points import Points, among, features_of_shown, pair_rows, ranks


def test_points_see_their_clouds_or_those_of_their_edges():
    x, batch = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 1])
    points = Points(x, x, None, batch, Neighbourhood())
    assert points.whole
    assert isinstance(points.neighbours(points), WholeClouds)
    assert points.neighbours(points) is points.clouds() is Points(x, x, None, batch, Neighbourhood()).clouds()
    assert points.clouds().sizes == [3, 2]
    assert Points(x, x, None, None, Neighbourhood()).clouds().sizes == [5]
    for other in (
        Points(x, x, torch.tensor([[0, 1], [1, 0]]), batch, Neighbourhood()),
        Points(x, x, None, batch, Neighbourhood(num_neighbours=2)),
    ):
        assert not other.whole
        assert isinstance(other.neighbours(other), Lists)


def test_neighbours_are_searched_once_for_coordinates_that_stay(monkeypatch):
    searches, rule = [], Neighbourhood(radius=0.5)
    search = Neighbourhood._by_tree
    monkeypatch.setattr(Neighbourhood, "_by_tree", lambda *a: searches.append(0) or search(*a))
    x = torch.tensor([[0.0, 0.0], [0.4, 0.0], [2.0, 0.0]])

    def degrees():
        points = Points(x, x, None, None, rule)
        return points.neighbours(points)._degree.tolist()

    assert degrees() == degrees() == [2, 2, 1]
    assert len(searches) == 1
    x[2, 0] = 0.8
    assert degrees() == [2, 3, 2]
    assert len(searches) == 2


BATCH = torch.tensor([1, 0, 1, 1, 0, 2, 1])
MASK = torch.tensor([True, True, False, True, True, True, True])


@pytest.mark.parametrize("writes", [False, True])
def test_ranks(writes, monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", writes)
    cpu = torch.device("cpu")
    assert ranks(None, None, 7, cpu).tolist() == list(range(7))
    assert ranks(BATCH, None, 7, cpu).tolist() == [0, 0, 1, 2, 1, 0, 3]
    of_seen = ranks(BATCH, MASK, 7, cpu)
    assert of_seen[MASK].tolist() == ranks(BATCH[MASK], None, 6, cpu).tolist() == [0, 0, 1, 1, 0, 2]
    assert ranks(None, MASK, 7, cpu)[MASK].tolist() == list(range(6))


def test_every_pair_has_its_row():
    """By the numbers of cloud, query and key, written into the table."""
    number = torch.arange(4)
    table = 100 * torch.arange(3)[:, None, None] + 10 * number[:, None] + number
    points = torch.arange(7)[None]
    rows = pair_rows(points, points, BATCH, ranks(BATCH, None, 7, BATCH.device), 4)[0]
    rank = [0, 0, 1, 2, 1, 0, 3]
    for i in range(7):
        for j in range(7):
            if BATCH[i] == BATCH[j]:
                assert table.flatten()[rows[i, j]] == 100 * BATCH[i] + 10 * rank[i] + rank[j]


def test_tables_without_points_that_are_hidden_are_those_of_the_others():
    table = torch.randn(3, 4, 4, 2)
    points, left = torch.arange(7)[None], torch.arange(6)[None]
    rows = pair_rows(points, points, BATCH, ranks(BATCH, None, 7, BATCH.device), 4)[0][MASK][:, MASK]
    moved = features_of_shown(table, MASK, None, BATCH)
    found = pair_rows(left, left, BATCH[MASK], ranks(BATCH[MASK], None, 6, BATCH.device), 4)[0]
    alike = BATCH[MASK][:, None] == BATCH[MASK]
    assert torch.equal(moved.flatten(0, 2)[found[alike]], table.flatten(0, 2)[rows[alike]])
    assert moved.count_nonzero() == 2 * (2 * 2 + 3 * 3 + 1)


def test_what_is_hidden_reaches_nothing():
    table = torch.randn(1, 7, 7, 1)
    table[0, 2], table[0, :, 2] = torch.nan, torch.nan
    assert features_of_shown(table, MASK, None, None).isfinite().all()
    edges, features = torch.tensor([[0, 2, 3], [1, 1, 2]]), torch.tensor([[1.0], [torch.nan], [torch.inf]])
    assert features_of_shown(features, MASK, edges, None).tolist() == [[1.0]]


def test_edges_among_some_points():
    mask = torch.tensor([True, False, True, True])
    edges = among(mask.nonzero().squeeze(-1), mask, torch.tensor([[0, 1, 3, 2], [2, 2, 0, 1]]))
    assert edges is not None
    assert edges.tolist() == [[0, 2], [1, 0]]
