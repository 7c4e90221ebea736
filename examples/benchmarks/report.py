"""The report of a command, as text and as JSON."""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

import escnn_attention
from examples.benchmarks.measure import Conditions, Result, Subject, measure, ratio


@dataclass(frozen=True)
class Check:
    """A number (None if it could not be measured) and its required minimum or maximum."""

    name: str
    value: float | None
    relation: Literal["≥", "≤"]
    target: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        """Whether the target is reached; False if it could not be measured."""
        if self.value is None:
            return False
        return self.value >= self.target if self.relation == "≥" else self.value <= self.target

    def cell(self) -> str:
        """The value, its target, and whether it is met."""
        value = "–" if self.value is None else f"{self.value:.3g}"
        mark = "[green]✓[/green]" if self.met else "[red]✗[/red]"
        return f"{f'{value} {self.unit}'.rstrip()} ({self.relation} {self.target:g}) {mark}"


@dataclass(frozen=True)
class Run:
    """The request of a command."""

    conditions: Conditions
    folder: Path  # for all output
    checkouts: Mapping[str, str] = field(default_factory=dict)  # of references, by the names of their options
    query: str = "all"  # of the networks of "step"
    say: Callable[[str], None] = lambda _: None  # called with the current subject

    @property
    def quick(self) -> bool:
        """Whether this run only checks that everything works."""
        return self.conditions.quick


@dataclass
class Report:
    """The measurements of a command, with their tables, checks and notes."""

    command: str  # and the name of the file
    run: Run
    results: dict[str, Result] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=lambda: {"results": {}, "ratios": {}})  # for the file
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self, subjects: Mapping[str, Subject], **changes: Any) -> None:
        """Measure subjects alternately, and note failures. ``changes`` are to the conditions of the run."""
        results = measure(subjects, replace(self.run.conditions, **changes), self.run.say)
        self.results |= results
        for name, subject in subjects.items():
            asked = inspect.signature(subject.func).bind(*subject.args, **subject.keywords).arguments
            self.data["results"][name] = {"subject": subject.func.__name__, **asked, **results[name].as_dict()}
            if results[name].failure is not None:
                self.notes.append(f"{name}: {results[name].failure}")

    def ratio(self, more: str, less: str) -> dict[str, float | None]:
        """The ratio of each cost."""
        self.data["ratios"][f"{more} / {less}"] = found = ratio(self.results[more], self.results[less])
        return found

    def cost(self, name: str) -> list[str]:
        """Cells of time and memory, or that it failed."""
        return cost(self.results[name])

    def gains(self, more: str, less: str) -> list[str]:
        """Cells with the ratios of time and memory."""
        found = self.ratio(more, less)
        return [times(found["seconds"]), times(found["peak_bytes"])]

    def check(self, name: str, value: float | None, relation: Literal["≥", "≤"], target: float, unit: str = "×") -> str:
        """Compare a number with its target, and return the cell."""
        self.checks.append(Check(name, value, relation, target, unit))
        return self.checks[-1].cell()

    def check_gains(self, what: str, by: str, names: tuple[str, str], faster: float, smaller: float) -> list[str]:
        """Compare the gains over a reference with targets; the names are those of its result and ours."""
        found = self.ratio(*names)
        return [
            self.check(f"{what}: time of {by} / ours", found["seconds"], "≥", faster),
            self.check(f"{what}: memory of {by} / ours", found["peak_bytes"], "≥", smaller),
        ]

    def check_peak(self, what: str, name: str, most: float) -> str:
        """Compare the memory of a step with a number of GB."""
        peak = self.results[name].peak_bytes
        return self.check(f"{what}: peak memory of a step", None if peak is None else peak / 1e9, "≤", most, "GB")

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
    ) -> None:
        """Add a table whose first column has the names of the rows."""
        # At least as wide as its title, so that the title is not broken.
        made = Table(title=title, caption=caption, caption_justify="left", title_justify="left", min_width=len(title))
        for number, column in enumerate(columns):
            made.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            made.add_row(*row)
        self.tables.append(made)

    def tabulate_checks(self, title: str = "Targets") -> None:
        """Add a table of all targets."""
        self.table(title, ["what", "measured"], [[check.name, check.cell()] for check in self.checks])

    def publish(self, console: Console) -> None:
        """Print tables and notes, and write everything to ``<command>.json``."""
        content = {
            "command": self.command,
            "environment": environment(),
            "conditions": asdict(self.run.conditions),
            "checks": [asdict(check) | {"met": check.met} for check in self.checks],
            "notes": self.notes,
            **self.data,
        }
        path = self.path(f"{self.command}.json")
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for made in self.tables:
            console.print(made)
        plain = partial(console.print, markup=False, highlight=False)
        for note in self.notes:
            plain(f"note: {note}")
        plain(f"written: {path}\n", soft_wrap=True)

    def path(self, name: str) -> Path:
        """The path of a file, whose folder is created if needed."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        return self.run.folder / name


def summary(reports: Sequence[Report]) -> Report:
    """All targets of some reports, and whether they are met."""
    checks = [check for report in reports for check in report.checks]
    data = {"commands": [report.command for report in reports]}
    total = Report("summary", reports[0].run, data=data, checks=checks)
    total.tabulate_checks(f"Targets: {sum(check.met for check in checks)} of {len(checks)} met")
    return total


def time(seconds: float | None) -> str:
    """Seconds, or milliseconds below one, with three digits."""
    if seconds is None:
        return "–"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def size(number: float | None) -> str:
    """Bytes in MB or GB."""
    if number is None:
        return "–"
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def cost(result: Result) -> list[str]:
    """Time and memory of a result, or that it failed."""
    return [time(result.seconds) if result.failure is None else "failed", size(result.peak_bytes)]


def times(factor: float | None) -> str:
    """A factor."""
    return "–" if factor is None else f"{factor:.3g}×"


def environment() -> dict[str, Any]:
    """The machine and the versions of a result."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "hardware": {
            "cpu": models[0] if models else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "escnn": version("escnn"),
            "escnn_attention": escnn_attention.__version__,
        },
        "system": platform.system(),
    }
