"""Messages, progress bars and the table on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from escnn_attention.training.comparison.compare import Comparison
from escnn_attention.training.comparison.networks import DESCRIPTIONS, TITLES
from escnn_attention.training.comparison.progress import Advance, Reporter
from escnn_attention.training.comparison.results import NetworkResult


class _Size(DownloadColumn):
    """Bytes, for bars of bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["size"] else Text()


class ConsoleReporter(Reporter):
    """Shows messages and progress bars on ``console``, of one time together. A finished bar stays as a line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = self._display()
        self._bars = 0

    def _display(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=16),
            _Size(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, title: str, total: int | None = None, *, size: bool = False) -> Iterator[Advance]:
        if not self._bars:
            self._progress = self._display()
            self._progress.start()
        self._bars += 1
        progress = self._progress
        task = progress.add_task(title, total=total, note="", size=size)

        def advance(completed: int, total: int | None = None, note: str = "") -> None:
            progress.update(task, completed=completed, total=total, note=note)

        try:
            yield advance
        finally:
            self._bars -= 1
            if not self._bars:
                progress.stop()


def result_table(comparison: Comparison) -> Table:
    """The table at the end of a comparison."""
    elements = comparison.elements
    table = Table(title="Accuracy on test images (%)", caption=_caption(comparison), caption_justify="left")
    table.add_column("network", no_wrap=True)
    table.add_column("upright", justify="right")
    if elements:
        table.add_column(_elements_title(elements).replace(" ", "\n"), justify="right")
    table.add_column("any\nangle", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("s per\nepoch", justify="right")
    if elements:
        table.add_column("equiv.\nerror", justify="right")
    for result in comparison.results:
        table.add_row(*_cells(result, bool(elements)))
    return table


def _cells(result: NetworkResult, with_elements: bool) -> list[str]:
    cells = [TITLES[result.network], f"{100 * result.accuracy_upright:.1f}"]
    if with_elements:
        assert result.accuracy_rotated is not None  # measured for every network of a group that keeps the grid
        cells.append(f"{100 * result.accuracy_rotated:.1f}")
    cells += [f"{100 * result.accuracy_any_angle:.1f}", f"{result.parameters:,}", f"{result.seconds_per_epoch:.2f}"]
    if with_elements:
        cells.append("–" if result.equivariance_error is None else f"{result.equivariance_error:.0e}")
    return cells


def _elements_title(elements: list[str]) -> str:
    if any(name.startswith("mirror") for name in elements):
        return "rotated, mirrored" if len(elements) > 1 else "mirrored"
    return "half turn" if elements == ["180°"] else "quarter turns"


def _caption(comparison: Comparison) -> str:
    data = comparison.data
    lines = [
        f"Data: {data.source}; {len(data.train)} to train, {len(data.test)} to test.",
        "; ".join(f"{TITLES[r.network]}: {DESCRIPTIONS[r.network]}" for r in comparison.results) + ".",
        f"upright: {data.upright}, as in training.",
    ]
    if comparison.elements:
        lines.append(
            f"{_elements_title(comparison.elements)}: each test image transformed by {'; '.join(comparison.elements)}."
        )
    lines.append("any angle: each test image rotated by a random angle, with cubic interpolation.")
    if comparison.elements:
        lines.append("equiv. error: worst relative change of the logits under these elements, in float64.")
    return "\n".join(lines)
