"""An exported classifier."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Classifier", "invariant"]


def invariant(x: Tensor, order: int) -> Tensor:
    """The maximum over the poses and the mean over the positions of regular fields.

    Maps ``(B, fields · order, *space)`` to ``(B, fields)``.
    """
    return x.unflatten(1, (-1, order)).amax(dim=2).flatten(2).mean(dim=2)


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
