"""The arguments of one attention on a grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import exactly
from escnn_attention.geometry.windows import Positions

__all__ = ["Call", "KeyMode", "Normalization", "PositionalBias", "QueryMode", "Waves"]

QueryMode = Literal["own", "all"]
KeyMode = Literal["all", "own"]


@dataclass(frozen=True)
class Waves:
    r"""A function of the offset as a sum of waves, :math:`\rho_x(\delta) = W [\cos\Omega\delta, \sin\Omega\delta]`.

    Attributes:
        frequencies: ``(M or 1, |H|, F, d)``; :math:`\Omega h^{-1}` for every output pose.
        readout: ``(M or 1, C, 2F)``; W.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import Waves
        >>> waves = Waves(frequencies=torch.randn(2, 4, 3, 2), readout=torch.randn(2, 8, 6))
        >>> waves.table(torch.randn(9, 2)).shape  # 2 heads, 4 poses, 9 offsets, 8 channels
        torch.Size([2, 4, 9, 8])
    """

    frequencies: Tensor
    readout: Tensor

    def phases(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The cosine and the sine of the phase at each of the points ``(n, d)``: ``(M or 1, |H|, n, F)``."""
        precise = working_precision(self.frequencies.dtype)
        with exactly(points.device.type):
            phase = points.to(precise) @ self.frequencies.to(precise).transpose(-1, -2)
        return phase.cos(), phase.sin()

    def table(self, offsets: Tensor) -> Tensor:
        """The function at every offset, ``(M or 1, |H|, L, C)``."""
        waves = torch.cat(self.phases(offsets), dim=-1).to(self.readout.dtype)
        return waves @ self.readout.transpose(-1, -2).unsqueeze(1)


@dataclass(frozen=True)
class PositionalBias:
    r"""A positional encoding, evaluated from every output pose h. M may be 1, shared by all heads.

    The function of the offset is given as ``spatial`` or as ``waves`` or not at all.

    Attributes:
        num_poses: :math:`|H|`, the number of output poses.
        spatial: :math:`\rho_x`; ``(M, |H|, L, C)``, at :math:`h^{-1}\Delta` for every row of the table of offsets, or
            with ``absolute`` ``(M, |H|, N, C)``, at :math:`h^{-1}x` for every position.
        waves: :math:`\rho_x` in a form that factorises.
        pose: :math:`E[h^{-1}\hat h]`; ``(M, |H|, P, C)`` for every pose of the keys. None for no such term.
        rotary: ``(M, |H|, F, d)``; :math:`\Omega h^{-1}`, by which pairs of channels of the keys are rotated: the score
            becomes :math:`\langle q, R(\Omega h^{-1}\Delta)(k + E[h^{-1}\hat h])\rangle`. Pair i is the channels i and
            F + i; channels beyond 2F are not rotated.
        rotates_values: whether ``rotary`` rotates values, too, by the same angles:
            :math:`R(\Omega h^{-1}\Delta)\,v` is what is summed.
        absolute: whether the terms are added to the queries as well as to the keys. Where keys have more poses than
            queries, the first of them are those of the queries.
        log_measure: :math:`\log\mu`, which is added to the scores; ``(P or 1, N or 1)``, for every pose and position of
            the keys, or ``(B, P or 1, N or 1)``, for each image. A key of measure 2 counts as two keys.
        log_window: ``(L,)``; the same for every row of the table of offsets.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, Waves
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> waves = Waves(frequencies=torch.randn(2, 4, 3, 2), readout=torch.randn(2, 8, 6))
        >>> bias = PositionalBias(num_poses=4, waves=waves)
        >>> bias.explicit(Grid((5, 5), Window(3), dtype=torch.float32)).spatial.shape
        torch.Size([2, 4, 9, 8])
    """

    num_poses: int
    spatial: Tensor | None = None
    pose: Tensor | None = None
    absolute: bool = False
    waves: Waves | None = None
    rotary: Tensor | None = None
    log_measure: Tensor | None = None
    log_window: Tensor | None = None
    rotates_values: bool = False

    @property
    def adds_to_keys(self) -> bool:
        """Whether the terms are vectors that are added to the keys, and nothing else."""
        return not self.absolute and self.rotary is self.log_measure is self.log_window is None

    def explicit(self, positions: Positions) -> PositionalBias:
        """The bias with its function of the offset as a table."""
        if self.waves is None:
            return self
        return replace(self, spatial=self.waves.table(positions.offsets), waves=None)

    def of_head(self, head: int) -> PositionalBias:
        """The terms of one head, without the leading dimension: for terms with an explicit table."""
        assert self.waves is None
        assert self.rotary is None

        def pick(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[head if len(table) > 1 else 0]

        return replace(self, spatial=pick(self.spatial), pose=pick(self.pose))


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
        bias: what positions and poses add to the scores: a :class:`PositionalBias` on grids, a
            :class:`~escnn_attention.functional.points.bias.PairBias` between points.
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
    values: Any = None
    edges: Tensor | None = None
