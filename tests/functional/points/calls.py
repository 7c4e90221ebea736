"""Attention between points whose relation and scores are given as functions."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from escnn_attention.functional import BETWEEN_POINTS, PointCall
from escnn_attention.functional.points.call import PairBias, PairScores, PairTables
from escnn_attention.geometry.neighbours import Neighbourhood, Neighbours
from escnn_attention.geometry.points import Points


class GivenPoints(Points):
    """Points whose neighbours are known."""

    def __init__(self, coords: torch.Tensor, neighbours: Neighbours):
        super().__init__(coords, coords, None, None, Neighbourhood())
        self._given = neighbours

    def neighbours(self, keys: Points) -> Neighbours:
        return self._given


class GivenBias(PairBias):
    """Scores by a function."""

    def __init__(self, tables, function):
        super().__init__(tables)
        self._function = function

    def scores(self, q, keys, seen, mutual):
        return self._function(q, keys, seen, mutual)


class GivenValues(SimpleNamespace):
    """Values by a function."""

    def __call__(self, p, v, seen):
        return self.function(p, v, seen)


def offsets(query, key):
    """A relation that is the same at the three poses of the queries."""
    return (key - query)[:, None, :, None].expand(-1, 3, -1, -1, -1, -1)


def of_products(q, keys, seen, mutual):
    return PairScores(q)


def of_offsets_too(q, keys, seen, mutual):
    """Scores with the sum of the coordinates of an offset."""
    return PairScores(q, extra=seen.sum(-1).permute(1, 3, 0, 2, 4)[None, :, None])


def point_attention(
    q,
    k,
    v,
    coords,
    neighbours,
    relate=offsets,
    scores=of_products,
    *,
    mix=None,
    keys="all",
    log_measure=None,
    backend="auto",
):
    """The output ``(N, M, 3, C)`` of queries ``(N, M, 3, C)``, keys and values ``(N, M, P, C)``."""
    inverse, quotient = torch.zeros(3, coords.shape[1], coords.shape[1]), torch.zeros(3, 1, dtype=torch.long)
    bias = GivenBias(PairTables(relate, inverse, quotient, None, "own", keys, log_measure), scores)
    q, k, v = (t.transpose(0, 1).unsqueeze(1) for t in (q, k, v))
    values = None if mix is None else GivenValues(features=1, function=mix)
    points = GivenPoints(coords, neighbours)
    call = PointCall(q, k, v, bias, points, points, query="own", keys=keys, values=values)
    return BETWEEN_POINTS.compute(call, backend).squeeze(1).transpose(0, 1)
