"""What a command found: for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from examples.benchmarks.conditions import Conditions
from examples.benchmarks.environment import environment
from examples.benchmarks.results import Check, Result

if TYPE_CHECKING:
    from examples.benchmarks.curves import Curve


@dataclass
class Report:
    """Tables, checks and notes, and the data behind them.

    Attributes:
        command: the name of the command, and of its file.
        conditions: under which it was measured.
        data: everything measured, as JSON can hold it.
        tables: for people.
        checks: targets, and whether they are met.
        notes: what else has to be said.
    """

    command: str
    conditions: Conditions
    data: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print the tables and notes."""
        for table in self.tables:
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)

    def write(self, folder: Path) -> Path:
        """Write ``<command>.json``, and return where it is."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.command}.json"
        content = {
            "command": self.command,
            "environment": environment(),
            "conditions": asdict(self.conditions),
            "checks": [check.as_dict() for check in self.checks],
            "notes": self.notes,
            **self.data,
        }
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """A table whose first column names what the others have numbers of."""
    # As wide as its title at least, which would be broken otherwise.
    result = Table(title=title, caption=caption, caption_justify="left", title_justify="left", min_width=len(title))
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        result.add_row(*row)
    return result


def curve_table(title: str, axis: str, curves: Sequence[Curve]) -> Table:
    """A table of time and memory, with a row for every size, and one for the slopes."""
    sizes = sorted({point for curve in curves for point in curve.points})
    rows = [[str(point), *(_cell(curve, point) for curve in curves)] for point in sizes]
    slopes = [(curve.slope("seconds"), curve.slope("peak")) for curve in curves]
    rows.append(["slope", *(", ".join("–" if s is None else f"{s:.2f}" for s in pair) for pair in slopes)])
    caption = "slope: the power with which time and memory grow at the end"
    return table(title, [axis, *(curve.name for curve in curves)], rows, caption)


def _cell(curve: Curve, point: int) -> str:
    result = curve.points.get(point)
    return "" if result is None else f"{time(result.seconds)}, {size(result.peak)}"


def time(seconds: float | None) -> str:
    """Seconds, or milliseconds where they are less than one, with three digits."""
    if seconds is None:
        return "–"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def size(number: float | None) -> str:
    """Bytes in MB or GB."""
    if number is None:
        return "–"
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def times(factor: float | None) -> str:
    """A factor."""
    return "–" if factor is None else f"{factor:.3g}×"


def verdict(check: Check) -> str:
    """A value beside its target, and whether that is met."""
    value = "–" if check.value is None else f"{check.value:.3g}"
    mark = "[green]✓[/green]" if check.met else "[red]✗[/red]"
    return f"{f'{value} {check.unit}'.rstrip()} ({check.relation} {check.target:g}) {mark}"


def cost(result: Result) -> tuple[str, str]:
    """Time and memory of a result, or that it failed."""
    return ("failed", "–") if result.failure is not None else (time(result.seconds), size(result.peak))


def failures(results: dict[Any, Result]) -> list[str]:
    """A note for everything that could not be measured."""
    return [f"{subject}: {result.failure}" for subject, result in results.items() if result.failure is not None]


def summary(reports: Sequence[Report]) -> Report:
    """All targets of some reports, and whether they are met."""
    checks = [check for report in reports for check in report.checks]
    met = sum(check.met for check in checks)
    rows = [[check.name, verdict(check)] for check in checks]
    return Report(
        "summary",
        reports[0].conditions,
        data={"commands": [report.command for report in reports]},
        tables=[table(f"Targets: {met} of {len(checks)} met", ["what", "measured"], rows)],
        checks=checks,
    )
