"""One step of training of a whole network."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from examples.benchmarks.subjects.subject import Poses, Step, Subject, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class TrainingStep(Subject):
    """Forward pass, gradients and optimizer, and where the time goes.

    Attributes:
        network: one of ``networks.PLANS``.
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
        importlib.import_module("examples.benchmarks.subjects.networks")
        # The first optimizer of a process imports torch's compiler.
        importlib.import_module("torch._dynamo")

    def build(self, conditions: Conditions) -> Step:
        import torch

        from examples.benchmarks.subjects.networks import PLANS, Network, train_step

        plan = PLANS[self.network]
        size = self.size or plan.size
        self_device = conditions.device
        network = Network(plan, self.kernel_size, self.query).to(**place(conditions))
        images = torch.randn(self.batch, plan.channels, size, size, **place(conditions))
        labels = torch.randint(plan.classes, (self.batch,), device=self_device)
        return train_step(network, images, labels)

    def inspect(self, step: Step, conditions: Conditions) -> dict[str, Any]:
        from examples.benchmarks.subjects.profile import shares

        return {"seconds_by_kind": shares(step, conditions.device)}
