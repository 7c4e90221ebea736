"""Dense blocks, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DenseBlock"]


class DenseBlock(torch.nn.Module):
    """The channels of ``branch(x)`` in front of those of ``crop(x)``."""

    def __init__(self, branch: torch.nn.Module, crop: torch.nn.Module):
        super().__init__()
        self.branch = branch
        self.crop = crop

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch(x), self.crop(x)], dim=1)
