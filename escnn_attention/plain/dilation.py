"""Self-attention on the translation–dilation group, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from escnn_attention.encodings import Encoding
from escnn_attention.encodings.base import Needs
from escnn_attention.encodings.bias import positional_bias
from escnn_attention.functional import PositionalBias, attention
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window, WindowShape
from escnn_attention.plain.projections import AttentionMode, FromPoses, GroupTables, HeadModule, Scalars, ToPoses
from escnn_attention.plain.self_attention import rows_of

WindowKind = Literal["scaled", "dilated", "fixed"]
Measure = Literal["haar", "counting", "printed"]


@dataclass(frozen=True, eq=False)
class ScaledWindow:
    """The window of the queries of one scale, whose reach is ``unit`` times that of its positions.

    ``share`` ``(L,)`` is how much of the cell of each position lies in the window; None where all weigh the same.
    """

    window: Window
    unit: float = 1.0
    share: Tensor | None = None


def scaled_window(
    kernel_size: int, shape: WindowShape, scale: float, dimension: int, *, kind: WindowKind, weighted: bool
) -> ScaledWindow:
    r"""The window at a scale s.

    At scale 1 it reaches ``kernel_size // 2`` =: r to every side, a box or a ball in :math:`R^d`; at scale s it reaches
    r s. A position stands for the unit cell around it, of which :math:`\min(1, r s + 1/2 - |x|)` lies in the window
    along an axis, or along the radius of a ball: its weight, if ``weighted``. ``kind`` is that of the layer.
    """
    if kind == "dilated":
        return ScaledWindow(Window(kernel_size, shape, round(scale)))
    reach = kernel_size // 2 * (scale if kind == "scaled" else 1.0)
    if reach == 0:
        return ScaledWindow(Window(kernel_size, shape))
    nearly = 1e-9  # Powers of a base such as √2 are whole numbers but for rounding.
    if not weighted:
        window = Window(2 * math.floor(reach + nearly) + 1, shape)
    elif shape == "disc":
        window = Window.ball(reach + 0.5 - nearly)
    else:
        window = Window(2 * math.ceil(reach + 0.5 - nearly) - 1, shape)
    assert window.kernel_size is not None
    steps = window.kernel_size // 2
    share = None
    if weighted:
        offset = steps * Grid((1,) * dimension, window).offsets
        if shape == "disc":
            offset = offset.norm(dim=-1, keepdim=True)
        share = (reach + 0.5 - offset.abs()).clamp(max=1).prod(-1)
        share = None if (share == share[0]).all() else share
    return ScaledWindow(window, steps / reach, share)


class DilationAttention(HeadModule):
    """Projections to heads, attention between scales and poses on a grid, projection to the output.

    Maps ``(B, in, *space)`` to ``(B, n · out, *space)`` for n scales; ``in`` has no scales in lifting.

    Args:
        project_in, project_out, needs: from the features of a scale, and to these.
        encoding: a bound encoding, of :math:`T|H|` poses, or of 1 in lifting.
        tables, mode: of the group, a finite one; which poses a query sees, and how.
        windows: the window of every scale.
        interval: T, how many scales the keys have, from that of the query on; None in lifting.
        log_measure: ``(T,)``, the logarithms of the measure of the keys of each of them.
        factors: by which the output of every scale is multiplied.
    """

    quotient: Tensor

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding,
        tables: GroupTables,
        mode: AttentionMode,
        windows: Sequence[ScaledWindow],
        needs: Needs,
        *,
        interval: int | None,
        log_measure: Sequence[float] | None,
        factors: Sequence[float] | None,
    ):
        quotient = tables.quotient
        assert quotient is not None
        # The pose (t, h⁻¹ĥ) is number t · |H| + h⁻¹ĥ.
        poses = np.concatenate([t * len(quotient) + quotient for t in range(interval or 1)], axis=1)
        measure = None if log_measure is None else np.repeat(log_measure, len(quotient))[:, None]
        tables = replace(tables, quotient=poses, log_measure=measure)
        super().__init__(project_in, project_out, encoding, needs, tables, mode)
        self.windows = tuple(w.window for w in windows)
        self.units = tuple(w.unit for w in windows)
        self.interval = interval
        self.factors = None if factors is None else tuple(factors)
        for i, window in enumerate(windows):
            if window.share is not None:
                self.register_exact(f"log_share_{i}", window.share.log())

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.positions(x))

    def positions(self, x: Tensor, frame: Tensor | None = None) -> list[Grid]:
        """The grid of features with the window of each scale; transformed by ``frame``, see :class:`Grid`."""
        shape, dtype = tuple(x.shape[2:]), self.inverse_action.dtype
        return [Grid(shape, window, dtype=dtype, device=x.device, frame=frame) for window in self.windows]

    def attend(self, x: Tensor, positions: Sequence[Grid]) -> Tensor:
        """The layer on features that lie at the given positions, which have the window of each scale."""
        q, k, v = self._project(x)
        outputs = []
        for scale, grid in enumerate(positions):
            y = attention(
                q if self.interval is None else q[:, :, scale],
                self._keys(k, scale),
                self._keys(v, scale),
                grid,
                self._terms(scale, grid),
                query=self.query,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            )
            outputs.append(y if self.factors is None else self.factors[scale] * y)
        y = torch.stack(outputs, dim=2).flatten(1, 2)  # M, B · n, N, |H|, C
        y = self.project_out(y)
        return join_scales(y.transpose(1, 2), len(self.windows)).unflatten(2, x.shape[2:])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(M, B, N, P, C)`` in lifting and else ``(M, B, n, N, P, C)``."""
        if self.interval is None:
            return self.to_heads(rows_of(x))
        shape = (x.shape[0], len(self.windows))
        projected = self.to_heads(rows_of(split_scales(x, shape[1])))
        q, k, v = (t.unflatten(1, shape) for t in projected)
        return q, k, v

    def _keys(self, k: Tensor, scale: int) -> Tensor:
        """The keys, or values, that the queries of a scale see, ``(M, B, N, P, C)``; none beyond the last scale."""
        return k if self.interval is None else torch.cat(k[:, :, scale : scale + self.interval].unbind(2), dim=3)

    def _terms(self, scale: int, positions: Grid) -> PositionalBias:
        seen = len(self.windows[scale : scale + (self.interval or 1)]) * len(self.quotient)
        inverse = self.inverse_action * self.units[scale]
        log_measure = self.log_measure
        return replace(
            positional_bias(self.encoding, positions, inverse, self.quotient[:, :seen]),
            log_measure=None if log_measure is None or seen == len(self.quotient) else log_measure[:seen],
            log_window=self._buffers.get(f"log_share_{scale}"),
        )


def split_scales(x: Tensor, count: int) -> Tensor:
    """The scales as samples, from ``(B, n · size, ...)`` to ``(B · n, size, ...)``."""
    return x.unflatten(1, (count, -1)).flatten(0, 1)


def join_scales(x: Tensor, count: int) -> Tensor:
    """The scales as channels again, from ``(B · n, size, ...)`` to ``(B, n · size, ...)``."""
    return x.unflatten(0, (x.shape[0] // count, count)).flatten(1, 2)


class PerScale(torch.nn.Module):
    """One module on the features of each of ``count`` scales: ``(B, n · in, *space)`` to ``(B, n · out, *space)``."""

    def __init__(self, module: torch.nn.Module, count: int):
        super().__init__()
        self.module = module
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return join_scales(self.module(split_scales(x, self.count)), self.count)


class ScalePooling(torch.nn.Module):
    """The maximum over ``count`` scales: ``(B, n · size, *space)`` to ``(B, size, *space)``."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.count, -1)).amax(1)

    def extra_repr(self) -> str:
        return f"count={self.count}"
