"""A transformer block on point clouds, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.neighbours import among

__all__ = ["PointTransformerBlock"]


class PointTransformerBlock(torch.nn.Module):
    """``y = shortcut(x) + attention(norm(x))`` and ``y + feed_forward(y)``, on ``(N, in)`` with coordinates."""

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

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> Tensor:
        if mask is not None:
            there = mask.nonzero().squeeze(-1)
            batch, measure = (None if t is None else t[there] for t in (batch, measure))
            y = self.forward(x[there], coords[there], among(there, mask, edge_index), batch, None, measure)
            return y.new_zeros(len(x), y.shape[1]).index_copy(0, there, y)
        y = self.shortcut(x) + self.attention(self.norm(x), coords, edge_index, batch, None, measure)
        z: Tensor = y + self.feed_forward(y)
        return z
