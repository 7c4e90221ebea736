"""Attention over the poses, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.plain.kernels import PoseKernel

__all__ = ["PoseAttention"]


class PoseAttention(torch.nn.Module):
    """Multiplies features ``(B, fields * poses, *space)`` by one map for each pose, or by what it leaves.

    Args:
        poses: the poses of a field.
        weight: an equivariant map from the fields to one, at every position.
        residual: whether the map is what is suppressed.
    """

    def __init__(self, poses: int, weight: PoseKernel, residual: bool):
        super().__init__()
        self.poses = poses
        self.weight = weight
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.attention_maps(x).unsqueeze(1)
        return (x.unflatten(1, (-1, self.poses)) * (1 - alpha if self.residual else alpha)).flatten(1, 2)

    def attention_maps(self, x: Tensor) -> Tensor:
        """The attention to each pose at each position, ``(B, poses, *space)``."""
        weight = self.weight()[0].flatten(1)
        return torch.einsum("pi,bi...->bp...", weight, x).sigmoid()

    def extra_repr(self) -> str:
        return f"residual={self.residual}"
