"""What there is to compute: the arguments of one attention, as backends take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from escnn_attention.functional.bias import KeyMode, QueryMode
from escnn_attention.geometry.positions import Positions

if TYPE_CHECKING:
    from escnn_attention.functional.points.values import Values

__all__ = ["Call", "Normalization"]

Normalization = Literal["softmax", "count"]


@dataclass(frozen=True)
class Call:
    r"""One attention, in the layout that projections make and kernels read: heads, images, positions, poses, channels.

    .. math::
        \mathrm{out}(x, h) = \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
            \mathrm{softmax}_{(x', \hat h)}(s_h(x, \tilde h; x', \hat h)) \; v(x', \hat h)

    Attributes:
        q: ``(M, B, N, J, C)``, the queries of M heads of C channels, in B images, at N positions and J poses.
        k, v: ``(M, B, N, P, C)``, keys and values at P poses.
        positions: where they lie and who sees whom.
        bias: what positions and poses add to the scores: a :class:`~escnn_attention.functional.bias.PositionalBias` on
            grids, a :class:`~escnn_attention.functional.points.bias.PairBias` between points.
        query: the query poses Q(h) that contribute to an output pose h: ``"own"`` h, ``"all"`` all J.
        keys: the key poses that a query pose attends to: ``"all"``, or ``"own"``, only itself, where there are several.
        dropout: the probability with which a key is dropped from a query's attention.
        normalization: ``"softmax"``; or, between points, ``"count"``, scores divided by the measure of the keys.
        values: between points, what becomes of the values that are attended to; None for their sum.
        edges: between points, ``(2, M, F)``: by what the features of an edge add to the scores of each head, and by
            what they change the factor 1 of its weights; None without.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    bias: Any
    query: QueryMode = "own"
    keys: KeyMode = "all"
    dropout: float = 0.0
    normalization: Normalization = "softmax"
    values: Values | None = None
    edges: Tensor | None = None
