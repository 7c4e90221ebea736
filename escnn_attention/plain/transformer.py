"""The transformer block on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TransformerBlock"]


class TransformerBlock(torch.nn.Module):
    """A transformer block: ``y = crop(shortcut(x) + attention(x))``, then ``y + feed_forward(y)``."""

    def __init__(
        self,
        attention: torch.nn.Module,
        shortcut: torch.nn.Module,
        crop: torch.nn.Module,
        feed_forward: torch.nn.Module,
    ):
        super().__init__()
        self.attention = attention
        self.shortcut = shortcut
        self.crop = crop
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.crop(self.shortcut(x) + self.attention(x))
        return y + self.feed_forward(y)
