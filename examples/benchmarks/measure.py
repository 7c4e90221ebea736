"""Measuring one subject in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.memory import PeakMemory
from examples.benchmarks.subjects.subject import Subject


@dataclass(frozen=True)
class Measurement:
    """What one process found.

    Attributes:
        first: seconds of the very first step, with everything that is set up or compiled in it.
        steps: seconds of each timed step.
        peak: bytes held at most, above the process after its imports.
        details: what the subject has to say beyond that.
    """

    first: float
    steps: tuple[float, ...]
    peak: int
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(subject: Subject, conditions: Conditions) -> Measurement:
    """Build the subject and take its steps."""
    torch.set_num_threads(conditions.threads)
    subject.load()
    _settle(conditions)
    memory = PeakMemory(conditions.device)
    torch.manual_seed(conditions.seed)
    step = subject.build(conditions)
    timer = _Timer(step, conditions.device)
    first = timer()
    _repeat(timer, conditions.warmup - 1, conditions.seconds / 3 - first, least=0)
    steps = _repeat(timer, conditions.steps, conditions.seconds, least=2)
    peak = memory.read()
    return Measurement(first, tuple(steps), peak, subject.inspect(step, conditions))


def _settle(conditions: Conditions) -> None:
    """Have torch start its threads and load what it loads at the first use, which no subject is charged for."""
    options = {"device": conditions.device, "dtype": getattr(torch, conditions.dtype)}
    x = torch.ones(1, 1, 64, 64, **options, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x)
    # Started from a given gradient, the first backward pass of a process imports sympy.
    y.backward(torch.ones_like(y))


class _Timer:
    """Takes a step and returns its seconds, until the device has done what it was given to do."""

    def __init__(self, step: Callable[[], object], device: str):
        self.step = step
        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self) -> float:
        self.wait()
        start = time.perf_counter()
        self.step()
        self.wait()
        return time.perf_counter() - start


def _repeat(timer: _Timer, most: int, seconds: float, *, least: int) -> list[float]:
    """Steps until there are ``most``, or ``least`` and the time is over."""
    taken: list[float] = []
    while len(taken) < most and (len(taken) < least or sum(taken) < seconds):
        taken.append(timer())
    return taken
