"""Residual blocks, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ResidualBlock"]


class ResidualBlock(torch.nn.Module):
    """A residual block, ``shortcut(x) + branch(x)``."""

    def __init__(self, branch: torch.nn.Module, shortcut: torch.nn.Module):
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y
