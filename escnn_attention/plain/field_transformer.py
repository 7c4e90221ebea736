"""Transformers from fields to fields on a grid or a sequence, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class FieldTransformer(torch.nn.Module):
    """An embedding, transformer blocks, a norm and a readout; perhaps a condition, a memory and an encoder of it.

    Args:
        embedding: from the input to the blocks.
        blocks: transformer blocks.
        norm: behind them.
        readout: to the output.
        memory_embedding, encoder, memory_norm: from a memory to what the blocks attend to, likewise; None without.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        blocks: torch.nn.ModuleList,
        norm: torch.nn.Module,
        readout: torch.nn.Module,
        memory_embedding: torch.nn.Module | None = None,
        encoder: torch.nn.ModuleList | None = None,
        memory_norm: torch.nn.Module | None = None,
    ):
        super().__init__()
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.readout = readout
        self.memory_embedding = memory_embedding
        self.encoder = encoder
        self.memory_norm = memory_norm

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        condition: Tensor | None = None,
        mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        memory_coords: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> Tensor:
        """Features ``(B, out, *space)`` of features ``(B, in, *space)``.

        Args:
            x: features.
            memory: of a network that has one: ``(B, memory, *memory_space)``, or at points ``(N, memory)``.
            condition: of a network that has one: ``(B, n)`` or ``(B, n, *space)``.
            mask: ``(B, *space)``, False for positions to leave out.
            memory_key_padding_mask: ``(B, *memory_space)`` or ``(N,)``, True for positions of the memory to ignore.
            memory_coords, memory_batch: ``(N, d)`` and ``(N,)``, of a memory at points.
        """
        if memory is None:
            return self.decode(x, condition, mask)
        encoded = self.encode(memory, memory_key_padding_mask)
        return self.decode(x, condition, mask, encoded, memory_key_padding_mask, memory_coords, memory_batch)

    def encode(self, memory: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """What the blocks attend to, of a memory."""
        if self.encoder is None:
            return memory
        mask = None if key_padding_mask is None else ~key_padding_mask
        if key_padding_mask is not None:
            memory = memory.masked_fill(key_padding_mask.unsqueeze(1), 0.0)
        y = self.memory_embedding(memory)  # type: ignore[misc]
        for block in self.encoder:
            y = block(y, mask)
        encoded: Tensor = self.memory_norm(y)  # type: ignore[misc]
        return encoded

    def decode(
        self, x: Tensor, condition: Tensor | None = None, mask: Tensor | None = None, *memory: Tensor | None
    ) -> Tensor:
        """The output for an encoded memory, with its mask, coordinates and batch."""
        given = () if condition is None else (condition,)
        y = self.embedding(x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0.0))
        for block in self.blocks:
            y = block(y, mask, condition, *memory)
        y = self.readout(self.norm(y, *given))
        return y if mask is None else y.masked_fill(~mask.unsqueeze(1), 0.0)
