"""The branch of a block that attends to a memory, as in the decoder of a transformer."""

from __future__ import annotations

from typing import Any

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.exporting.modules import exported_parts
from escnn_attention.nn.conditioning import ConditionedGate
from escnn_attention.nn.cross_attention import GroupCrossAttention
from escnn_attention.nn.module import FieldModule
from escnn_attention.plain.blocks import CrossAttentionBranch as PlainCrossAttentionBranch


class CrossAttentionBranch(FieldModule):
    """The branch of a block that attends to a memory: a norm, the attention, and the end, perhaps under a condition."""

    def __init__(
        self,
        norm: EquivariantModule,
        attention: GroupCrossAttention,
        after: EquivariantModule,
        condition: int | None,
    ):
        super().__init__(attention.query_type, attention.out_type)
        self.norm, self.attention, self.after = norm, attention, after
        self.gate = None if condition is None else ConditionedGate(attention.out_type, condition)

    def forward(
        self,
        input: GeometricTensor,
        given: tuple[Tensor | None, ...],
        at: tuple[Tensor | None, Tensor | None],
        memory: GeometricTensor,
        key_padding_mask: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> GeometricTensor:
        """The branch, without the residual connection; the arguments are those of the plain module."""
        normed = self.norm(input, *given)
        branch = self.after(self.attention(normed, memory, None, key_padding_mask, query_batch=at[1], key_batch=batch))
        y: GeometricTensor = branch if self.gate is None else self.gate(branch, *given)
        return y

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.attention.evaluate_output_shape(input_shape)

    def random_memory(self, memory_type: FieldType, x: GeometricTensor) -> dict[str, Any]:
        """Random features to which queries like ``x`` can attend: ``memory`` and, at points, ``memory_batch``."""
        memory, batch = self.attention.random_set(memory_type, x)
        return {"memory": memory} if batch is None else {"memory": memory, "memory_batch": batch}

    def export(self) -> torch.nn.Module:
        return exported_parts(self, PlainCrossAttentionBranch)


def check_cross_attention(attention: Any, out_type: FieldType, norm: str) -> GroupCrossAttention | None:
    """The attention to a memory of a block, if it can have this one; None without."""
    if attention is None:
        return None
    if not isinstance(attention, GroupCrossAttention):
        raise TypeError(f"cross_attention: got {type(attention).__name__}, needed a GroupCrossAttention")
    if norm != "pre":
        raise ValueError(f'cross_attention: got one with norm={norm!r}, needed norm="pre"')
    for name in ("query_type", "out_type"):
        if getattr(attention, name) != out_type:
            raise ValueError(f"cross_attention: its {name} is {getattr(attention, name)}, needed {out_type}")
    if attention.value_type != attention.key_type:
        raise ValueError("cross_attention: got one with a value_type, needed one whose values are made of the keys")
    return attention
