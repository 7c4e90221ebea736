r"""Attention between points: of groups of queries to the keys that they share.

The formula is that of :mod:`escnn_attention.functional.backends.reference`, with neighbours in place of a window. The
groups are taken a few at a time; their scores are made, used and dropped, and the backward pass makes them again.

The axes of what belongs to the queries of a piece are group, head m, output pose h, query pose h̃ and query. In the own
mode h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry. Those of the keys are key pose ĥ
and key: what all poses of a key share is added to stretches of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from escnn_attention._precision import working_precision
from escnn_attention.functional.bias import KeyMode, QueryMode
from escnn_attention.functional.matmul import add_to_each, matmul
from escnn_attention.functional.memory import chunk_size
from escnn_attention.functional.points import native as native_points
from escnn_attention.geometry.clouds import Neighbours, Piece

__all__ = ["Mix", "Normalization", "ScoreTerms", "Scores", "mix_values", "point_attention", "products"]

Normalization = Literal["softmax", "count"]

# The least numbers of a piece: fewer pay for more operations, and more leave the cache.
_FASTEST = {"cpu": 2**21, "native": 2**24}  # Elsewhere 2**26: a GPU wants much at once.


class ScoreTerms(NamedTuple):
    r"""What the scores of a piece are the sum of: ``(G, M, H, J, A, P, K)``, to which all terms broadcast.

    Attributes:
        q: ``(G, M, H or 1, J, A, C)``, scaled, whose products with the keys count; None where they do not. J is 1 in
            the own mode.
        poses: ``(M or 1, H, J or 1, P, C)``, what poses add to the keys.
        reads: ``(G, M, H or 1, J, A, F)``, how much of every feature a query sees.
        features: ``(M or 1, H, F, G, A, P or 1, K)``, functions of the location.
        extra: ``(M, H or 1, J or 1, P or 1, G, A, K)``, numbers by themselves.
    """

    q: Tensor | None
    poses: Tensor | None = None
    reads: Tensor | None = None
    features: Tensor | None = None
    extra: Tensor | None = None

    def scores(self, keys: Callable[[], Tensor]) -> Tensor:
        """Their sum, for keys ``(G, M, H', J', P, K, C)``."""
        q, poses, parts = self.q, self.poses, []
        if q is not None:
            k = keys()
            if poses is not None and q.shape[3] == 1 and q.shape[4] > q.shape[5]:
                # Fewer numbers than scores, where many queries share the keys.
                k, poses = k + poses.unsqueeze(4), None
            parts.append(products(q, k))
        if self.reads is not None and self.features is not None:
            parts.append(_against(self.reads, self.features))
        if q is not None and poses is not None:
            reads = q.expand(-1, -1, poses.shape[1], -1, -1, -1)
            poses = poses.expand(q.shape[1], -1, q.shape[3], -1, -1)
            parts.append(torch.einsum("gmhjac,mhjpc->gmhjap", reads, poses).unsqueeze(-1))
        if self.extra is not None:
            parts.append(self.extra.permute(4, 0, 1, 2, 5, 3, 6))
        return functools.reduce(add_to_each, parts)


def _against(reads: Tensor, features: Tensor) -> Tensor:
    """``(G, M, H, J, A, P or 1, K)``, of terms as they are."""
    heads, frames = features.shape[:2]
    if heads > 1:
        return torch.einsum("gmhjaf,mhfgapk->gmhjapk", reads.expand(-1, -1, frames, -1, -1, -1), features)
    # For every query and output pose, all heads and query poses at once.
    rows = reads.permute(0, 2, 4, 1, 3, 5)  # G, H or 1, A, M, J, F
    out = matmul(rows.flatten(3, 4), features[0].permute(2, 0, 3, 1, 4, 5).flatten(4))
    return out.unflatten(-1, features.shape[-2:]).unflatten(3, rows.shape[3:5]).permute(0, 3, 1, 4, 2, 5, 6)


class Scores(Protocol):
    """What the keys are worth to the queries of a piece."""

    def __call__(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> ScoreTerms:
        """The terms of the scores.

        Args:
            q: ``(G, M, H or 1, J, A, C)``; J is 1 in the own mode.
            keys: gives the keys of the piece, ``(G, M, H', J', P, K, C)``, where one of H' and J' may be the poses of
                the queries, and P is 1, because a query sees keys of its own pose only; they are 1 otherwise.
            seen: ``(G, H, A, P or 1, K, D)``, the relation to every key as it looks from every output pose.
            mutual: whether the keys are the points of the queries, in the same order.
        """


def products(q: Tensor, k: Tensor) -> Tensor:
    """``(G, M, H, J, A, P, K)``, of queries ``(G, M, H, J, A, C)`` with keys ``(G, M, H', J', P, K, C)``."""
    if k.shape[2] == k.shape[3] == 1:
        out = matmul(q.flatten(2, 4), k[:, :, 0, 0].flatten(2, 3).transpose(-1, -2)).unflatten(2, q.shape[2:5])
    else:
        out = matmul(q, k.flatten(4, 5).transpose(-1, -2))
    return out.unflatten(-1, k.shape[4:6])


class Mix(Protocol):
    """What becomes of the values that a query attends to."""

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """``(G, M, H, A, C)`` from probabilities ``(G, M, H, A, P, K)`` and values ``(G, M, H or 1, P, K, C)``."""


def mix_values(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Their sum."""
    weights, values = p.flatten(-2), v.flatten(3, 4)
    if v.shape[2] == 1:
        return matmul(weights.flatten(2, 3), values[:, :, 0]).unflatten(2, p.shape[2:4])
    return matmul(weights, values)


