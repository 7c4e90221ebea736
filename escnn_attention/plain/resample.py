"""Smaller grids, on plain tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from escnn_attention._checks import check_grid

__all__ = ["Crop", "HalvingPool", "PoolKind"]

PoolKind = Literal["max", "avg"]


class Crop(torch.nn.Module):
    """Takes ``margin`` positions off both ends of every axis behind the first two."""

    def __init__(self, margin: int):
        super().__init__()
        self.margin = margin

    def forward(self, x: Tensor) -> Tensor:
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
        pool = getattr(torch.nn.functional, f"{self.kind}_pool{self.dimensions}d")
        pooled: Tensor = pool(x, kernel, stride=2)
        return pooled

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, dimensions={self.dimensions}"
