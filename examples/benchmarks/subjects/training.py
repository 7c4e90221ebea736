"""One step of training of a whole GSA-Net, as in the paper, dropout included."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from examples.benchmarks.subjects.spaces import gspace
from examples.benchmarks.subjects.subject import Poses, Step, Subject, place, training_step

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class TrainingStep(Subject):
    """Forward pass, gradients and optimizer, and where the time goes.

    Attributes:
        network: ``"rotmnist-p4"``, the network for rotated MNIST on C4, or ``"d4-96"``, that for PatchCamelyon on D4.
        batch: the number of images.
        kernel_size: the window.
        query: of the group layers.
        size: of the images; None for that of the data set.
    """

    network: str
    batch: int = 8
    kernel_size: int = 5
    query: Poses = "all"
    size: int | None = None

    def __str__(self) -> str:
        return f"training step of {self.network}"

    def load(self) -> None:
        importlib.import_module("escnn_attention.models")
        # The first optimizer of a process imports torch's compiler.
        importlib.import_module("torch._dynamo")

    def build(self, conditions: Conditions) -> Step:
        import torch

        from escnn_attention.models import GSANet

        make, kind, usual = {"rotmnist-p4": (GSANet.rotmnist, "c4", 28), "d4-96": (GSANet.patch_camelyon, "d4", 96)}[
            self.network
        ]
        network = make(gspace(kind), kernel_size=self.kernel_size, query=self.query).to(**place(conditions))
        size = self.size or usual
        images = torch.randn(self.batch, network.in_type.size, size, size, **place(conditions))
        return training_step(network, images, network.num_classes, network.parameters())

    def inspect(self, step: Step, conditions: Conditions) -> dict[str, Any]:
        from examples.benchmarks.subjects.profile import shares

        return {"seconds_by_kind": shares(step, conditions.device)}
