"""One step of training of the networks of the attentive group convolutions, on C4."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from examples.benchmarks.subjects.spaces import gspace
from examples.benchmarks.subjects.subject import Step, Subject, place, training_step

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions

Variant = Literal["full", "channel", "spatial", "features"]
"""Where the convolutions of a network attend."""


@dataclass(frozen=True)
class Classifier(Subject):
    """Forward pass, gradients and optimizer.

    Attributes:
        network: ``"p4-cnn"``, for rotated MNIST, or ``"all-cnn-c"``, for CIFAR-10.
        attention: where the convolutions attend; None for nowhere.
        batch: the number of images.
        width: the regular fields of a layer; None for those of the paper.
    """

    network: str
    attention: Variant | None
    batch: int
    width: int | None = None

    def __str__(self) -> str:
        return f"training step of {self.network}, attention {self.attention}"

    def load(self) -> None:
        importlib.import_module("escnn_attention.models")
        # The first optimizer of a process imports torch's compiler.
        importlib.import_module("torch._dynamo")

    def build(self, conditions: Conditions) -> Step:
        import torch

        from escnn_attention.models import AllCNNC, GroupCNN

        make, size = {"p4-cnn": (GroupCNN.rotmnist, 28), "all-cnn-c": (AllCNNC.cifar10, 32)}[self.network]
        network = make(gspace("c4"), attention=self.attention, width=self.width).to(**place(conditions))
        images = torch.randn(self.batch, network.in_type.size, size, size, **place(conditions))
        return training_step(network, images, network.num_classes, network.parameters())
