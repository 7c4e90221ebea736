"""Blocks with residual branches, on plain tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.geometry.points import Cloud, where_present
from escnn_attention.plain.point_attention import PointModule


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


class CrossAttentionBranch(torch.nn.Module):
    """Attention to a memory, ``gate(after(attention(norm(y, *given), memory)), *given)``; perhaps without a gate."""

    def __init__(
        self,
        norm: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        gate: torch.nn.Module | None = None,
    ):
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.after = after
        self.gate = gate

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
        """Features like ``y``, ``(B, size, *space)`` or at points ``(N, size)``.

        Args:
            y: features.
            given: what a norm takes beside them: nothing, a condition, or a condition and the number of the cloud of
                each point.
            at: of features at points, the coordinates and the number of the cloud of each.
            memory: keys and values, ``(B, key size, *key_space)``, or at points ``(N', key size)``.
            key_padding_mask: ``(B, *key_space)`` or ``(N',)``, True for keys to ignore.
            coords, batch: of a memory at points, the coordinates ``(N', d)`` and the number of the sample of each.
        """
        sets = (None, key_padding_mask, at[0], coords, at[1], batch)
        branch: Tensor = self.after(self.attention(self.norm(y, *given), memory, *sets))
        return branch if self.gate is None else self.gate(branch, *given)


class TransformerBlock(torch.nn.Module):
    """A transformer block: ``y = crop(shortcut(x) + after(attention(before(x))))``, then ``y + feed_forward(y)``.

    Between the two stands the cross-attention of a block that has one. Under a condition c, adaLN-Zero, the block is
    ``y = crop(shortcut(x) + attention_gate(after(attention(before(x, c))), c))``, then
    ``y + feed_forward_gate(feed_forward(feed_forward_norm(y, c)), c)``.
    """

    def __init__(
        self,
        before: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        shortcut: torch.nn.Module,
        crop: torch.nn.Module,
        feed_forward: torch.nn.Module,
        cross_attention: torch.nn.Module | None = None,
        *,
        attention_gate: torch.nn.Module | None = None,
        feed_forward_norm: torch.nn.Module | None = None,
        feed_forward_gate: torch.nn.Module | None = None,
    ):
        super().__init__()
        self.before = before
        self.attention = attention
        self.after = after
        self.attention_gate = attention_gate
        self.shortcut = shortcut
        self.crop = crop
        self.cross_attention = cross_attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_gate = feed_forward_gate

    def forward(
        self, x: Tensor, mask: Tensor | None = None, condition: Tensor | None = None, *memory: Tensor | None
    ) -> Tensor:
        """The block on features ``(B, in, *space)``.

        Args:
            x: features.
            mask: ``(B, *space)``, False for positions to leave out.
            condition: of a block that has one: ``(B, n)``, or ``(B, n, *space)`` for one at each position.
            memory: the last arguments of :meth:`CrossAttentionBranch.forward`, from ``memory`` on.
        """
        hidden = None if mask is None else ~mask.unsqueeze(1)
        if hidden is not None:
            x = x.masked_fill(hidden, 0.0)
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


class PointTransformerBlock(PointModule):
    """A transformer block on points: ``y = shortcut(x) + after(attention(norm(x)))``, then ``y + feed_forward(y)``.

    A condition and a cross-attention are as in :class:`TransformerBlock`.
    """

    def __init__(
        self,
        norm: torch.nn.Module,
        attention: torch.nn.Module,
        after: torch.nn.Module,
        shortcut: torch.nn.Module,
        feed_forward: torch.nn.Module,
        drop_path: torch.nn.Module,
        cross_attention: torch.nn.Module | None = None,
        *,
        attention_gate: torch.nn.Module | None = None,
        feed_forward_norm: torch.nn.Module | None = None,
        feed_forward_gate: torch.nn.Module | None = None,
    ):
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.after = after
        self.attention_gate: Any = attention_gate
        self.shortcut = shortcut
        self.feed_forward_norm: Any = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_gate: Any = feed_forward_gate
        self.drop_path = drop_path
        self.cross_attention: Any = cross_attention

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
        """Features ``(N, out)`` of features ``(N, in)``: see :meth:`escnn_attention.PointTransformerBlock.forward`.

        Args:
            x, coords, edge_index, batch, mask, measure, edge_attr: as there.
            condition: of a block with one: ``(clouds, n)`` with ``batch``, ``(1, n)`` for a single cloud, or
                ``(N, n)``, one for each point.
            memory, memory_key_padding_mask, memory_coords, memory_batch: of a block with a cross-attention, what
                :meth:`CrossAttentionBranch.forward` takes from ``memory`` on.
        """
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
