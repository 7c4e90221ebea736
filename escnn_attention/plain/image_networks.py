"""Networks of images and of fields on grids, on plain tensors."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.blocks import Parts, shown_condition
from escnn_attention.plain.buffers import ExactBuffers


def invariant(x: Tensor, order: int) -> Tensor:
    """The maximum over poses and the mean over positions, of ``(B, fields · order, *space)`` to ``(B, fields)``."""
    return x.unflatten(1, (-1, order)).amax(dim=2).flatten(2).mean(dim=2)


class PoseMean(torch.nn.Module):
    """Replaces features ``(B, fields * poses, *space)`` by their mean over the poses, at every pose."""

    def __init__(self, poses: int):
        super().__init__()
        self.poses = poses

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.poses))
        return x.mean(2, keepdim=True).expand_as(x).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"poses={self.poses}"


class PositionSum(torch.nn.Module):
    """Sums features ``(B, channels, *space)`` over all positions, to ``(B, channels, 1, ..., 1)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(tuple(range(2, x.dim())), keepdim=True) if x.dim() > 2 else x


class Classifier(torch.nn.Module):
    """Stages that give regular fields, :func:`invariant`, and a map to the classes."""

    def __init__(self, stages: torch.nn.Module, order: int, head: torch.nn.Module):
        super().__init__()
        self.stages = stages
        self.order = order
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.stages(x))

    def read(self, features: Tensor) -> Tensor:
        """The logits of the features of the last stage."""
        logits: Tensor = self.head(invariant(features, self.order))
        return logits


class ClassToken(ExactBuffers):
    """Positions ``(B, C, *space)`` in a row, behind R + 1 learned tokens: ``(B, C, 1, ..., 1, 1 + R + N)``.

    Tokens are combinations of the ``invariants`` ``(C, k)``. The first, if it is ``there``, is read.
    """

    invariants: Tensor

    def __init__(self, invariants: np.ndarray, there: bool = True, registers: int = 0):
        super().__init__()
        self.register_exact("invariants", invariants)
        self.weight = Parameter(0.02 * torch.randn(invariants.shape[1])) if there else None
        self.registers = Parameter(0.02 * torch.randn(registers, invariants.shape[1])) if registers else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)
        first = None if self.weight is None else self.weight.unsqueeze(0)
        learned = [weight for weight in (first, self.registers) if weight is not None]
        if learned:
            tokens = (self.invariants @ torch.cat(learned).T).to(x.dtype)
            rows = torch.cat([tokens.expand(x.shape[0], -1, -1), rows], dim=2)
        return rows[(slice(None), slice(None), *[None] * (x.dim() - 3))]

    def read(self, rows: Tensor) -> Tensor:
        """The token ``(B, C)`` of features ``(B, 1 + R + N, C)``; without one the mean of the positions."""
        if self.weight is not None:
            return rows[:, 0]
        return rows[:, 0 if self.registers is None else len(self.registers) :].mean(1)


def mixed(map: torch.nn.Module, x: Tensor) -> Tensor:
    """A map of the last axis, applied to the channels of features ``(B, C, *space)``."""
    y: Tensor = map(x.movedim(1, -1)).movedim(-1, 1)
    return y


class VisionTransformer(Parts):
    """A transformer of patches: see :class:`escnn_attention.models.VisionTransformer`.

    Attributes:
        embedding, positions: from images to features of patches, and their positions.
        token: puts the features of patches in a row behind learned tokens, and reads them in the end.
        blocks: the equivariant blocks.
        invariants, leave: a module that reads invariants of their features, or None, and a linear map of these.
        plain_blocks, norm, head: the blocks behind it, the norm of their features, and the map to logits.
        decoder: from the features of the equivariant blocks to fields, in place of what comes behind; None for logits.
    """

    optional = ("invariants", "decoder")

    def forward(self, x: Tensor) -> Tensor:
        if self.decoder is not None:
            patches = self._embed(x)
            rows = self._equivariant(patches).flatten(2)[..., -patches.shape[2:].numel() :]
            return self._apply_module(self.decoder, rows.unflatten(2, patches.shape[2:]))
        logits: Tensor = self.head(self.token.read(self.tokens(x)))
        return logits

    def _equivariant(self, patches: Tensor) -> Tensor:
        """The features of all tokens behind the equivariant blocks."""
        y = self.token(patches)
        for block in self.blocks:
            y = self._apply_module(block, y)
        return y

    def tokens(self, x: Tensor) -> Tensor:
        """The features of all tokens: see :meth:`escnn_attention.models.VisionTransformer.tokens`."""
        y = self._equivariant(self._embed(x))
        y = y if self.invariants is None else self._apply_module(self.invariants, y)
        z = mixed(self.leave, y)
        for block in self.plain_blocks:
            z = self._apply_module(block, z)
        rows: Tensor = self.norm(z.flatten(2).transpose(1, 2))
        return rows

    def _embed(self, x: Tensor) -> Tensor:
        """The features of patches, with their positions, of images."""
        return self._apply_module(self.positions, self._apply_module(self.embedding, x))

    def _apply_module(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        """Apply a module of the network to features ``(B, C, *space)``."""
        y: Tensor = module(x)
        return y


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
        if mask is not None:
            hidden = ~mask.unsqueeze(1)
            x, condition = x.masked_fill(hidden, 0.0), shown_condition(condition, hidden)
        given = () if condition is None else (condition,)
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y, mask, condition, *memory)
        y = self.readout(self.norm(y, *given))
        return y if mask is None else y.masked_fill(~mask.unsqueeze(1), 0.0)


class Upsample(torch.nn.Module):
    """Interpolates features to the grid of others about the same centre; on a torus to one of twice the size."""

    def __init__(self, circular: bool = False):
        super().__init__()
        self.circular = circular

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        """Features ``(B, C, *space)`` on the grid of ``like``."""
        size, dim = list(like.shape[2:]), x.dim() - 2
        if not self.circular:
            return _interpolated(x, size)
        y = _interpolated(F.pad(x, 2 * dim * [1], mode="circular"), [n + 4 for n in size])
        for axis, n in enumerate(size, start=2):
            y = y.narrow(axis, 2, n)
        return y

    def extra_repr(self) -> str:
        return f"circular={self.circular}"


def _interpolated(x: Tensor, size: list[int]) -> Tensor:
    if x.dim() == 5:
        return F.interpolate(x, size, mode="trilinear")
    # A single axis is one of two: by itself PyTorch has no deterministic derivative of it on CUDA.
    alone = x.dim() == 3
    y = F.interpolate(x.unsqueeze(2) if alone else x, [1, *size] if alone else size, mode="bilinear")
    return y.squeeze(2) if alone else y


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
