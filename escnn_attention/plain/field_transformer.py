"""Transformers from fields to fields on a grid or a sequence, on plain tensors."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.plain.blocks import Parts


class FieldTransformer(Parts):
    """An embedding, blocks, a norm and a readout; perhaps a condition, and a memory that passes an encoder."""

    optional = ("memory_embedding", "encoder", "memory_norm")

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
        """Features ``(B, out, *space)``: see :meth:`escnn_attention.models.FieldTransformer.forward`."""
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
        y = self.memory_embedding(memory)
        for block in self.encoder:
            y = block(y, mask)
        encoded: Tensor = self.memory_norm(y)
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
