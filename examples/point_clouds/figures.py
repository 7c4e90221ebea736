"""Figures of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.experiments.runs import Run

_COLORS = ("#0072b2", "#009e73", "#d55e00")


def draw_rollouts(path: Path, runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> None:
    """The error of positions and momenta along a roll-out, and the change of the true energy."""
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run, result, color in zip(runs, results, _COLORS, strict=False):
        if "rollout" not in result:
            continue
        style = "--" if run.kind == "twin" else "-"
        steps = range(1, len(result["rollout"]["error"]))
        left.plot(steps, result["rollout"]["error"][1:], style, color=color, label=run.label)
        right.plot(steps, [100 * drift for drift in result["rollout"]["drift"][1:]], style, color=color)
    left.set(yscale="log", xlabel="frame", ylabel="mean square error", title="positions and momenta")
    right.set(ylim=(0, None), xlabel="frame", ylabel="median change (%)", title="true energy of the predicted states")
    if left.lines:
        left.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
