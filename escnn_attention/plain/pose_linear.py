"""Pointwise equivariant linear maps, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.plain.projections import FromPoses, ToPoses

__all__ = ["PoseLinear"]


class PoseLinear(torch.nn.Module):
    """A projection to or from poses as a map of features ``(B, size, *space)``.

    Args:
        projection: the projection.
        order: the number of poses.
    """

    def __init__(self, projection: ToPoses | FromPoses, order: int):
        super().__init__()
        self.projection = projection
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        # Channels last, and as one row of positions.
        y = x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1)
        if isinstance(self.projection, ToPoses):
            y = self.projection(y).squeeze(0).transpose(-1, -2).flatten(-2)
        else:
            y = self.projection(y.unflatten(-1, (-1, self.order)).transpose(-1, -2).unsqueeze(0))
        return y.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 2 else y.squeeze(1)
