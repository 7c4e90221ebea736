"""The arguments of one attention between points, and the reduction of encodings that transform queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from escnn_attention.functional.call import Call
from escnn_attention.functional.grid.call import Heads
from escnn_attention.functional.grid.fold import Unfold, fold
from escnn_attention.functional.points.bias import PairBias, PairScores, PairTables
from escnn_attention.functional.points.weights import Values
from escnn_attention.geometry.points import Points

MANY = 64
"""With so many points a cloud, on average, fused attention is faster on a CPU."""


@dataclass(frozen=True)
class PointCall(Call):
    """Attention of points to other points, or of points to themselves; B is 1.

    Attributes:
        bias: the terms that positions and poses add to the scores of pairs.
        query_points: the positions of the queries, and which keys each of them sees.
        key_points: the positions of the keys; the same object where queries and keys are the same points.
        q, k, v, query, keys, dropout, normalization: as in :class:`~escnn_attention.functional.call.Call`.
        values: a kernel that values pass through; None for their weighted sum.
        edges: ``(2, M, F)``: by what the features of an edge add to the scores of each head, and by what they change
            the factor 1 of its weights; None without.
        envelope: a function ``(G, A, K)`` of the places of queries ``(G, A, 1, d)`` and keys ``(G, 1, K, d)``, by which
            the measure of a key is multiplied for each query; None without.

    Example:
        >>> import torch
        >>> from escnn_attention import PointSelfAttention
        >>> from escnn_attention.functional import BETWEEN_POINTS
        >>> from escnn_attention.geometry.neighbours import Neighbourhood
        >>> from escnn_attention.geometry.points import Points
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> layer = PointSelfAttention(fields, fields, head_fields=2).plain
        >>> x = torch.randn(5, 2)
        >>> call = layer.call(torch.randn(5, 4), Points(x, x, None, None, Neighbourhood(radius=1.0)), None)
        >>> type(call).__name__, BETWEEN_POINTS.compute(call).shape
        ('PointCall', torch.Size([1, 1, 5, 4, 2]))
    """

    bias: PairBias
    query_points: Points
    key_points: Points
    values: Values | None = field(default=None, kw_only=True)
    edges: Tensor | None = field(default=None, kw_only=True)
    envelope: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, kw_only=True)

    @property
    def num_poses(self) -> int:
        return self.bias.num_poses

    @property
    def one_set(self) -> bool:
        return self.key_points is self.query_points

    @property
    def has_large_clouds(self) -> bool:
        """Whether every point sees its whole cloud, of :data:`MANY` points on average."""
        return self.query_points.mean_size >= MANY

    @property
    def has_sums_to_share(self) -> bool:
        """Whether clouds are large, and of more points on average than a head has channels."""
        return self.has_large_clouds and self.query_points.mean_size > self.q.shape[-1]

    def key(self) -> Hashable | None:
        points, bias, measure = self.query_points, self.bias, self.bias.log_measure
        if points.coordinates.requires_grad and self.dropout:
            return None
        large = self.has_large_clouds
        sums = large and self.has_sums_to_share
        return (
            *(self.q.shape, self.k.shape, self.q.dtype, self.q.device, self.query, self.keys, self.dropout),
            *(self.normalization, self.values is None, self.edges is None, points.whole, large, sums),
            *(self.key_points is points, type(bias), bias.in_frames, bias.tables.offsets, large and bias.factorises),
            *(torch.is_grad_enabled(), points.coordinates.requires_grad),
            measure is not None and measure.requires_grad,
        )


class _Folded(PairBias):
    """Scores that are products of queries and keys alone, seen from one pose."""

    adds_nothing = True

    def __init__(self, tables: PairTables):
        super().__init__(tables)
        self.num_poses = 1

    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        return PairScores(q / math.sqrt(q.shape[-1]))


def fold_points(call: PointCall) -> tuple[PointCall, Unfold | None]:
    """The attention between points to compute instead, and what makes of its output that of the call.

    Absolute and rotary encodings treat every output pose differently before the scores are taken: a head for each.
    """
    bias = call.bias
    if call.keys == "own" and call.k.shape[3] == 1:
        call = replace(call, keys="all")
    if bias.adds_nothing and call.num_poses > 1 and call.query == "all" and call.values is None:
        # Every output pose has the same sum.
        return replace(call, bias=_Folded(bias.tables)), lambda out: out.expand(-1, -1, -1, bias.num_poses, -1)
    if not bias.in_frames:
        return call, None
    points, others = call.query_points.coordinates, None if call.one_set else call.key_points.coordinates
    table, centre = bias.table(points if others is None else others), points.mean(0, keepdim=True)
    if others is not None:
        table, others = replace(table, query_spatial=bias.table(points).spatial), others - centre
    heads = Heads(call.q, call.k, call.v, table, query=call.query, keys=call.keys)
    heads, unfold = fold(heads, points - centre, key_points=others)  # small numbers, where clouds are far away
    bias, modes = _Folded(bias.tables), (heads.query, heads.keys)
    return replace(call, q=heads.q, k=heads.k, v=heads.v, bias=bias, query=modes[0], keys=modes[1]), unfold
