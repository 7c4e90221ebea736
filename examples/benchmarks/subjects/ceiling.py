"""What a device can do at best."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.benchmarks.subjects.subject import Step, Subject, place

if TYPE_CHECKING:
    from examples.benchmarks.conditions import Conditions


@dataclass(frozen=True)
class Product(Subject):
    """The product of two square matrices, without gradients.

    Attributes:
        size: of the matrices.
    """

    size: int

    @property
    def operations(self) -> float:
        """Multiplications and additions of a step."""
        return 2.0 * self.size**3

    def __str__(self) -> str:
        return f"product of matrices of {self.size}"

    def load(self) -> None:
        importlib.import_module("torch")

    def build(self, conditions: Conditions) -> Step:
        import torch

        a, b = (torch.randn(self.size, self.size, **place(conditions)) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)


@dataclass(frozen=True)
class Copy(Subject):
    """A copy between two pieces of memory.

    Attributes:
        count: numbers in each.
    """

    count: int

    def __str__(self) -> str:
        return f"copy of {self.count} numbers"

    def load(self) -> None:
        importlib.import_module("torch")

    def build(self, conditions: Conditions) -> Step:
        import torch

        source = torch.randn(self.count, **place(conditions))
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
