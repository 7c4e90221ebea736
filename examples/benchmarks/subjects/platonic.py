"""The published layer of Platonic Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.checkouts import import_from
from examples.benchmarks.subjects.subject import Step, Subject, gradient_step, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions

_MODULE = "platonic_transformers.models.platoformer.conv"


@dataclass(frozen=True)
class Platonic(Subject):
    """``PlatonicConv`` with softmax attention in its dense mode, octahedral: the keys of a frame are its own.

    Attributes:
        path: the checkout.
        points: the number of points of a cloud.
        batch: the number of clouds.
        channels: in, between and out; a multiple of 24.
        head_channels: the channels of a head.
    """

    path: str
    points: int
    batch: int
    channels: int
    head_channels: int

    def __str__(self) -> str:
        return f"{self.path} {self.points} points"

    @property
    def checkout(self) -> str:
        return self.path

    def load(self) -> None:
        import_from(self.path, _MODULE)

    def build(self, conditions: Conditions) -> Step:
        import torch

        (conv,) = import_from(self.path, _MODULE)
        layer = conv.PlatonicConv(
            self.channels,
            self.channels,
            embed_dim=self.channels,
            num_heads=self.channels // self.head_channels,
            solid_name="octahedron",
            attention=True,
            use_key=True,
        ).to(**place(conditions))
        x = torch.randn(self.batch, self.points, self.channels, **place(conditions))
        positions = torch.randn(self.batch, self.points, 3, **place(conditions))
        return gradient_step(lambda x: layer(x, positions), [x], layer.parameters())
