"""The attention by itself, without the projections of a layer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.spaces import order, regular
from examples.benchmarks.subjects.subject import Poses, Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from torch import Tensor

    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class Functional(Subject):
    """``escnn_attention.functional.attention`` on random queries, keys and values, global.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        shape: of the grid.
        batch: the number of images.
        num_heads, head_fields: the heads.
        query: whose queries contribute to a pose.
        encoding: the positional encoding.
        backend: ``"auto"`` or the name of one.
    """

    space: str
    shape: tuple[int, ...]
    batch: int
    num_heads: int
    head_fields: int
    query: Poses
    encoding: str
    backend: str = "auto"

    def __str__(self) -> str:
        return f"attention without projections, {self.encoding}, {self.query}"

    def load(self) -> None:
        importlib.import_module("escnn_attention")

    def build(self, conditions: Conditions) -> Step:
        import torch

        from escnn_attention import GroupSelfAttention
        from escnn_attention.functional import attention

        # A layer knows the encoding's terms; its projections are not used.
        kind = regular(self.space, 1)
        layer = GroupSelfAttention(
            kind, kind, self.num_heads, head_fields=self.head_fields, query=self.query, encoding=self.encoding
        )
        plain = layer.plain.to(**place(conditions))
        positions = plain.positions(torch.empty(1, 1, *self.shape, **place(conditions)))
        size = (self.num_heads, self.batch, positions.num_positions, order(self.space), self.head_fields)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, positions, plain.bias(positions), query=self.query, backend=self.backend)

        inputs = [torch.randn(size, **place(conditions)) for _ in range(3)]
        return gradient_step(forward, inputs, plain.encoding.parameters())
