"""The figure of rotated MNIST: accuracy against time and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.experiments.report import mean_error
from examples.experiments.runs import Run

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")

PUBLISHED = {
    "p4-CNN": (24_610, 97.95),
    "α$_F$-p4-CNN": (29_460, 98.20),
    "α-p4-CNN": (73_130, 98.30),
    "GSA-Net, R4": (44_670, 97.46),
}
"""Parameters and test accuracy in percent: Romero et al. 2020, Table 1, and Romero and Cordonnier 2021, Table 2."""


def draw_accuracies(path: Path, runs: Sequence[Run], results: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Accuracy during and after training: means over the seeds, with standard errors.

    Minutes are those of an idle machine: every epoch counts with the time of the fastest one.

    Args:
        path: of the image.
        runs: the networks.
        results: of each network one for each seed, see :func:`examples.experiments.runs.execute`.
    """
    figure = Figure(figsize=(8.2, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for run, found, color in zip(runs, results, _COLORS, strict=False):
        _curve(left, found, color)
        accuracy, error = mean_error([100 * result["accuracy"] for result in found])
        parameters = found[0]["parameters"] / 1000
        right.errorbar(parameters, accuracy, error, fmt="o", color=color, capsize=3, label=f"{run.label}, {run.group}")
    for name, (parameters, accuracy) in PUBLISHED.items():
        right.plot(parameters / 1000, accuracy, "x", color="0.5")
        right.annotate(
            name, (parameters / 1000, accuracy), (5, -3), textcoords="offset points", fontsize=7, color="0.4"
        )
    left.set(
        xlabel="minutes of training", ylabel="accuracy (%)", title="validation images, while training", xlim=(0, None)
    )
    right.set(xlabel="parameters (thousands)", title="all test images (crosses: published)")
    best = max(100 * result["accuracy"] for found in results for result in found)
    left.set_ylim(best - 2.5, min(100.0, best + 0.3))
    right.set_xlim(0, 1.25 * right.dataLim.xmax)
    for axes in (left, right):
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150)


def _curve(axes: Axes, found: Sequence[Mapping[str, Any]], color: str) -> None:
    """The validation accuracy of all seeds by the minute."""
    minutes = min(row["seconds"] for result in found for row in result["curve"]) / 60
    by_epoch = zip(*([100 * row["valid_accuracy"] for row in result["curve"]] for result in found), strict=False)
    means, errors = zip(*map(mean_error, by_epoch), strict=True)
    times = [minutes * (epoch + 1) for epoch in range(len(means))]
    axes.plot(times, means, color=color)
    lower, upper = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(times, lower, upper, color=color, alpha=0.2, linewidth=0)
