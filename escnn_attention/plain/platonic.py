"""What Platonic Transformers have besides attention, on plain tensors: positions as waves, and their heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.cloud_pooling import pool_clouds

__all__ = ["PlatonicHead", "PoseWaves"]


class PoseWaves(ExactBuffers):
    r"""Regular fields of a position, :math:`f(x, h) = [\cos \Omega h^{-1}x,\; \sin \Omega h^{-1}x]`.

    Maps ``(N, d)`` to ``(N, 2 * frequencies * |H|)``.

    Args:
        frequencies: the rows of :math:`\Omega`, which is learned.
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        scale: the standard deviation of the entries of :math:`\Omega` at first.
    """

    inverse_action: Tensor

    def __init__(self, frequencies: int, inverse_action: np.ndarray, scale: float = 1.0):
        super().__init__()
        self.frequencies = Parameter(scale * torch.randn(frequencies, inverse_action.shape[-1]))
        self.register_exact("inverse_action", inverse_action)

    def forward(self, coords: Tensor) -> Tensor:
        seen = torch.einsum("hij,nj->nhi", self.inverse_action, coords.to(self.inverse_action.dtype))
        angle = seen @ self.frequencies.T  # N, |H|, F
        return torch.cat([angle.cos(), angle.sin()], dim=-1).transpose(1, 2).flatten(1)


class PlatonicHead(torch.nn.Module):
    """Pools over the points of a cloud, or does not, and then reads fields off: the parts side by side.

    Args:
        parts: of regular fields ``(B, in)`` to fields ``(B, out)``.
        pool: over the points, or None.
        divisor: what sums or means over the points are divided by.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], pool: Literal["mean", "sum"] | None, divisor: float):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.pool: Literal["mean", "sum"] | None = pool
        self.divisor = divisor

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        if self.pool is not None:
            x = pool_clouds(x, batch, num_clouds, self.pool, measure) / self.divisor
        return torch.cat([part(x) for part in self.parts], dim=1)
