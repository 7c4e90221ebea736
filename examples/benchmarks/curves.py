"""Pictures of costs: against size, measured, tabulated and drawn with logarithmic axes; and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from examples.benchmarks.measure import COSTS, Result, Subject, measure
from examples.benchmarks.report import Report, Run, cost

LIMIT = 5.0  # seconds; a curve ends with the first step that takes longer

# Okabe and Ito's colours, safe for most colour-blind readers, and markers. Baselines are black.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
_BASELINE = ("black", "v")


@dataclass
class Curve:
    """How the cost of one kind of layer grows."""

    name: str
    subject: Callable[[int], Subject]  # the layer of a size
    baseline: bool = False  # whether it is for comparison only
    segments: int = 1  # between the last sizes over which slopes are taken: more where memory grows in steps
    points: dict[int, Result] = field(default_factory=dict)
    stopped: str | None = None  # why there are no larger ones

    def slope(self, quantity: str) -> float | None:
        """The power of the size with which a cost grows over the last segments."""
        return slope(list(self.points), [getattr(result, quantity) for result in self.points.values()], self.segments)

    def as_dict(self, axis: str) -> dict[str, Any]:
        """For JSON, with the sizes under the name ``axis``."""
        return {
            "name": self.name,
            "points": [{axis: size} | result.as_dict() for size, result in self.points.items()],
            "slope_seconds": self.slope("seconds"),
            "slope_peak_bytes": self.slope("peak_bytes"),
            "stopped": self.stopped,
        }

    def add(self, size: int, result: Result) -> None:
        """Add a measurement, and stop if it failed or took too long."""
        if result.seconds is None:
            self.stopped = f"failed at {size}: {result.failure}"
            return
        self.points[size] = result
        if result.seconds > LIMIT:
            self.stopped = f"ends at {size}, where a step takes {result.seconds:.1f} s, more than {LIMIT:g} s"


def slope(sizes: Sequence[float], values: Sequence[float], segments: int = 1) -> float | None:
    """The slope over the last segments in a plot with logarithmic axes, or over all if there are fewer.

    None without two positive points.
    """
    first = max(0, len(sizes) - 1 - segments)
    if len(sizes) < 2 or min(values[first], values[-1]) <= 0:
        return None
    return math.log(values[-1] / values[first]) / math.log(sizes[-1] / sizes[first])


def follow(curves: Sequence[Curve], sizes: Sequence[int], run: Run) -> None:
    """Measure the curves size by size, with one process for each point, each until a step takes too long."""
    for stretch in [sizes] if run.quick else [[size] for size in sizes]:
        going = {f"{curve.name}, {size}": (curve, size) for size in stretch for curve in curves if not curve.stopped}
        subjects = {name: curve.subject(size) for name, (curve, size) in going.items()}
        # Curves show powers, not percents.
        results = measure(subjects, replace(run.conditions, repeats=1), run.say)
        for name, (curve, size) in going.items():
            curve.add(size, results[name])


def show(
    report: Report, curves: Sequence[Curve], axis: str, powers: Sequence[int], *, title: str, picture: str, caption: str
) -> None:
    """Add curves to a report.

    Args:
        report: gets a table with a row for every size and one for the slopes, and notes.
        curves: time and memory over the same sizes.
        axis: the name of the sizes.
        powers: of the size, for the guides beside the times; the guide beside the memory has power 1.
        title: of the table.
        picture, caption: the name of a picture of time and memory side by side, and its title.
    """
    report.data.setdefault("curves", {})[title] = [curve.as_dict(axis) for curve in curves]
    report.notes += [f"{title}, {curve.name}: {curve.stopped}" for curve in curves if curve.stopped]
    sizes = sorted({size for curve in curves for size in curve.points})
    rows = [[str(size), *(_cell(curve.points.get(size)) for curve in curves)] for size in sizes]
    slopes = [(curve.slope("seconds"), curve.slope("peak_bytes")) for curve in curves]
    rows.append(["slope", *(", ".join("–" if s is None else f"{s:.2f}" for s in pair) for pair in slopes)])
    below = "slope: the power with which time and memory grow at the end"
    report.table(title, [axis, *(curve.name for curve in curves)], rows, below)

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(xlabel=axis, ylabel="time of a step (s)")
    right.set(xlabel=axis, ylabel="peak memory (MB)")
    _panel(left, curves, sizes, "seconds", 1.0, powers)
    _panel(right, curves, sizes, "peak_bytes", 1e-6, (1,))
    finish(report, picture, figure, caption)


def _cell(result: Result | None) -> str:
    return "" if result is None else ", ".join(cost(result))


def _panel(
    axes: Axes, curves: Sequence[Curve], sizes: Sequence[int], quantity: str, unit: float, powers: Sequence[int]
) -> None:
    axes.set(xscale="log", yscale="log")
    styles = iter(STYLES)
    for curve in curves:
        color, marker = _BASELINE if curve.baseline else next(styles)
        values = [unit * getattr(result, quantity) for result in curve.points.values()]
        axes.plot(list(curve.points), values, color=color, marker=marker, markersize=5, label=curve.name)
    if sizes:
        _ticks(axes, sizes)
        # Guides from the lower left, which must not make the panel larger.
        low, high = axes.get_ylim()
        axes.set_ylim(low, high)
        for power, style in zip(powers, ("--", "-.", ":"), strict=False):
            guide = [1.3 * low * (x / sizes[0]) ** power for x in sizes]
            axes.plot(sizes, guide, color="0.6", linestyle=style, linewidth=1, zorder=0, label=f"slope {power}")
    axes.grid(color="0.9", linewidth=0.6)


def _ticks(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at the measured sizes, and at 1, 2, 5, 10 and so on of the results."""
    axes.set_xticks(sizes, [str(x) for x in sizes], rotation=45 if sizes[-1] > 1000 else 0)
    low, high = axes.get_ylim()
    # Two or three labels of each power of ten where there are few powers, one where there are many.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def bars(report: Report, picture: str, title: str, groups: Sequence[str], kinds: Mapping[str, Sequence[str]]) -> None:
    """Bars of time and memory side by side: in each group the results of each kind, given by their names."""
    figure = Figure(figsize=(10, 1 + 0.17 * len(groups) * (1 + len(kinds))), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(kinds)
    for axes, label, quantity, unit in zip(
        panels, ("time (s)", "peak memory (MB)"), COSTS[::2], (1.0, 1e-6), strict=True
    ):
        for i, (kind, names) in enumerate(kinds.items()):
            found = {place: getattr(report.results[name], quantity) for place, name in enumerate(names)}
            found = {place: unit * value for place, value in found.items() if value is not None}
            places = [place + height * (i - (len(kinds) - 1) / 2) for place in found]
            drawn = axes.barh(places, list(found.values()), height, color=STYLES[i][0], label=kind)
            axes.bar_label(drawn, fmt="%.2g" if unit == 1 else "%.0f", padding=2, fontsize="small")
        axes.set(xlabel=label, yticks=range(len(groups)), yticklabels=groups)
        axes.margins(x=0.12, y=0.02)
    panels[0].invert_yaxis()
    finish(report, picture, figure, title)


def finish(report: Report, name: str, figure: Figure, title: str) -> None:
    """Add title and legend, and write the picture."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(report.path(name), dpi=150)
