"""The published layers of GSA-Nets, and of GE-ViT, whose package has the same name and the same layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.checkouts import import_from
from examples.benchmarks.subjects.subject import Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions

_MODULES = ("g_selfatt.nn", "g_selfatt.groups")


@dataclass(frozen=True)
class GSA(Subject):
    """Their group self-attention for rotations of the plane. Its queries are always those of all poses.

    Attributes:
        path: the checkout.
        rotations: the number of rotations.
        size: height and width of the images.
        batch: the number of images.
        channels: fields in and out.
        num_heads, head_channels: the heads.
        kernel_size: the width of the window; None for the global layer.
    """

    path: str
    rotations: int
    size: int
    batch: int
    channels: int = 20
    num_heads: int = 9
    head_channels: int = 10
    kernel_size: int | None = None

    def __str__(self) -> str:
        window = "global" if self.kernel_size is None else f"window {self.kernel_size}"
        return f"{self.path} p{self.rotations} {self.size}×{self.size} {window}"

    @property
    def checkout(self) -> str:
        return self.path

    def load(self) -> None:
        import_from(self.path, *_MODULES)

    def build(self, conditions: Conditions) -> Step:
        import torch

        nn, groups = import_from(self.path, *_MODULES)
        Layer = nn.GroupSelfAttention if self.kernel_size is None else nn.GroupLocalSelfAttention
        layer = Layer(
            groups.SE2(self.rotations),
            self.channels,
            self.head_channels,
            self.channels,
            self.num_heads,
            # The window, or the size of the image whose offsets are encoded.
            self.kernel_size or self.size,
            0.0,
        ).to(**place(conditions))
        x = torch.randn(self.batch, self.channels, self.rotations, self.size, self.size, **place(conditions))
        return gradient_step(layer, [x], layer.parameters())
