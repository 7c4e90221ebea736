"""escnn's steerable convolution."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.spaces import regular
from examples.benchmarks.subjects.subject import Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class Convolution(Subject):
    """``R2Conv`` between regular fields, padded so that the grid stays as it is.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        shape: of the grid.
        batch: the number of images.
        fields: regular fields in and out.
        kernel_size: the width of the kernel.
    """

    space: str
    shape: tuple[int, ...]
    batch: int
    fields: int = 20
    kernel_size: int = 5

    def __str__(self) -> str:
        return f"R2Conv {self.space} {'×'.join(map(str, self.shape))}"

    def load(self) -> None:
        # Not for its layers: it mends what keeps escnn from building kernel bases with a recent scikit-learn.
        importlib.import_module("escnn_attention")

    def build(self, conditions: Conditions) -> Step:
        import torch
        from escnn.nn import R2Conv

        kind = regular(self.space, self.fields)
        layer = R2Conv(kind, kind, self.kernel_size, padding=self.kernel_size // 2).to(**place(conditions))
        x = torch.randn(self.batch, kind.size, *self.shape, **place(conditions))
        return gradient_step(lambda x: layer(kind(x)).tensor, [x], layer.parameters())
