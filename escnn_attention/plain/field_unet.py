"""U-shaped networks, on plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.plain.blocks import Parts

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


class Upsample(torch.nn.Module):
    """Interpolates features to the grid of others about the same centre; on a torus to one of twice the size."""

    def __init__(self, circular: bool = False):
        super().__init__()
        self.circular = circular

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        """Features ``(B, C, *space)`` on the grid of ``like``."""
        size, dim = list(like.shape[2:]), x.dim() - 2
        if not self.circular:
            return F.interpolate(x, size, mode=_MODES[dim])
        wrapped = F.pad(x, 2 * dim * [1], mode="circular")
        y = F.interpolate(wrapped, [n + 4 for n in size], mode=_MODES[dim])
        for axis, n in enumerate(size, start=2):
            y = y.narrow(axis, 2, n)
        return y

    def extra_repr(self) -> str:
        return f"circular={self.circular}"


class UNet(Parts):
    """An encoder, a decoder that reads what the encoder has at every level, and a map to the output.

    Attributes:
        embedding: in front of the levels; None without.
        encoder, pools: the layers of each level, the finest first, and between them each to half of the grid.
        decoder: the layers of each level but the coarsest, the finest last. They read the features of the encoder and,
            behind them, of the level below, which ``upsample`` brings to the grid.
        head: to the output; None for a network that gives the features of all levels.
    """

    optional = ("head", "embedding")

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """The output on the grid of ``x``; without a head the features of all levels, the finest first."""
        levels = UNet.levels(self, x)
        return levels if self.head is None else self.head(levels[0])

    def levels(self, x: Tensor) -> list[Tensor]:
        """The features of the decoder at all levels, the finest first."""
        skips = []
        x = x if self.embedding is None else self.embedding(x)
        for i, layers in enumerate(self.encoder):
            x = layers(self.pools[i - 1](x) if i else x)
            skips.append(x)
        levels = [skips.pop()]
        for layers, skip in zip(self.decoder, reversed(skips), strict=True):
            levels.append(layers(torch.cat([skip, self.upsample(levels[-1], skip)], dim=1)))
        return levels[::-1]
