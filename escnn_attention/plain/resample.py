"""Smaller grids, on plain tensors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._checks import check_grid
from escnn_attention.plain.buffers import ExactBuffers

PoolKind = Literal["max", "avg"]

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class Crop(torch.nn.Module):
    """Takes ``margin`` positions off both ends of every axis behind the first two."""

    def __init__(self, margin: int):
        super().__init__()
        self.margin = margin

    def forward(self, x: Tensor) -> Tensor:
        if not self.margin:
            return x
        check_grid(x.shape[2:])
        for axis in range(2, x.dim()):
            x = x.narrow(axis, self.margin, x.shape[axis] - 2 * self.margin)
        return x

    def extra_repr(self) -> str:
        return f"margin={self.margin}"


class HalvingPool(torch.nn.Module):
    """Pools to half the size: windows of 2 on axes of even length, of 3 on axes of odd length, both with stride 2."""

    def __init__(self, kind: PoolKind, dimensions: int):
        super().__init__()
        self.kind: PoolKind = kind
        self.dimensions = dimensions

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        kernel = [2 + n % 2 for n in x.shape[2:]]
        if self.kind == "avg" and self.dimensions == 3:  # of which PyTorch has no deterministic derivative on CUDA
            for axis, n in enumerate(kernel, start=2):
                x = x.unfold(axis, n, 2).mean(-1)
            return x
        pool = getattr(F, f"{self.kind}_pool{self.dimensions}d")
        pooled: Tensor = pool(x, kernel, stride=2)
        return pooled

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, dimensions={self.dimensions}"


class AntialiasedPool(ExactBuffers):
    """Blurs, and takes every second position: the same of both directions along an axis, whatever its length.

    With ``kind="max"`` the maximum over three positions comes before the blur. A torus has axes of even length.
    """

    even: Tensor
    odd: Tensor

    def __init__(self, kind: PoolKind, dimensions: int, circular: bool = False):
        super().__init__()
        self.kind: PoolKind = kind
        self.dimensions = dimensions
        self.circular = circular
        # Centred between two positions and on one of them.
        self.register_exact("even", np.array([1.0, 3.0, 3.0, 1.0]))
        self.register_exact("odd", np.array([1.0, 4.0, 6.0, 4.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        pool = getattr(F, f"max_pool{self.dimensions}d")
        if self.kind == "max" and self.circular:
            x = pool(F.pad(x, 2 * self.dimensions * [1], mode="circular"), 3, stride=1)
        elif self.kind == "max":
            # The maximum of overlapping windows is several times faster on a CPU where the channels come last.
            last = x.contiguous(memory_format=_CHANNELS_LAST[self.dimensions])
            x = pool(last, 3, stride=1, padding=1).contiguous()
        for axis in range(2, x.dim()):
            x = (x.movedim(axis, -1) @ self._weights(x.shape[axis], x.dtype)).movedim(-1, axis)
        return x

    def _weights(self, n: int, dtype: torch.dtype) -> Tensor:
        """The means (n, n // 2) that halve an axis; at the border they are over the positions that there are."""
        binomial = (self.odd if n % 2 else self.even).to(dtype)
        one_hot = torch.eye(n, dtype=dtype, device=binomial.device)[:, None]
        if self.circular:
            wrapped = F.conv1d(F.pad(one_hot, (1, 1), mode="circular"), binomial[None, None], stride=2)[:, 0]
            return wrapped / binomial.sum()
        weights = F.conv1d(one_hot, binomial[None, None], stride=2, padding=1)[:, 0]
        return weights / weights.sum(0)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, dimensions={self.dimensions}"
