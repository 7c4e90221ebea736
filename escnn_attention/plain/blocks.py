"""Blocks with residual branches, on plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.geometry.points import Cloud, where_present
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.point_attention import PointModule


class Parts(torch.nn.Module):
    """A module of parts, which are given by their names; those of ``optional`` may be left out, and are None then."""

    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **parts: Any):
        super().__init__()
        for name, part in {**parts, **{name: None for name in self.optional if name not in parts}}.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class LayerScale(ExactBuffers):
    """Multiplies ``(B, size, *space)`` by a learned gain, one of each ``field``, the number of that of each channel."""

    field: Tensor

    def __init__(self, field: np.ndarray, initial: float):
        super().__init__()
        self.initial = initial
        self.register_exact("field", field)
        self.gain = Parameter(torch.full((int(field.max()) + 1,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.index_select(0, self.field).to(x.dtype)
        return x * gain.view(-1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


class DropPath(torch.nn.Module):
    """In training, zero for some samples, with probability p; the others are divided by 1 - p."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, batch: Tensor | None = None, *, points: bool = False) -> Tensor:
        """What is left of samples ``(B, size, *space)``, or of the clouds in ``batch`` of ``points`` ``(N, size)``."""
        if not self.training or not self.p:
            return x
        number = len(x) if not points else 1 if batch is None else int(batch.max()) + 1 if len(batch) else 0
        kept = torch.rand(number, device=x.device) >= self.p
        if points:
            kept = kept.expand(len(x)) if batch is None else kept[batch]
        return x * (kept.to(x.dtype) / (1 - self.p)).view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class ResidualBlock(Parts):
    """A residual block, ``shortcut(x) + branch(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


class DenseBlock(Parts):
    """The channels of ``branch(x)`` in front of those of ``crop(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch(x), self.crop(x)], dim=1)


class CrossAttentionBranch(Parts):
    """Attention to a memory, ``gate(after(attention(norm(y, *given), memory)), *given)``; perhaps without a gate."""

    optional = ("gate",)

    def forward(
        self,
        y: Tensor,
        given: tuple[Tensor | None, ...],
        at: tuple[Tensor | None, Tensor | None],
        memory: Tensor,
        key_padding_mask: Tensor | None = None,
        coords: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Features like ``y``, on a grid or at points.

        Args:
            y: features.
            given: what a norm takes beside them: nothing, a condition, or a condition and the cloud of each point.
            at: the coordinates and clouds of features at points.
            memory, key_padding_mask, coords, batch: keys and values, those to ignore, where they are, and samples.
        """
        sets = (None, key_padding_mask, at[0], coords, at[1], batch)
        branch: Tensor = self.after(self.attention(self.norm(y, *given), memory, *sets))
        return branch if self.gate is None else self.gate(branch, *given)


def shown_condition(condition: Tensor | None, hidden: Tensor) -> Tensor | None:
    """A condition, of each position with zeros where ``(B, 1, *space)`` hides it: what it holds reaches no gradient."""
    of_positions = condition is not None and condition.dim() == hidden.dim()
    return condition.masked_fill(hidden, 0.0) if condition is not None and of_positions else condition


class TransformerBlock(Parts):
    """A transformer block: ``y = crop(shortcut(x) + after(attention(before(x))))``, then ``y + feed_forward(y)``.

    Between the two stands the cross-attention of a block that has one. Under a condition c, adaLN-Zero, the block is
    ``y = crop(shortcut(x) + attention_gate(after(attention(before(x, c))), c))``, then
    ``y + feed_forward_gate(feed_forward(feed_forward_norm(y, c)), c)``.
    """

    optional = ("cross_attention", "attention_gate", "feed_forward_norm", "feed_forward_gate")

    def forward(
        self, x: Tensor, mask: Tensor | None = None, condition: Tensor | None = None, *memory: Tensor | None
    ) -> Tensor:
        """The block on features ``(B, in, *space)``; a mask ``(B, *space)`` hides positions.

        The last arguments are those of :meth:`CrossAttentionBranch.forward` from ``memory`` on.
        """
        hidden = None if mask is None else ~mask.unsqueeze(1)
        if hidden is not None:
            x, condition = x.masked_fill(hidden, 0.0), shown_condition(condition, hidden)
        given = () if condition is None else (condition,)
        branch = self.after(self.attention(self.before(x, *given), *(() if mask is None else (mask,))))
        if self.attention_gate is not None:
            branch = self.attention_gate(branch, condition)
        y = self.crop(self.shortcut(x) + branch)
        if self.cross_attention is not None:
            y = y + self.cross_attention(y, given, (None, None), *memory)
        if self.feed_forward_norm is None or self.feed_forward_gate is None:
            z: Tensor = y + self.feed_forward(y)
        else:
            z = y + self.feed_forward_gate(self.feed_forward(self.feed_forward_norm(y, condition)), condition)
        return z if hidden is None else z.masked_fill(self.crop(hidden.expand(-1, z.shape[1], *hidden.shape[2:])), 0.0)


class PointTransformerBlock(Parts, PointModule):
    """A transformer block on points: ``y = shortcut(x) + after(attention(norm(x)))``, then ``y + feed_forward(y)``.

    A condition and a cross-attention are as in :class:`TransformerBlock`.
    """

    optional = TransformerBlock.optional

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
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        memory_coords: Tensor | None = None,
        memory_batch: Tensor | None = None,
    ) -> Tensor:
        """Features ``(N, out)`` of features ``(N, in)``: see :meth:`escnn_attention.PointTransformerBlock.forward`."""
        if condition is None and self.attention_gate is not None:
            raise ValueError("condition: got None, and the norms of this block need one, (clouds, n) or (points, n)")
        seen = () if memory is None else (memory, memory_key_padding_mask, memory_coords, memory_batch)
        cloud = Cloud(coords, edge_index, batch, measure, edge_attr, condition)
        return where_present(lambda x, cloud: self.compute(x, cloud, *seen), x, cloud, mask)

    def compute(self, x: Tensor, cloud: Cloud, *memory: Any) -> Tensor:
        coords, edge_index, batch, measure, edge_attr, condition = cloud
        # A foreign attention may have no argument for features of edges.
        features = () if edge_attr is None else (edge_attr,)
        given: tuple[Tensor | None, ...] = ()
        if condition is not None:
            given = condition, None if condition.shape[0] == x.shape[0] else batch
        y = self.after(self.attention(self.norm(x, *given), coords, edge_index, batch, None, measure, *features))
        y = self.shortcut(x) + self.drop_path(self.attention_gate(y, *given) if given else y, batch)
        if self.cross_attention is not None:
            y = y + self.drop_path(self.cross_attention(y, given, (coords, batch), *memory), batch)
        z = self.feed_forward(self.feed_forward_norm(y, *given) if given else y)
        out: Tensor = y + self.drop_path(self.feed_forward_gate(z, *given) if given else z, batch)
        return out
