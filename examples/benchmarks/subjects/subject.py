"""What every subject of a measurement is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from examples.benchmarks.conditions import Conditions

Step = Callable[[], object]
Poses = Literal["own", "all"]
"""Which poses take part: only that of the output, or all."""


@dataclass(frozen=True)
class Subject(ABC):
    """Something that takes steps: as data, of what JSON can hold.

    Their methods import what they need: the process that starts the others only handles the data.
    """

    @property
    def checkout(self) -> str | None:
        """The folder of other people's code that the subject runs, None for our own."""
        return None

    @abstractmethod
    def load(self) -> None:
        """Import everything that :meth:`build` needs. What this takes in memory is not counted."""

    @abstractmethod
    def build(self, conditions: Conditions) -> Step:
        """Make the subject and its input, and return what a step does."""

    def inspect(self, step: Step, conditions: Conditions) -> dict[str, Any]:
        """What else there is to say, found after the timed steps."""
        return {}


def gradient_step(forward: Callable[..., Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> Step:
    """A forward pass and the gradients of a loss for all inputs and parameters.

    The loss is the sum of the output times a fixed random tensor, which is what the backward pass starts from.
    """
    import torch

    arguments = [x.requires_grad_() for x in inputs]
    leaves = [*arguments, *parameters]
    weight: Tensor | None = None

    def step() -> None:
        nonlocal weight
        for leaf in leaves:
            leaf.grad = None
        y = forward(*arguments)
        if weight is None:
            weight = torch.randn_like(y)
        y.backward(weight)

    return step


def place(conditions: Conditions) -> dict[str, Any]:
    """Device and precision, as torch takes them."""
    import torch

    return {"device": conditions.device, "dtype": getattr(torch, conditions.dtype)}


def training_step(
    network: Callable[[Tensor], Tensor], x: Tensor, num_classes: int, parameters: Iterable[Parameter]
) -> Step:
    """A step of Adam on random labels, one for each image or point of the input."""
    import torch

    labels = torch.randint(num_classes, (len(x),), device=x.device)
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(x), labels).backward()
        optimizer.step()

    return step
