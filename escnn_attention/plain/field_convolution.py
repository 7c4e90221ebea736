"""Convolutions of the fields of each kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FieldConvolution(torch.nn.Module):
    """Convolutions of some channels each, ``(B, in, *space)``, whose outputs ``(B, out, *space)`` follow each other."""

    def __init__(self, parts: Sequence[torch.nn.Module], channels: Sequence[Sequence[int]]):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        for i, some in enumerate(channels if len(parts) > 1 else ()):
            self.register_buffer(f"channels_{i}", torch.tensor(some), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            y: Tensor = self.parts[0](x)
            return y
        made = [part(x.index_select(1, getattr(self, f"channels_{i}"))) for i, part in enumerate(self.parts)]
        return torch.cat(made, dim=1)
