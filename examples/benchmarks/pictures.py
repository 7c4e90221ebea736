"""Curves drawn with logarithmic axes, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.benchmarks.curves import Curve, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which most people can tell apart, and markers for those who cannot. Baselines are black.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
_BASELINE = ("black", "v")


def draw(
    path: Path,
    title: str,
    axis: str,
    curves: Sequence[Curve],
    *,
    time_slopes: Sequence[int],
    memory_slopes: Sequence[int] = (1,),
) -> None:
    """Draw time and memory side by side.

    Args:
        path: where the picture goes.
        title: what all curves have in common.
        axis: what they run over.
        curves: the curves.
        time_slopes, memory_slopes: the powers of the size to which guides are drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    _panel(time, "time of a step (s)", axis, curves, "seconds", 1.0, time_slopes)
    _panel(memory, "peak memory (MB)", axis, curves, "peak", 1e-6, memory_slopes)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _panel(
    axes: Axes,
    label: str,
    axis: str,
    curves: Sequence[Curve],
    quantity: Quantity,
    unit: float,
    slopes: Sequence[int],
) -> None:
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
    styles = iter(_STYLES)
    for curve in curves:
        color, marker = _BASELINE if curve.baseline else next(styles)
        points = {x: unit * getattr(result, quantity) for x, result in curve.points.items()}
        axes.plot(list(points), list(points.values()), color=color, marker=marker, markersize=5, label=curve.name)
    sizes = sorted({x for curve in curves for x in curve.points})
    if sizes:
        _ticks(axes, sizes)
        _guides(axes, sizes, slopes)
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at the sizes that were measured, and at 1, 2, 5, 10 and so on of what was found."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axes.set_xticks(sizes, [str(x) for x in sizes], rotation=45 if sizes[-1] > 1000 else 0)
    low, high = axes.get_ylim()
    # Two or three labels of each power of ten where there are few powers, one where there are many.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _guides(axes: Axes, sizes: Sequence[int], slopes: Sequence[int]) -> None:
    """Lines of a known slope from the lower left, which must not make the panel larger."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    for slope, style in zip(slopes, ("--", "-.", ":"), strict=False):
        values = [1.3 * low * (x / sizes[0]) ** slope for x in sizes]
        axes.plot(sizes, values, color="0.6", linestyle=style, linewidth=1, zorder=0, label=f"slope {slope}")


@dataclass(frozen=True)
class Bar:
    """What one subject of a group takes.

    Attributes:
        group: what it is measured as.
        name: of the subject, the same in all groups.
        seconds, peak: what it takes.
    """

    group: str
    name: str
    seconds: float
    peak: float


def bars(path: Path, title: str, found: Sequence[Bar]) -> None:
    """Draw time and memory of groups of subjects side by side.

    Args:
        path: where the picture goes.
        title: what all have in common.
        found: the bars; groups and subjects in the order in which they come first.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    groups, names = (list(dict.fromkeys(values)) for values in ([b.group for b in found], [b.name for b in found]))
    height = 0.8 / max(1, len(names))
    for axes, label, quantity, unit in ((time, "time (s)", "seconds", 1.0), (memory, "peak memory (MB)", "peak", 1e-6)):
        for i, name in enumerate(names):
            mine = [b for b in found if b.name == name]
            places = [groups.index(b.group) + height * (i - (len(names) - 1) / 2) for b in mine]
            widths = [unit * getattr(b, quantity) for b in mine]
            drawn = axes.barh(places, widths, height, color=_STYLES[i][0], label=name)
            axes.bar_label(drawn, fmt="%.2g" if unit == 1 else "%.0f", padding=2, fontsize="small")
        axes.set(xlabel=label, yticks=range(len(groups)), yticklabels=groups)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    time.invert_yaxis()
    figure.legend(*time.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
