"""Cost against size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.processes import measure_all
from examples.benchmarks.results import Result
from examples.benchmarks.subjects import Subject

Quantity = Literal["seconds", "peak"]


@dataclass
class Curve:
    """How the cost of one kind of layer grows.

    Attributes:
        name: for legends and tables.
        subject: the layer of a size.
        baseline: whether it is there for comparison only.
        segments: between how many of the last sizes slopes are taken: more where memory grows in steps.
        points: what was measured, by size.
        stopped: why there are no larger ones, or None.
    """

    name: str
    subject: Callable[[int], Subject]
    baseline: bool = False
    segments: int = 1
    points: dict[int, Result] = field(default_factory=dict)
    stopped: str | None = None

    def slope(self, quantity: Quantity) -> float | None:
        """The power of the size with which a quantity grows over the last segments."""
        return slope(list(self.points), [getattr(result, quantity) for result in self.points.values()], self.segments)

    def as_dict(self, axis: str) -> dict[str, Any]:
        """For JSON, with the sizes under the name ``axis``."""
        return {
            "name": self.name,
            "points": [{axis: size} | result.as_dict() for size, result in self.points.items()],
            "slope_seconds": self.slope("seconds"),
            "slope_peak_bytes": self.slope("peak"),
            "stopped": self.stopped,
        }


def slope(sizes: Sequence[float], values: Sequence[float], segments: int = 1) -> float | None:
    """The slope over the last segments in a plot with logarithmic axes, or over all where there are not so many.

    None without two points that are positive.
    """
    if len(sizes) < 2:
        return None
    first = max(0, len(sizes) - 1 - segments)
    if min(values[first], values[-1]) <= 0:
        return None
    return math.log(values[-1] / values[first]) / math.log(sizes[-1] / sizes[first])


def follow(
    curves: Sequence[Curve], sizes: Sequence[int], limit: float, conditions: Conditions, say: Callable[[str], None]
) -> None:
    """Measure the curves from size to size, each until a step takes longer than ``limit`` seconds."""
    for stretch in [sizes] if conditions.quick else [[size] for size in sizes]:
        going = [curve for curve in curves if curve.stopped is None]
        results = measure_all([curve.subject(size) for size in stretch for curve in going], conditions, say)
        for size in stretch:
            for curve in going:
                _add(curve, size, results[curve.subject(size)], limit)


def _add(curve: Curve, size: int, result: Result, limit: float) -> None:
    if result.failure is not None:
        curve.stopped = f"failed at {size}: {result.failure}"
        return
    curve.points[size] = result
    if result.seconds > limit:
        curve.stopped = f"ends at {size}, where a step takes {result.seconds:.1f} s, more than {limit:g} s"
