r"""Attention between points: of every query to a list of keys.

The formula is that of :mod:`escnn_attention.functional.reference`, with neighbours in place of a window. The queries
are taken a few at a time; the scores of those are made, used and dropped, and the backward pass makes them again.

The axes of what belongs to the queries of a piece are query, head m, output pose h and query pose h̃. In the own mode
h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from escnn_attention.functional.memory import pieces_of
from escnn_attention.functional.terms import KeyMode, QueryMode, working_precision

__all__ = ["Mix", "Normalization", "Scores", "mix_values", "point_attention"]

Normalization = Literal["softmax", "count"]

# The least scores of a piece: fewer pay for more operations.
_FASTEST = 2**19


class Scores(Protocol):
    """What the keys are worth to the queries of a piece."""

    def __call__(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """Scores that broadcast to ``(Q, M, H, J, K, P)``.

        Args:
            q: ``(Q, M, H or 1, J, C)``; J is 1 in the own mode.
            k: ``(Q, M, H', J', K, P, C)``, where one of H' and J' may be the poses of the queries, and P is 1, because
                a query sees keys of its own pose only; they are 1 otherwise.
            seen: ``(Q, K, H, P or 1, D)``, the relation to every key as it looks from every output pose.
        """


class Mix(Protocol):
    """What becomes of the values that a query attends to."""

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """``(Q, M, H, C)`` from probabilities ``(Q, M, H, K, P)`` and values ``(Q, K, M, H or 1, P, C)``."""


def mix_values(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Their sum."""
    if v.shape[3] > 1:
        return torch.einsum("qmhkp,qkmhpc->qmhc", p, v)
    return p.flatten(3) @ v[:, :, :, 0].permute(0, 2, 1, 3, 4).flatten(2, 3)


def point_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coords: Tensor,
    neighbours: Tensor,
    *,
    num_poses: int,
    relate: Callable[[Tensor, Tensor], Tensor],
    scores: Scores,
    mix: Mix = mix_values,
    log_measure: Tensor | None = None,
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
        neighbours: ``(N, K)``, the keys of every query; -1 fills up. Without any key the output is zero.
        num_poses: :math:`|H|`.
        relate: from the positions ``(Q, 1, d)`` and ``(Q, K, d)`` of queries and keys to ``(Q, K, H, P or 1, D)``, as
            every output pose sees them.
        scores: of the keys.
        mix: of the values.
        log_measure: ``(N or 1, P or 1)``, the logarithm of the measure of the keys, which is added to the scores; with
            ``keys="own"`` it is the same for all poses.
        query, keys, dropout: as in :func:`escnn_attention.functional.attention`.
        normalization: ``"softmax"``, or ``"count"``, which divides the scores by the measure of the keys instead: their
            number, where all have measure 1. Weights then may be negative.

    Returns:
        ``(N, M, |H|, C)``.
    """
    _, heads, poses, channels = q.shape
    key_poses = k.shape[2]
    own_keys = keys == "own" and key_poses > 1
    # One more point is what fills up the lists: it keeps values that are not finite from those who do not see them. It
    # lies where every relation is finite.
    k, v = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (k, v))
    coords = torch.cat([coords, coords.new_ones(1, coords.shape[1])])
    measure = None
    if log_measure is not None:
        measure = log_measure.expand(len(q), -1)
        measure = torch.cat([measure, measure.new_zeros(1, measure.shape[1])])

    def piece(listed: Tensor, q: Tensor, x: Tensor, k: Tensor, v: Tensor, coords: Tensor) -> Tensor:
        unseen = (listed < 0)[:, None, None, None, :, None]
        index = listed.masked_fill(listed < 0, len(k) - 1)
        seen = relate(x[:, None], coords[index])
        near = k[index].transpose(1, 2)  # Q, M, K, P, C
        values = v[index].unsqueeze(3)  # Q, K, M, 1, P, C
        q = q.unsqueeze(3) if query == "own" else q.unsqueeze(2)
        if not own_keys:
            near = near[:, :, None, None]
        elif query == "own":
            near, values = near.permute(0, 1, 3, 2, 4)[:, :, :, None, :, None], values.transpose(3, 4)
        else:
            near = near.permute(0, 1, 3, 2, 4)[:, :, None, :, :, None]
        weights = scores(q, near, seen)
        p = normalize(weights, unseen, None if measure is None else measure[index][:, None, None, None])
        p = F.dropout(p, dropout)
        # In the mode "all" keys of the query's own pose stand on the axis of the query poses.
        p = p[..., 0].transpose(-1, -2) if own_keys and query == "all" else p.sum(3)
        return mix(p.to(values.dtype), values, seen)

    def normalize(weights: Tensor, unseen: Tensor, mu: Tensor | None) -> Tensor:
        precise = working_precision(weights.dtype)
        size = (*weights.shape[:2], num_poses, 1 if query == "own" else poses)
        weights = weights.expand(*size, *weights.shape[4:]).to(precise)
        if normalization == "softmax":
            if mu is not None:
                weights = weights + mu.to(precise)
            weights = weights.masked_fill(unseen, torch.finfo(precise).min)
            # Where a query sees no key at all, all of them have got a share.
            return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:]).masked_fill(unseen, 0.0)
        mass = (~unseen).to(precise) if mu is None else mu.to(precise).exp().masked_fill(unseen, 0.0)
        mass = mass.expand(*mass.shape[:-1], weights.shape[-1])
        return weights * (mass / mass.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(precise).tiny))

    if neighbours.shape[1] == 0 or len(q) == 0:
        return q.new_zeros(len(q), heads, num_poses, channels)
    pairs = heads * num_poses * (1 if query == "own" else poses) * (1 if own_keys else key_poses)
    # The backward pass of every piece makes a gradient of all keys.
    budget = max(1, pieces_of(max(_FASTEST, k.numel()), q, copies=6) // pairs)
    # The longest lists first, so that those of a piece are about as long, and as much as the longest is looked at.
    degree, order = (neighbours >= 0).sum(1).sort(descending=True, stable=True)
    stops = _cuts(degree.clamp(min=1).tolist(), budget)
    out = []
    for part, longest in zip(order.tensor_split(stops), degree.tensor_split(stops), strict=True):
        arguments = (neighbours[part, : max(1, int(longest[0]))], q[part], coords[part], k, v, coords)
        if torch.is_grad_enabled() and stops:
            out.append(checkpoint(piece, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            out.append(piece(*arguments))
    return torch.cat(out)[order.argsort()]


def _cuts(lengths: list[int], budget: int) -> list[int]:
    """Where to cut lists of falling lengths, so that each piece fits when it is filled up to its longest."""
    stops, start = [], 0
    for i in range(1, len(lengths)):
        if (i - start + 1) * lengths[start] > budget:
            stops.append(i)
            start = i
    return stops
