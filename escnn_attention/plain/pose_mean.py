"""The mean over the poses, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PoseMean"]


class PoseMean(torch.nn.Module):
    """Replaces features ``(B, fields * poses, *space)`` by their mean over the poses, at every pose."""

    def __init__(self, poses: int):
        super().__init__()
        self.poses = poses

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.poses))
        return x.mean(2, keepdim=True).expand_as(x).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"{self.poses}"
