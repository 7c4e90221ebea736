"""What classifiers end in, on plain tensors, and what they export."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Classifier", "PoseMean", "PositionSum", "invariant"]


def invariant(x: Tensor, order: int) -> Tensor:
    """The maximum over the poses and the mean over the positions of regular fields.

    Maps ``(B, fields · order, *space)`` to ``(B, fields)``.
    """
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
        return f"{self.poses}"


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
        logits: Tensor = self.head(invariant(self.stages(x), self.order))
        return logits
