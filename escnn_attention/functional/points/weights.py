"""How the scores between points become probabilities, or shares by count, and weigh the values.

The axes of scores are group, head m, output pose h, query pose h̃, query, key pose ĥ and key. In the own mode h̃ = h, so
that the query poses stand on the axis of h and that of h̃ has one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.call import Normalization
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.points.bias import PairScores, in_rows


@dataclass(frozen=True)
class Weights:
    """How scores weigh values.

    Attributes:
        num_poses: H, of the output.
        query_poses: J.
        sum_query_poses: whether all query poses contribute to every output pose.
        own_keys: whether a query sees keys of its own pose only.
        normalization: a softmax, or scores divided by the measure of the keys.
        dropout: the probability.
    """

    num_poses: int
    query_poses: int
    sum_query_poses: bool
    own_keys: bool
    normalization: Normalization
    dropout: float

    @property
    def own_axis(self) -> int:
        """The axis of the query poses, where they are those of the output, and the other way round."""
        return 2 if self.sum_query_poses else 3

    def near(self, keys: Tensor) -> Tensor:
        """Keys ``(G, K, M, P, C)`` as scores take them, ``(G, M, H', J', P, K, C)``."""
        keys = keys.permute(0, 2, 3, 1, 4)
        if not self.own_keys:
            return keys[:, :, None, None]
        return keys.unsqueeze(self.own_axis).unsqueeze(4)

    def probabilities(
        self,
        terms: PairScores,
        keys: Callable[[], Tensor],
        unseen: Tensor | None,
        log_measure: Tensor | None,
    ) -> Tensor:
        """Probabilities, or shares of the scores, after dropout, times the factors of the terms.

        Args:
            terms: of the scores.
            keys: gives the keys of each group, ``(G, K, M, P, C)``.
            unseen: ``(G, K)``, which keys fill up, or None.
            log_measure: ``(G, K, P or 1)``, of the keys, or None.
        """
        if unseen is not None:
            unseen = unseen[:, None, None, None, None, None]
        mu = None if log_measure is None else log_measure.transpose(1, 2)[:, None, None, None, None]
        p = F.dropout(self._normalize(terms, terms.scores(lambda: self.near(keys())), unseen, mu), self.dropout)
        return p if terms.factors is None else p * terms.factors.transpose(0, 1)[:, :, None, None, :, None]

    def weighted_sum(self, p: Tensor, values: Tensor, mix: Values | None = None, seen: Tensor | None = None) -> Tensor:
        """The output ``(G · A, M, H, C)`` of probabilities and the values ``(G, K, M, P, C)`` of each group.

        Args:
            p: the probabilities.
            values: of the keys.
            mix: the kernel that values pass through, with ``seen``, what it sees of the keys; None for their sum.
            seen: the relation to every key.
        """
        values = values.permute(0, 2, 3, 1, 4).unsqueeze(self.own_axis if self.own_keys else 2)
        if self.own_keys and self.sum_query_poses:
            # Keys of the query's own pose stand on the axis of the query poses.
            p = p.squeeze(-2).movedim(3, -2)
        elif self.sum_query_poses:
            p = p.sum(3)
        else:
            p = p.squeeze(3)
        p = in_rows(p.to(values.dtype))
        out = sum_values(p, values) if mix is None or seen is None else mix(p, values, seen)
        return out.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def _normalize(self, terms: PairScores, weights: Tensor, unseen: Tensor | None, mu: Tensor | None) -> Tensor:
        """Probabilities, or shares of the scores, of scores that broadcast to all pairs of poses."""
        precise = torch.promote_types(weights.dtype, torch.float32)
        poses = self.query_poses if self.sum_query_poses else 1
        weights = weights.expand(*weights.shape[:2], self.num_poses, poses, *weights.shape[4:]).to(precise)
        envelope = None if terms.envelope is None else terms.envelope[:, None, None, None, :, None].to(precise)
        if self.normalization == "softmax":
            if mu is not None:
                weights = weights + mu.to(precise)
            if envelope is not None:
                return _enveloped_softmax(weights, envelope, unseen)
            if unseen is None:
                return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:])
            weights = weights.masked_fill(unseen, torch.finfo(precise).min)
            # A query that fills up sees no key at all, and all of them have got a share.
            return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:]).masked_fill(unseen, 0.0)
        mass = weights.new_ones(weights.shape[-2:]) if mu is None else mu.to(precise).exp()
        mass = mass.expand(*mass.shape[:-2], *weights.shape[-2:])
        mass = mass if unseen is None else mass.masked_fill(unseen, 0.0)
        mass = mass if envelope is None else mass * envelope
        return weights * (mass / mass.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(precise).tiny))


def _enveloped_softmax(scores: Tensor, envelope: Tensor, unseen: Tensor | None) -> Tensor:
    """Probabilities of scores whose exponentials are multiplied by an envelope; without keys, zeros.

    No derivative passes through a logarithm of the envelope: that would be infinite where it vanishes.
    """
    limits = torch.finfo(scores.dtype)
    scores = scores if unseen is None else scores.masked_fill(unseen, limits.min)
    largest = (scores + envelope.log()).detach().amax((-1, -2), keepdim=True).clamp(min=limits.min)
    # Exponentials and their squares, which second derivatives have, are finite.
    most = torch.where(envelope == 0, 0.0, 0.45 * math.log(limits.max))
    e = envelope * torch.minimum(scores - largest, most).exp()
    e = e if unseen is None else e.masked_fill(unseen, 0.0)
    return e / e.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(e.dtype).tiny)


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


def sum_values(p: Tensor, v: Tensor) -> Tensor:
    """The sum of the values, weighed: the arguments and the result of :class:`Values`."""
    weights, values = p.flatten(-2), v.flatten(3, 4)
    if v.shape[2] == 1:
        return matmul(weights.flatten(2, 3), values[:, :, 0]).unflatten(2, p.shape[2:4])
    return matmul(weights, values)
