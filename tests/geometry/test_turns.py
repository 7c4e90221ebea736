"""Points in rings, which see their neighbours alike."""

from __future__ import annotations

import pytest
import torch

from escnn_attention import SphereGrid
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.turns import Turns, points_in_rings, turns_of
from tests.nn.spheres import ROTATIONS, scalars


def pairs(neighbours, limit: int) -> set[tuple[int, int]]:
    """Who sees whom; every query is in one chunk, and no chunk is larger than one query of the limit."""
    found: list[tuple[int, int]] = []
    for some in neighbours.chunks(limit):
        whole = some.whole()
        assert whole.keys.numel() <= max(limit, whole.keys.shape[1])
        query, key = torch.broadcast_tensors(whole.queries.unsqueeze(2), whole.keys.unsqueeze(1))
        found += [p for p in zip(query.flatten().tolist(), key.flatten().tolist(), strict=True) if min(p) >= 0]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("limit", [1, 40, 2**20])
@pytest.mark.parametrize("rule", [Neighbourhood(radius=1.03), Neighbourhood(), Neighbourhood(num_neighbours=3)])
def test_neighbours_of_rings(rule, limit):
    grid = SphereGrid(4, 7)
    x, batch, _ = grid.points(torch.randn(2, 2, 4, 7), scalars(ROTATIONS))
    points = points_in_rings(x.coords, x.coords, batch, None, rule)
    assert turns_of(x.coords, batch) == Turns(2, 4, 7)
    shared, each = pairs(points.shared(points), limit), pairs(points.neighbours(points), limit)
    assert shared == each
    if rule.num_neighbours is None:  # which breaks ties in any way
        assert shared == pairs(rule(x.coords, batch), limit)
    else:
        assert len(shared) == 3 * len(x.coords)
    for some in points.shared(points).chunks(limit):
        places = some.whole().keys.view(-1, some.repeats, some.keys.shape[1])
        seen = torch.cat([x.coords, torch.zeros(1, 3)])[places] @ x.coords[some.queries].view(-1, some.repeats, 3, 1)
        torch.testing.assert_close(seen, seen[:, :1].expand_as(seen), rtol=0, atol=1e-6)


def test_poles_have_no_longitude():
    x, batch, _ = SphereGrid(5, 6, "Clenshaw-Curtis").points(torch.randn(1, 2, 5, 6), scalars(ROTATIONS))
    assert turns_of(x.coords, batch) is None
