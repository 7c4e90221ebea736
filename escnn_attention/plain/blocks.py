"""Blocks with residual branches, on plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.point_attention import PointModule

__all__ = [
    "DenseBlock",
    "DropPath",
    "LayerScale",
    "PointTransformerBlock",
    "ResidualBlock",
    "TransformerBlock",
]


class LayerScale(torch.nn.Module):
    """Multiplies ``(B, size, *space)`` by a learned gain, one of each field.

    Args:
        field: ``(size,)``, the number of the field of each channel.
        initial: the gain at first.
    """

    field: Tensor

    def __init__(self, field: np.ndarray, initial: float):
        super().__init__()
        self.initial = initial
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
        self.gain = Parameter(torch.full((int(field.max()) + 1,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.index_select(0, self.field).to(x.dtype)
        return x * gain.view(-1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


class DropPath(torch.nn.Module):
    """In training, zero for some samples and the others divided by the probability of that.

    Args:
        p: the probability with which a sample is dropped.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, batch: Tensor | None = None, *, points: bool = False) -> Tensor:
        """The samples that are left of ``(B, size, *space)``; of ``(N, size)`` at points, by their cloud in ``batch``.

        Args:
            x: features.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
            points: whether rows are points of clouds, and not samples.
        """
        if not self.training or not self.p:
            return x
        number = len(x) if not points else 1 if batch is None else int(batch.max()) + 1 if len(batch) else 0
        kept = torch.rand(number, device=x.device) >= self.p
        if points:
            kept = kept.expand(len(x)) if batch is None else kept[batch]
        return x * (kept.to(x.dtype) / (1 - self.p)).view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class ResidualBlock(torch.nn.Module):
    """A residual block, ``shortcut(x) + branch(x)``."""

    def __init__(self, branch: torch.nn.Module, shortcut: torch.nn.Module):
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


class DenseBlock(torch.nn.Module):
    """The channels of ``branch(x)`` in front of those of ``crop(x)``."""

    def __init__(self, branch: torch.nn.Module, crop: torch.nn.Module):
        super().__init__()
        self.branch = branch
        self.crop = crop

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch(x), self.crop(x)], dim=1)


class TransformerBlock(torch.nn.Module):
    """A transformer block: ``y = crop(shortcut(x) + after(attention(before(x))))``, then ``y + feed_forward(y)``."""

    def __init__(
        self,
        before: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        shortcut: torch.nn.Module,
        crop: torch.nn.Module,
        feed_forward: torch.nn.Module,
    ):
        super().__init__()
        self.before = before
        self.attention = attention
        self.after = after
        self.shortcut = shortcut
        self.crop = crop
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The block on features ``(B, in, *space)``; positions that a mask ``(B, *space)`` hides are left out."""
        if mask is None:
            y = self.crop(self.shortcut(x) + self.after(self.attention(self.before(x))))
            return y + self.feed_forward(y)
        hidden = ~mask.unsqueeze(1)
        x = x.masked_fill(hidden, 0.0)
        y = self.shortcut(x) + self.after(self.attention(self.before(x), mask))
        hidden, y = self.crop(hidden.expand_as(y)), self.crop(y)
        return (y + self.feed_forward(y)).masked_fill(hidden, 0.0)


class PointTransformerBlock(PointModule):
    """A transformer block on points: ``y = shortcut(x) + after(attention(norm(x)))``, then ``y + feed_forward(y)``."""

    def __init__(
        self,
        norm: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        shortcut: torch.nn.Module,
        feed_forward: torch.nn.Module,
        drop_path: torch.nn.Module,
    ):
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.after = after
        self.shortcut = shortcut
        self.feed_forward = feed_forward
        self.drop_path = drop_path

    def compute(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        # A foreign attention may have no argument for features of edges.
        features = () if edge_attr is None else (edge_attr,)
        attended = self.attention(self.norm(x), coords, edge_index, batch, None, measure, *features)
        y = self.shortcut(x) + self.drop_path(self.after(attended), batch)
        z: Tensor = y + self.drop_path(self.feed_forward(y), batch)
        return z
