"""Blocks with residual branches, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.geometry.points import where_present
from escnn_attention.plain.point_attention import PointModule

__all__ = [
    "ConditionedPointTransformerBlock",
    "ConditionedTransformerBlock",
    "DenseBlock",
    "DropPath",
    "LayerScale",
    "PointTransformerBlock",
    "ResidualBlock",
    "TransformerBlock",
    "conditioned_present",
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


class ConditionedTransformerBlock(torch.nn.Module):
    """A transformer block under a condition c, adaLN-Zero.

    It is ``y = crop(shortcut(x) + attention_gate(after(attention(before(x, c))), c))``, then
    ``y + feed_forward_gate(feed_forward(feed_forward_norm(y, c)), c)``.
    """

    def __init__(
        self,
        before: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        attention_gate: torch.nn.Module,
        shortcut: torch.nn.Module,
        crop: torch.nn.Module,
        feed_forward_norm: torch.nn.Module,
        feed_forward: torch.nn.Module,
        feed_forward_gate: torch.nn.Module,
    ):
        super().__init__()
        self.before = before
        self.attention = attention
        self.after = after
        self.attention_gate = attention_gate
        self.shortcut = shortcut
        self.crop = crop
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_gate = feed_forward_gate

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        """The block on features ``(B, in, *space)``.

        Args:
            x: features.
            condition: ``(B, n)``, or ``(B, n, *space)`` for one at each position.
            mask: ``(B, *space)``, False for positions to leave out.
        """
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        attended = self.attention(self.before(x, condition), *(() if mask is None else (mask,)))
        y = self.crop(self.shortcut(x) + self.attention_gate(self.after(attended), condition))
        branch = self.feed_forward(self.feed_forward_norm(y, condition))
        z: Tensor = y + self.feed_forward_gate(branch, condition)
        if mask is None:
            return z
        return z.masked_fill(self.crop(~mask.unsqueeze(1).expand(-1, z.shape[1], *mask.shape[1:])), 0.0)


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


class ConditionedPointTransformerBlock(torch.nn.Module):
    """A transformer block on points under a condition c, adaLN-Zero.

    It is ``y = shortcut(x) + attention_gate(after(attention(norm(x, c))), c)``, then
    ``y + feed_forward_gate(feed_forward(feed_forward_norm(y, c)), c)``.
    """

    def __init__(
        self,
        norm: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        attention_gate: torch.nn.Module,
        shortcut: torch.nn.Module,
        feed_forward_norm: torch.nn.Module,
        feed_forward: torch.nn.Module,
        feed_forward_gate: torch.nn.Module,
        drop_path: torch.nn.Module,
    ):
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.after = after
        self.attention_gate = attention_gate
        self.shortcut = shortcut
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_gate = feed_forward_gate
        self.drop_path = drop_path

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Features ``(N, out)`` of features ``(N, in)``: see :meth:`escnn_attention.PointTransformerBlock.forward`.

        Args:
            x, coords, edge_index, batch, mask, measure, edge_attr: as there.
            condition: ``(clouds, n)`` with ``batch``, ``(1, n)`` for a single cloud, or ``(N, n)``, one for each point.
        """
        if condition is None:
            raise ValueError("condition: got None, and the norms of this block need one, (clouds, n) or (points, n)")
        return conditioned_present(
            self.compute, x, coords, edge_index, batch, mask, measure, edge_attr, condition=condition
        )

    def compute(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
        condition: Tensor,
    ) -> Tensor:
        """The output at points of which no mask hides any."""
        cloud = None if condition.shape[0] == x.shape[0] else batch
        features = () if edge_attr is None else (edge_attr,)
        attended = self.attention(self.norm(x, condition, cloud), coords, edge_index, batch, None, measure, *features)
        y = self.shortcut(x) + self.drop_path(self.attention_gate(self.after(attended), condition, cloud), batch)
        branch = self.feed_forward(self.feed_forward_norm(y, condition, cloud))
        z: Tensor = y + self.drop_path(self.feed_forward_gate(branch, condition, cloud), batch)
        return z


def conditioned_present(
    layer: Callable[..., Tensor],
    x: Tensor,
    coords: Tensor,
    edge_index: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    measure: Tensor | None,
    edge_attr: Tensor | None,
    *,
    condition: Tensor,
) -> Tensor:
    """The output of a layer under a condition at the points that a mask shows, and zeros at the others."""
    if mask is None:
        return layer(x, coords, edge_index, batch, measure, edge_attr, condition)
    if condition.shape[0] != x.shape[0]:
        condition = condition.expand(x.shape[0], -1) if batch is None else condition.index_select(0, batch)

    def of_both(both: Tensor, *others: Tensor | None) -> Tensor:
        features, rows = both.tensor_split([x.shape[1]], 1)
        return layer(features, *others, rows)

    # Conditions are left out with their points, as further channels.
    return where_present(of_both, mask, torch.cat([x, condition], 1), coords, edge_index, batch, measure, edge_attr)
