"""Transformer blocks on point clouds, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.plain.point_module import PointModule

__all__ = ["PointTransformerBlock"]


class PointTransformerBlock(PointModule):
    """A transformer block on points: ``y = shortcut(x) + attention(norm(x))``, then ``y + feed_forward(y)``."""

    def __init__(
        self,
        norm: torch.nn.Module,
        attention: torch.nn.Module,
        shortcut: torch.nn.Module,
        feed_forward: torch.nn.Module,
    ):
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.shortcut = shortcut
        self.feed_forward = feed_forward

    def of_all(
        self, x: Tensor, coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, measure: Tensor | None
    ) -> Tensor:
        y = self.shortcut(x) + self.attention(self.norm(x), coords, edge_index, batch, None, measure)
        return y + self._feed(y, coords)

    def _feed(self, y: Tensor, coords: Tensor) -> Tensor:
        z: Tensor = self.feed_forward(y)
        return z
