"""Transformers of the patches of images, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["ClassToken", "VisionTransformer", "mixed"]


class ClassToken(ExactBuffers):
    """Positions ``(B, C, *space)`` in a row, behind a learned token: ``(B, C, 1, ..., 1, 1 + N)``.

    Args:
        invariants: ``(C, k)``, the vectors that no element changes, of which the token is made.
        there: whether there is a token.
    """

    invariants: Tensor

    def __init__(self, invariants: np.ndarray, there: bool = True):
        super().__init__()
        self.register_exact("invariants", invariants)
        self.weight = Parameter(0.02 * torch.randn(invariants.shape[1])) if there else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)
        if self.weight is not None:
            token = (self.invariants @ self.weight).to(x.dtype)
            rows = torch.cat([token[:, None].expand(x.shape[0], -1, 1), rows], dim=2)
        return rows[(slice(None), slice(None), *[None] * (x.dim() - 3))]

    def read(self, x: Tensor) -> Tensor:
        """The token of features ``(B, C, 1, ..., 1, 1 + N)``, ``(B, C)``; without one the mean of the positions."""
        rows = x.flatten(2)
        return rows.mean(2) if self.weight is None else rows[..., 0]


def mixed(map: torch.nn.Module, x: Tensor) -> Tensor:
    """What a map of channels, which are its last axis, makes of features ``(B, C, *space)``."""
    y: Tensor = map(x.movedim(1, -1)).movedim(-1, 1)
    return y


class VisionTransformer(torch.nn.Module):
    """A transformer of patches: see :class:`escnn_attention.models.VisionTransformer`.

    Args:
        stem: from images to features of patches, with their positions.
        token: puts them in a row, and reads them in the end.
        blocks: the blocks that are equivariant.
        invariants: what is read of their features; the identity for the features themselves.
        leave: a linear map of this.
        plain_blocks: the blocks behind it.
        norm: of their features.
        head: from the features that are read to logits.
    """

    def __init__(
        self,
        stem: torch.nn.Module,
        token: ClassToken,
        blocks: Sequence[torch.nn.Module],
        invariants: torch.nn.Module,
        leave: torch.nn.Module,
        plain_blocks: Sequence[torch.nn.Module],
        norm: torch.nn.Module,
        head: torch.nn.Module,
    ):
        super().__init__()
        self.stem = stem
        self.token = token
        self.blocks = torch.nn.Sequential(*blocks)
        self.invariants = invariants
        self.leave = leave
        self.plain_blocks = torch.nn.Sequential(*plain_blocks)
        self.norm = norm
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        y = self.invariants(self.blocks(self.token(self.stem(x))))
        logits: Tensor = self.head(self.token.read(mixed(self.norm, self.plain_blocks(mixed(self.leave, y)))))
        return logits
