r"""Attention between points: of groups of queries to the keys that they share.

The formula is that of :mod:`escnn_attention.functional.reference`, with neighbours in place of a window. The groups are
taken a few at a time; their scores are made, used and dropped, and the backward pass makes them again.

The axes of what belongs to the queries of a piece are group, head m, output pose h, query pose h̃ and query. In the own
mode h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry. Those of the keys are key pose ĥ
and key: what all poses of a key share is added to stretches of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from escnn_attention.functional.memory import pieces_of
from escnn_attention.functional.products import product
from escnn_attention.functional.terms import KeyMode, QueryMode, working_precision
from escnn_attention.neighbours import Neighbours, Piece

__all__ = ["Mix", "Normalization", "Scores", "mix_values", "point_attention"]

Normalization = Literal["softmax", "count"]

# The least numbers of a piece: fewer pay for more operations, and more leave the cache.
_FASTEST = {"cpu": 2**21}  # Elsewhere 2**26: a GPU wants much at once.


class Scores(Protocol):
    """What the keys are worth to the queries of a piece."""

    def __call__(self, q: Tensor, k: Tensor, seen: Tensor, mutual: bool) -> Tensor:
        """Scores that broadcast to ``(G, M, H, J, A, P, K)``.

        Args:
            q: ``(G, M, H or 1, J, A, C)``; J is 1 in the own mode.
            k: ``(G, M, H', J', P, K, C)``, where one of H' and J' may be the poses of the queries, and P is 1, because
                a query sees keys of its own pose only; they are 1 otherwise.
            seen: ``(G, H, A, P or 1, K, D)``, the relation to every key as it looks from every output pose.
            mutual: whether the keys are the points of the queries, in the same order.
        """


class Mix(Protocol):
    """What becomes of the values that a query attends to."""

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """``(G, M, H, A, C)`` from probabilities ``(G, M, H, A, P, K)`` and values ``(G, M, H or 1, P, K, C)``."""


def mix_values(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Their sum."""
    weights, values = p.flatten(-2), v.flatten(3, 4)
    if v.shape[2] == 1:
        return product(weights.flatten(2, 3), values[:, :, 0]).unflatten(2, p.shape[2:4])
    return product(weights, values)


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
            ``(G, A, K, H, P or 1, D)``, as every output pose sees them.
        scores: of the keys.
        mix: of the values.
        log_measure: ``(N or 1, P or 1)``, the logarithm of the measure of the keys, which is added to the scores; with
            ``keys="own"`` it is the same for all poses.
        width: how many numbers ``scores`` and ``mix`` make for every score.
        query, keys, dropout: as in :func:`escnn_attention.functional.attention`.
        normalization: ``"softmax"``, or ``"count"``, which divides the scores by the measure of the keys instead: their
            number, where all have measure 1. Weights then may be negative.

    Returns:
        ``(N, M, |H|, C)``.
    """
    number, heads, poses, channels = q.shape
    key_poses = k.shape[2]
    own_keys = keys == "own" and key_poses > 1
    pairs = heads * num_poses * (1 if query == "own" else poses) * (1 if own_keys else key_poses)
    # A score, its exponential, its probability, and the gradient.
    width = max(4, width)
    # The backward pass of every piece makes a gradient of all keys.
    fastest = max(_FASTEST.get(q.device.type, 2**26), k.numel()) // width
    pieces = neighbours.pieces(max(1, pieces_of(fastest, q, copies=max(6, width)) // pairs))
    measure = None if log_measure is None else log_measure.expand(number, -1)
    if any(piece.padded for piece in pieces):
        # One more point is what fills up: it keeps values that are not finite from those who do not see them. It lies
        # where every relation is finite.
        q, k, v = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (q, k, v))
        coords = torch.cat([coords, coords.new_ones(1, coords.shape[1])])
        measure = None if measure is None else torch.cat([measure, measure.new_zeros(1, measure.shape[1])])

    def attend(some: Piece, q: Tensor, k: Tensor, v: Tensor, coords: Tensor) -> Tensor:
        unseen = (some.keys < 0)[:, None, None, None, None, None] if some.padded else None
        queries, keys = (_Rows(i, number if some.padded else None, some.first) for i in (some.queries, some.keys))
        seen = relate(queries(coords).unsqueeze(2), keys(coords).unsqueeze(1))
        seen = seen.permute(0, 3, 1, 4, 2, 5).contiguous()
        asking = queries(q).permute(0, 2, 3, 1, 4)  # G, M, J, A, C
        near, values = (keys(t).permute(0, 2, 3, 1, 4) for t in (k, v))  # G, M, P, K, C
        asking = asking.unsqueeze(3 if query == "own" else 2)
        if not own_keys:
            near, values = near[:, :, None, None], values.unsqueeze(2)
        elif query == "own":
            near, values = near[:, :, :, None, None], values.unsqueeze(3)
        else:
            near, values = near[:, :, None, :, None], values.unsqueeze(2)
        mu = None if measure is None else keys(measure).transpose(1, 2)[:, None, None, None, None]
        p = F.dropout(normalize(scores(asking, near, seen, some.queries is some.keys), unseen, mu), dropout)
        if own_keys and query == "all":
            # Keys of the query's own pose stand on the axis of the query poses.
            p = p.squeeze(-2).movedim(3, -2)
        elif query == "all":
            p = p.sum(3)
        else:
            p = p.squeeze(3)
        return mix(p.to(values.dtype), values, seen).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def normalize(weights: Tensor, unseen: Tensor | None, mu: Tensor | None) -> Tensor:
        precise = working_precision(weights.dtype)
        size = (*weights.shape[:2], num_poses, 1 if query == "own" else poses)
        weights = weights.expand(*size, *weights.shape[4:]).to(precise)
        if normalization == "softmax":
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

    out = []
    for some in pieces:
        if torch.is_grad_enabled() and len(pieces) > 1:
            out.append(checkpoint(attend, some, q, k, v, coords, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            out.append(attend(some, q, k, v, coords))
    if not out:
        return q.new_zeros(number, heads, num_poses, channels)
    rows = torch.cat(out)
    if all(some.first is not None for some in pieces):
        return rows
    places = torch.cat([some.queries.flatten() for some in pieces])
    if any(some.padded for some in pieces):
        # Not those that fill up.
        there = (places >= 0).nonzero().squeeze(-1)
        places, rows = places[there], rows.index_select(0, there)
    return rows.new_zeros(number, heads, num_poses, channels).index_copy(0, places, rows)


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
        if self._first is None:
            return rows.index_select(0, self._index.flatten()).unflatten(0, self._index.shape)
        return rows[self._first : self._first + self._index.numel()].unflatten(0, self._index.shape)
