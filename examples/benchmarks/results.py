"""What was found, and what to make of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Result:
    """One subject, over all processes in which it was measured.

    Attributes:
        runs: what each process found, as :class:`.measure.Measurement` gives it.
        failure: why there is nothing, or None.
    """

    runs: tuple[dict[str, Any], ...] = ()
    failure: str | None = None

    @property
    def seconds(self) -> float:
        """The fastest step."""
        return min(min(run["steps"]) for run in self.runs)

    @property
    def median_seconds(self) -> float:
        """The median of all timed steps."""
        return statistics.median(step for run in self.runs for step in run["steps"])

    @property
    def first_seconds(self) -> float:
        """The first step of a process, at best."""
        return min(run["first"] for run in self.runs)

    @property
    def peak(self) -> int:
        """The median over the processes of the bytes held at most."""
        return int(statistics.median(run["peak"] for run in self.runs))

    @property
    def details(self) -> dict[str, Any]:
        """What the subject had to say in the last process."""
        return self.runs[-1]["details"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.failure is not None:
            return {"failure": self.failure}
        return {
            "seconds": self.seconds,
            "median_seconds": self.median_seconds,
            "first_seconds": self.first_seconds,
            "peak_bytes": self.peak,
            "runs": list(self.runs),
        }


@dataclass(frozen=True)
class Ratio:
    """How many times more one result takes than another. None where one of them failed."""

    seconds: float | None
    median_seconds: float | None
    peak: float | None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON."""
        return {"seconds": self.seconds, "median_seconds": self.median_seconds, "peak_bytes": self.peak}


def ratio(more: Result, less: Result) -> Ratio:
    """``more`` divided by ``less``."""
    if more.failure is not None or less.failure is not None:
        return Ratio(None, None, None)
    # Less than a page may be counted as nothing.
    return Ratio(
        more.seconds / less.seconds,
        more.median_seconds / less.median_seconds,
        more.peak / less.peak if less.peak > 0 else None,
    )


@dataclass(frozen=True)
class Check:
    """A number and the target it is held against.

    Attributes:
        name: of what.
        value: what was measured; None where that failed.
        relation: whether the target is the least or the most.
        target: the target.
        unit: of both, as it is written behind them.
    """

    name: str
    value: float | None
    relation: Literal["≥", "≤"]
    target: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        """Whether the target is reached. What could not be measured is not."""
        if self.value is None:
            return False
        return self.value >= self.target if self.relation == "≥" else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "value": self.value,
            "relation": self.relation,
            "target": self.target,
            "unit": self.unit,
            "met": self.met,
        }
