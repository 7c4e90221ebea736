"""The published networks of attentive group convolutions, for rotated MNIST."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.checkouts import import_from
from examples.benchmarks.subjects.classifier import Variant
from examples.benchmarks.subjects.subject import Step, Subject, place, training_step

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions

_MODULES = ("attgconv", "experiments.rot_mnist.models")
_NETWORKS: dict[Variant | None, str] = {
    None: "P4CNN",
    "channel": "A_Ch_P4CNN",
    "spatial": "A_Sp_P4CNN",
    "full": "A_P4CNN",
    "features": "fA_P4CNN",
}


@dataclass(frozen=True)
class AttGConvs(Subject):
    """Forward pass, gradients and optimizer of their p4-CNN.

    Attributes:
        path: the checkout.
        attention: where the convolutions attend; None for nowhere.
        batch: the number of images.
    """

    path: str
    attention: Variant | None
    batch: int

    def __str__(self) -> str:
        return f"{self.path} training step of p4-cnn, attention {self.attention}"

    @property
    def checkout(self) -> str:
        return self.path

    def load(self) -> None:
        import_from(self.path, *_MODULES)
        # The first optimizer of a process imports torch's compiler.
        importlib.import_module("torch._dynamo")

    def build(self, conditions: Conditions) -> Step:
        import torch

        _, models = import_from(self.path, *_MODULES)
        network = getattr(models, _NETWORKS[self.attention])().to(**place(conditions))
        images = torch.randn(self.batch, 1, 28, 28, **place(conditions))
        return training_step(network, images, 10, network.parameters())
