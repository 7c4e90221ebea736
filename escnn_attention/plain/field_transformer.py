"""Networks of transformer blocks on a grid or a sequence, on plain tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["FieldTransformer"]


class FieldTransformer(torch.nn.Module):
    """An embedding, transformer blocks, a norm and a readout; blocks and norm perhaps under a condition."""

    def __init__(
        self,
        embedding: torch.nn.Module,
        blocks: Iterable[torch.nn.Module],
        norm: torch.nn.Module,
        readout: torch.nn.Module,
    ):
        super().__init__()
        self.embedding = embedding
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm = norm
        self.readout = readout

    def forward(self, x: Tensor, condition: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Features ``(B, out, *space)`` of features ``(B, in, *space)``.

        Args:
            x: features.
            condition: ``(B, n)`` or ``(B, n, *space)``, of a network that has one.
            mask: ``(B, *space)``, False for positions to leave out.
        """
        given = () if condition is None else (condition,)
        y = self.embedding(x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0.0))
        for block in self.blocks:
            y = block(y, *given, mask)
        y = self.readout(self.norm(y, *given))
        return y if mask is None else y.masked_fill(~mask.unsqueeze(1), 0.0)
