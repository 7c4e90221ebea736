"""Attention between points whose relation and scores are given as functions."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from escnn_attention.functional import BETWEEN_POINTS, PointCall
from escnn_attention.functional.points.call import PairBias, PairTables
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


def point_attention(
    q,
    k,
    v,
    coords,
    neighbours,
    *,
    num_poses,
    relate,
    scores,
    mix=None,
    log_measure=None,
    query="own",
    keys="all",
    normalization="softmax",
    backend="auto",
):
    """The output ``(N, M, H, C)`` of queries ``(N, M, J, C)``, keys and values ``(N, M, P, C)``."""
    inverse = torch.zeros(num_poses, coords.shape[1], coords.shape[1])
    quotient = torch.zeros(num_poses, 1, dtype=torch.long)
    bias = GivenBias(PairTables(relate, inverse, quotient, None, query, keys, log_measure), scores)
    q, k, v = (t.transpose(0, 1).unsqueeze(1) for t in (q, k, v))
    values = None if mix is None else GivenValues(features=1, function=mix)
    query = "all" if q.shape[3] == 1 else query
    points = GivenPoints(coords, neighbours)
    options = {"query": query, "keys": keys, "normalization": normalization, "values": values}
    return (
        BETWEEN_POINTS.compute(PointCall(q, k, v, bias, points, points, **options), backend).squeeze(1).transpose(0, 1)
    )