def point_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coords: Tensor,
    neighbours: Neighbours,
    *,
    num_poses: int,
    relate: Callable[[Tensor, Tensor], Tensor],
    scores: Scores,
    mix: Mix = mix_values,
    log_measure: Tensor | None = None,
    width: int = 1,
    query: QueryMode = "own",
    keys: KeyMode = "all",
    normalization: Normalization = "softmax",
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    r"""Attention of every point to its neighbours.

    Args:
        q: ``(N, M, J, C)``, the queries of M heads of C channels at N points and J poses: :math:`|H|`, or 1 for
            features without poses.
        k, v: ``(N, M, P, C)``, keys and values.
        coords: ``(N, d)``.
        neighbours: the keys of every query. Without any the output is zero.
        num_poses: :math:`|H|`.
        relate: from the positions ``(G, A, 1, d)`` and ``(G, 1, K, d)`` of queries and keys to
            ``(G, H, A, P or 1, K, D)``, as every output pose sees them.
        scores: of the keys.
        mix: of the values.
        log_measure: ``(N or 1, P or 1)``, the logarithm of the measure of the keys, which is added to the scores; with
            ``keys="own"`` it is the same for all poses.
        width: how many numbers ``scores`` and ``mix`` make for every score.
        query, keys, dropout: as in :func:`escnn_attention.functional.attention`.
        normalization: ``"softmax"``, or ``"count"``, which divides the scores by the measure of the keys instead: their
            number, where all have measure 1. Weights then may be negative.
        backend: ``"native"``, the loop of :mod:`~escnn_attention.functional.points.native`; ``"auto"``, that one where
            it serves; any other, operations of PyTorch.

    Returns:
        ``(N, M, |H|, C)``.

    Raises:
        ValueError: the backend is ``"native"``, which cannot serve the call.
    """
    number, heads, poses, channels = q.shape
    key_poses = k.shape[2]
    own_keys = keys == "own" and key_poses > 1
    # A gradient by coordinates is a force, to be differentiated once more: no use of a loop with first derivatives.
    forces = coords.requires_grad and torch.is_grad_enabled()
    native = backend == "native" or (backend == "auto" and not forces)
    reason = _why_not_natively(q, log_measure, mix, own_keys) if native else None
    if backend == "native" and reason is not None:
        raise ValueError(f"backend: 'native' cannot serve this call: {reason}")
    native = native and reason is None
    pairs = heads * num_poses * (1 if query == "own" else poses) * (1 if own_keys else key_poses)
    # A score, its exponential, its probability, and the gradient.
    width = max(4, width)
    # The backward pass of every piece makes a gradient of all keys.
    fastest = max(_FASTEST.get("native" if native else q.device.type, 2**26), k.numel()) // width
    pieces = neighbours.pieces(max(1, chunk_size(fastest, q, copies=max(6, width)) // pairs))
    measure = None if log_measure is None else log_measure.expand(number, -1)
    dtype = v.dtype
    if any(piece.padded for piece in pieces):
        # One more point is what fills up: it keeps values that are not finite from those who do not see them. It lies
        # where every relation is finite.
        q, k, v = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (q, k, v))
        coords = torch.cat([coords, coords.new_ones(1, coords.shape[1])])
        measure = None if measure is None else torch.cat([measure, measure.new_zeros(1, measure.shape[1])])
    if native:
        # Laid out as projections leave them, once for all pieces.
        k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    rule = _Rule(
        number, num_poses, poses, relate, scores, mix, measure, query, own_keys, normalization, dropout, native
    )

    out = []
    for some in pieces:
        if torch.is_grad_enabled() and len(pieces) > 1:
            out.append(
                checkpoint(rule.attend, some, q, k, v, coords, use_reentrant=False, preserve_rng_state=dropout > 0)
            )
        else:
            out.append(rule.attend(some, q, k, v, coords))
    if not out:
        return v.new_zeros(number, heads, num_poses, channels, dtype=dtype)
    rows = (out[0] if len(out) == 1 else torch.cat(out)).to(dtype)
    if all(some.first is not None for some in pieces):
        return rows
    places = torch.cat([some.queries.flatten() for some in pieces])
    if any(some.padded for some in pieces):
        # Not those that fill up.
        there = (places >= 0).nonzero().squeeze(-1)
        places, rows = places[there], rows.index_select(0, there)
    return rows.new_zeros(number, heads, num_poses, channels).index_copy(0, places, rows)


def _why_not_natively(q: Tensor, log_measure: Tensor | None, mix: Mix, own_keys: bool) -> str | None:
    """Why the compiled loop cannot serve a call."""
    if mix is not mix_values:
        return "values pass through a kernel"
    if own_keys:
        return "queries see keys of their own pose only"
    if log_measure is not None and log_measure.requires_grad:
        return "the measure requires a gradient"
    return native_points.why_unsupported_grid(q)


@dataclass(frozen=True)
class _Rule:
    """What is the same for all pieces: the arguments of :func:`point_attention`.

    Attributes:
        number: of the points, and the row of what fills up.
        own_keys: whether a query sees keys of its own pose only.
        native: whether the compiled loop serves.
    """

    number: int
    num_poses: int
    query_poses: int
    relate: Callable[[Tensor, Tensor], Tensor]
    scores: Scores
    mix: Mix
    measure: Tensor | None
    query: QueryMode
    own_keys: bool
    normalization: Normalization
    dropout: float
    native: bool

    def attend(self, some: Piece, q: Tensor, k: Tensor, v: Tensor, coords: Tensor) -> Tensor:
        """``(G · A, M, H, C)``."""
        queries, keys = (self._rows(some, index) for index in (some.queries, some.keys))
        seen = self.relate(queries(coords).unsqueeze(2), keys(coords).unsqueeze(1))
        asking = queries(q).permute(0, 2, 3, 1, 4)  # G, M, J, A, C
        asking = asking.unsqueeze(self._own_axis)
        terms = self.scores(asking, lambda: self._near(keys(k)), seen, some.queries is some.keys)
        if self.native:
            return self._natively(terms, k, v, some)
        return self._plainly(terms, k, v, some, seen)

    @property
    def _own_axis(self) -> int:
        """That of the query poses, where they are those of the output, and the other way round."""
        return 3 if self.query == "own" else 2

    def _rows(self, some: Piece, index: Tensor) -> _Rows:
        return _Rows(index, self.number if some.padded else None, some.first)

    def _near(self, rows: Tensor) -> Tensor:
        """Keys ``(G, K, M, P, C)`` as scores take them."""
        rows = rows.permute(0, 2, 3, 1, 4)
        if not self.own_keys:
            return rows[:, :, None, None]
        return rows.unsqueeze(self._own_axis).unsqueeze(4)

    def _plainly(self, terms: ScoreTerms, k: Tensor, v: Tensor, some: Piece, seen: Tensor) -> Tensor:
        keys = self._rows(some, some.keys)
        unseen = (some.keys < 0)[:, None, None, None, None, None] if some.padded else None
        mu = None if self.measure is None else keys(self.measure).transpose(1, 2)[:, None, None, None, None]
        p = F.dropout(self._normalize(terms.scores(lambda: self._near(keys(k))), unseen, mu), self.dropout)
        values = keys(v).permute(0, 2, 3, 1, 4).unsqueeze(self._own_axis if self.own_keys else 2)
        if self.own_keys and self.query == "all":
            # Keys of the query's own pose stand on the axis of the query poses.
            p = p.squeeze(-2).movedim(3, -2)
        elif self.query == "all":
            p = p.sum(3)
        else:
            p = p.squeeze(3)
        return self.mix(p.to(values.dtype), values, seen).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def _normalize(self, weights: Tensor, unseen: Tensor | None, mu: Tensor | None) -> Tensor:
        precise = working_precision(weights.dtype)
        poses = 1 if self.query == "own" else self.query_poses
        weights = weights.expand(*weights.shape[:2], self.num_poses, poses, *weights.shape[4:]).to(precise)
        if self.normalization == "softmax":
            if mu is not None:
                weights = weights + mu.to(precise)
            if unseen is None:
                return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:])
            weights = weights.masked_fill(unseen, torch.finfo(precise).min)
            # A query that fills up sees no key at all, and all of them have got a share.
            return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:]).masked_fill(unseen, 0.0)
        mass = weights.new_ones(weights.shape[-2:]) if mu is None else mu.to(precise).exp()
        mass = mass.expand(*mass.shape[:-2], *weights.shape[-2:])
        mass = mass if unseen is None else mass.masked_fill(unseen, 0.0)
        return weights * (mass / mass.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(precise).tiny))

    def _natively(self, terms: ScoreTerms, k: Tensor, v: Tensor, some: Piece) -> Tensor:
        poses = 1 if self.query == "own" else self.query_poses
        pose, extra, features, reads = None, terms.extra, terms.features, terms.reads
        if features is not None and reads is not None and features.shape[5] > 1:
            # Functions of the poses of the keys, too: the loop gets what they are worth.
            worth = _against(reads, features).permute(1, 2, 3, 5, 0, 4, 6)
            extra = worth if extra is None else extra + worth
            features = reads = None
        if terms.q is not None and terms.poses is not None:
            # All query poses see the same: where they do not, this loop does not serve.
            pose = terms.poses.squeeze(2).transpose(-1, -2)
        if extra is not None:
            extra = extra.expand(v.shape[1], self.num_poses, poses, *extra.shape[3:]).flatten(1, 2)

        def plain(
            q: Tensor | None,
            k: Tensor | None,
            v: Tensor,
            reads: Tensor | None,
            features: Tensor | None,
            pose: Tensor | None,
            extra: Tensor | None,
        ) -> Tensor:
            q, reads = (
                None if t is None else self._of_queries(t, some).permute(0, 1, 3, 2, 4).unsqueeze(self._own_axis)
                for t in (q, reads)
            )
            extra = None if extra is None else extra.unflatten(1, (self.num_poses, poses))
            if pose is not None:
                pose = pose[..., : v.shape[2]].transpose(-1, -2).unsqueeze(2)
            parts = ScoreTerms(q, pose, reads, None if features is None else features.unsqueeze(5), extra)
            keys = v if k is None else k
            # A sum of values does not look at what is seen, which held here would outlive the piece.
            return self._plainly(parts, keys.transpose(0, 1), v.transpose(0, 1), some, v).transpose(0, 1)

        inputs = native_points.Inputs(
            None if terms.q is None else _of_rows(terms.q),
            None if terms.q is None else k.transpose(0, 1),
            v.transpose(0, 1),
            None if reads is None else _of_rows(reads),
            None if features is None else features.squeeze(5),
            pose,
            extra,
        )
        options = native_points.Options(
            queries=some.queries,
            keys=some.keys,
            log_measure=None if self.measure is None else self.measure.expand(-1, v.shape[2]),
            num_poses=self.num_poses,
            query_poses=self.query_poses,
            exclusive_keys=some.queries is some.keys,
            padded=some.padded,
            sum_query_poses=poses > 1,
            normalize_by_count=self.normalization == "count",
            dropout=self.dropout,
            plain=plain,
        )
        return native_points.attend(inputs, options).transpose(0, 1)

    @staticmethod
    def _of_queries(rows: Tensor, some: Piece) -> Tensor:
        """``(G, M, A, ...)`` of ``(M, G · A, ...)``."""
        return rows.unflatten(1, some.queries.shape).transpose(0, 1)


def _of_rows(x: Tensor) -> Tensor:
    """``(M, G · A, H · J, X)`` of ``(G, M, H, J, A, X)``: as projections leave them, where queries are all points."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)


class _Rows:
    """Takes the rows of an index ``(G, n)`` from tensors: without a copy, where they are in one stretch.

    Args:
        index: of the rows.
        filling: the row that is meant by -1.
        first: the first of the rows, if they are all that follow.
    """

    def __init__(self, index: Tensor, filling: int | None, first: int | None):
        self._index = index if filling is None else torch.where(index < 0, filling, index)
        self._first = first

    def __call__(self, rows: Tensor) -> Tensor:
        number = self._index.numel()
        if self._first is None:
            rows = rows.index_select(0, self._index.flatten())
        elif len(rows) > number:
            rows = rows[self._first : self._first + number]
        return rows.unflatten(0, self._index.shape)
