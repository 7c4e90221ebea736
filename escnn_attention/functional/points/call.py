"""The arguments of one attention between points: positions, terms of scores, and their reductions."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from escnn_attention.exporting.mode import in_programs, in_rows
from escnn_attention.functional.call import Call, KeyMode, QueryMode
from escnn_attention.functional.grid.call import Heads, PositionalBias
from escnn_attention.functional.grid.fold import Unfold, fold
from escnn_attention.functional.matmul import add_to_each, matmul
from escnn_attention.geometry.points import Points

MANY = 64
"""With so many points a cloud, on average, fused attention is faster on a CPU."""


class Halves(NamedTuple):
    """Poses with their opposites, from which everything looks the other way round.

    Attributes:
        opposite: ``(H,)``, the index of -h.
        half: ``(H / 2,)``, one of each two.
        order: ``(H,)``, where the poses are in this half and the opposites of its poses; None if there, in their order.
    """

    opposite: Tensor
    half: Tensor
    order: Tensor | None


class Relate(Protocol):
    """The relation of two points that an encoding is a function of, from every output pose."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """The relations ``(G, H, A, P or 1, K, D)`` of queries at ``(G, A, 1, d)`` and keys at ``(G, 1, K, d)``."""


@dataclass(frozen=True)
class PairTables:
    """Tables of the group and of the layer for a bias between points.

    Attributes:
        relate: what is seen of two points.
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        quotient: ``(|H|, P)``; the index of h⁻¹ĥ.
        relative: ``(|H|, P, F)``; features of h⁻¹ĥ, or None.
        query, keys: as in :class:`~escnn_attention.functional.call.Call`.
        log_measure: ``(N or 1, P or 1)``, the logarithm of the measure of the keys; None where all are alike.
        halves: of the poses, where what -h sees of two points is the opposite of what h sees; None elsewhere.
        offsets: whether what is seen is the offset, so that there may be a table over the pairs of a cloud.
    """

    relate: Relate
    inverse_action: Tensor
    quotient: Tensor
    relative: Tensor | None
    query: QueryMode
    keys: KeyMode
    log_measure: Tensor | None = None
    halves: Halves | None = None
    offsets: bool = True

    def of_pairs(self, poses: Tensor | None) -> Tensor | None:
        """A table over the pairs of an output and a key pose, by query poses: ``(..., H, J or 1, P or 1)``.

        With keys of the query's own pose that is its entry at ĥ = h̃.

        Args:
            poses: ``(..., H, P)``.
        """
        if poses is None or self.keys == "all" or poses.shape[-1] == 1:
            return None if poses is None else poses.unsqueeze(-2)
        return poses.unsqueeze(-1) if self.query == "all" else poses.diagonal(dim1=-2, dim2=-1)[..., None, None]


class PairBias(ABC):
    """The terms that a layer adds to the scores between points. Encodings and kernels make one from their parameters.

    Args:
        tables: of the group and of the layer.

    Attributes:
        num_poses: the number of output poses.
        log_measure: the logarithm of the measure of the keys, ``(N or 1, P or 1)``.
        in_frames: whether every output pose transforms queries and keys before the scores are taken (absolute and
            rotary encodings), for which there is a :meth:`table` of each cloud.
        factorises: whether scores are products of what queries and keys know by themselves.
        adds_nothing: whether scores are the products of queries and keys, and nothing else.
        num_features: how many functions of the location there are for every pair and output pose.
        widths: how many numbers there are for every score while it is made: of other points, and of the same.
    """

    in_frames: bool = False
    factorises: bool = False
    adds_nothing: bool = False
    num_features: int = 0
    widths: tuple[int, int] = (1, 1)

    def __init__(self, tables: PairTables):
        self.tables = tables
        self.num_poses = len(tables.inverse_action)
        self.log_measure = tables.log_measure

    @abstractmethod
    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        """The terms of the scores of a chunk.

        Args:
            q: ``(G, M, H or 1, J, A, C)``; J is 1 in the own mode.
            keys: gives the keys of the chunk, ``(G, M, H', J', P, K, C)``, where one of H' and J' may be the poses of
                the queries, and P is 1, because a query sees keys of its own pose only; they are 1 otherwise.
            seen: ``(G, H, A, P or 1, K, D)``, the relation to every key as it looks from every output pose.
            mutual: whether the keys are the points of the queries, in the same order.
        """

    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """A linear map of what is seen, ``(F, D)`` and ``(F,)``, whose SiLU are the features, and their readout.

        The readout is ``(M or 1, C, F)``. None where features are no such functions, or where what is seen depends on
        the pose of the key.
        """
        return None

    def read(self, q: Tensor, readout: Tensor) -> PairScores:
        """The terms of :meth:`scores` without the features, which queries read by the readout of their layer."""
        raise NotImplementedError(f"{type(self).__name__} has no layer")

    def why_no_table(self) -> str | None:
        """Why there is no :meth:`table`, or None."""
        return "it is for softmax attention with an encoding"

    def table(self, points: Tensor) -> PositionalBias:
        """The bias over pairs of points where the encoding factorises, without the measure.

        Args:
            points: ``(N, d)``, of which an absolute encoding is a function.
        """
        raise NotImplementedError(f"{type(self).__name__} has no table")


class PairScores(NamedTuple):
    r"""Summands of the scores of a chunk, ``(G, M, H, J, A, P, K)``, to which all terms broadcast.

    Attributes:
        q: ``(G, M, H or 1, J, A, C)``, scaled, whose products with the keys count; None where they do not. J is 1 in
            the own mode.
        poses: ``(M or 1, H, J or 1, P, C)``, what poses add to the keys.
        reads: ``(G, M, H or 1, J, A, F)``, how much of every feature a query sees.
        features: ``(M or 1, H, F, G, A, P or 1, K)``, functions of the location; with fewer groups, so many that follow
            each other share them.
        extra: ``(M, H or 1, J or 1, P or 1, G, A, K)``, numbers by themselves.
        factors: ``(M, G, A, K)``, which multiply the weights that scores have become.
        envelope: ``(G, A, K)``, at least 0, which multiplies the measure of the keys before weights are normalised.
    """

    q: Tensor | None
    poses: Tensor | None = None
    reads: Tensor | None = None
    features: Tensor | None = None
    extra: Tensor | None = None
    factors: Tensor | None = None
    envelope: Tensor | None = None

    def scores(self, keys: Callable[[], Tensor]) -> Tensor:
        """The sum of the terms, for keys ``(G, M, H', J', P, K, C)``."""
        q, poses, parts = self.q, self.poses, []
        if q is not None:
            k = keys()
            if poses is not None and _many_share_keys(q):
                # Fewer numbers than scores, where many queries share the keys.
                k, poses = k + poses.unsqueeze(4), None
            parts.append(products(q, k))
        if self.reads is not None and self.features is not None:
            parts.append(against(self.reads, self.features))
        if q is not None and poses is not None:
            reads = q.expand(-1, -1, poses.shape[1], -1, -1, -1)
            poses = poses.expand(q.shape[1], -1, q.shape[3], -1, -1)
            parts.append(torch.einsum("gmhjac,mhjpc->gmhjap", reads, poses).unsqueeze(-1))
        if self.extra is not None:
            parts.append(self.extra.permute(4, 0, 1, 2, 5, 3, 6))
        return functools.reduce(add_to_each, parts)


@in_programs(lambda q: False)
def _many_share_keys(q: Tensor) -> bool:
    """Whether keys have fewer numbers than scores of one query pose: q is ``(G, M, H or 1, J, A, C)``."""
    return q.shape[3] == 1 and q.shape[4] > q.shape[5]


@in_programs(lambda queries, groups: 1)
def repeats_of(queries: Tensor, groups: int) -> int:
    """How many groups of queries ``(G, ...)`` share what there is of each of so many groups."""
    return queries.shape[0] // groups


def against(reads: Tensor, features: Tensor) -> Tensor:
    """Products of features with the queries that read them, ``(G, M, H, J, A, P or 1, K)``.

    Args:
        reads, features: as in :class:`PairScores`.
    """
    heads, frames, _, groups = features.shape[:4]
    repeats = repeats_of(reads, groups)
    if repeats > 1:
        # Groups that share features are more heads.
        of_each = reads.unflatten(0, (groups, repeats))
        if heads > 1:
            reads = of_each.expand(-1, -1, -1, frames, -1, -1, -1)
            return torch.einsum("gnmhjaf,mhfgapk->gnmhjapk", reads, features).flatten(0, 1)
        return against(of_each.flatten(1, 2), features).unflatten(1, of_each.shape[1:3]).flatten(0, 1)
    if heads > 1:
        return torch.einsum("gmhjaf,mhfgapk->gmhjapk", reads.expand(-1, -1, frames, -1, -1, -1), features)
    # For every query and output pose, all heads and query poses at once.
    rows = reads.permute(0, 2, 4, 1, 3, 5)  # G, H or 1, A, M, J, F
    out = matmul(rows.flatten(3, 4), features[0].permute(2, 0, 3, 1, 4, 5).flatten(4))
    return out.unflatten(-1, features.shape[-2:]).unflatten(3, rows.shape[3:5]).permute(0, 3, 1, 4, 2, 5, 6)


def products(q: Tensor, k: Tensor) -> Tensor:
    """The products ``(G, M, H, J, A, P, K)`` of queries with keys.

    Args:
        q: ``(G, M, H, J, A, C)``.
        k: ``(G, M, H', J', P, K, C)``.
    """
    q, k = in_rows(q), in_rows(k)
    if k.shape[2] == k.shape[3] == 1:
        out = matmul(q.flatten(2, 4), k[:, :, 0, 0].flatten(2, 3).transpose(-1, -2)).unflatten(2, q.shape[2:5])
    else:
        out = matmul(q, k.flatten(4, 5).transpose(-1, -2))
    return out.unflatten(-1, k.shape[4:6])


class Values(Protocol):
    """Transformation of the values that a query attends to.

    Attributes:
        features: how many numbers it makes for every score.
    """

    features: int

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """The output ``(G, M, H, A, C)`` of attention to the values.

        Args:
            p: ``(G, M, H, A, P, K)``, the probabilities.
            v: ``(G, M, H or 1, P, K, C)``, the values.
            seen: ``(G, H, A, P or 1, K, D)``, what every output pose sees of the pairs.
        """


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
        size = points.mean_size
        large, sums = size >= MANY, size >= MANY and size > self.q.shape[-1]
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
