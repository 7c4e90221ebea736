"""Plain scaled dot product attention, of the sizes that the Fourier identity leads to."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.subject import Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from torch import Tensor

    from examples.benchmarks.conditions import Conditions


def widened(channels: int, frequencies: int = 16) -> int:
    """The width of vectors of so many channels once they carry the waves of FourierEncoding, 16 by default.

    Rounded up to a multiple of 16, for which torch's kernels are fastest.
    """
    return -(-(channels + 2 * frequencies) // 16) * 16


@dataclass(frozen=True)
class Dense(Subject):
    """torch's attention on random vectors, one call for every output pose.

    A lower bound: nothing is projected, no vector is widened and nothing is summed over query poses.

    Attributes:
        batch: the number of images.
        num_heads: the number of heads.
        poses: the number of output poses.
        queries: queries of an output pose.
        keys: keys of an output pose.
        width: of queries, keys and values.
    """

    batch: int
    num_heads: int
    poses: int
    queries: int
    keys: int
    width: int

    def __str__(self) -> str:
        return f"plain attention {self.queries}×{self.keys}"

    def load(self) -> None:
        importlib.import_module("torch")

    def build(self, conditions: Conditions) -> Step:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        def vectors(count: int) -> Tensor:
            return torch.randn(self.poses, self.batch, self.num_heads, count, self.width, **place(conditions))

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.stack([scaled_dot_product_attention(*pose) for pose in zip(q, k, v, strict=True)])

        return gradient_step(forward, [vectors(self.queries), vectors(self.keys), vectors(self.keys)], [])
