"""Accuracies of networks under several conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from escnn_attention.plotting._drawing import COLOURS, SMALL_PRINT, figure_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_accuracies(
    accuracies: Mapping[str, Mapping[str, float]],
    *,
    title: str = "Accuracy on images in orientations that were not trained",
    note: str = "",
) -> Figure:
    """A dot chart: one line per network, one mark per condition.

    Args:
        accuracies: by network, then by condition (at most 8, the same for all networks); from 0 to 1.
        title: above the figure.
        note: small print below the title.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: ``accuracies`` is not a mapping of mappings.
        ValueError: no networks, no conditions, more than 8 or not the same for all, or an accuracy that is none.

    Example:
        >>> from escnn_attention.plotting import plot_accuracies
        >>> accuracies = {"plain": {"upright": 0.97, "rotated": 0.41}, "C8": {"upright": 0.97, "rotated": 0.95}}
        >>> figure = plot_accuracies(accuracies)
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['plain', 'C8']
    """
    figure_type = figure_class()
    conditions = _conditions(accuracies)
    names = list(accuracies)
    figure = figure_type(figsize=(7.6, 1.75 + 0.55 * len(names)), layout="constrained")
    ax = figure.add_subplot()
    for row, name in enumerate(names):
        values = [100 * value for value in accuracies[name].values()]
        ax.plot([min(values), max(values)], [row, row], color="#CCCCCC", linewidth=3, solid_capstyle="round", zorder=1)
    for k, condition in enumerate(conditions):
        ax.scatter(
            [100 * accuracies[name][condition] for name in names], range(len(names)),
            # Open rings around filled dots: marks that coincide stay visible.
            s=(190, 75, 60, 60)[min(k, 3)], marker="oDs^v<>P"[k], linewidths=2, zorder=3 + k,
            facecolors="none" if k == 0 else COLOURS[k], edgecolors=COLOURS[k], label=condition,
        )  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=10)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(-3, 103)
    ax.set_xlabel("test accuracy in %")
    ax.grid(axis="x", color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.suptitle(title, fontsize=12, weight="bold")
    if note:
        ax.set_title(note, fontsize=9, color=SMALL_PRINT)
    figure.legend(loc="outside lower center", ncols=len(conditions), frameon=False, fontsize=10)
    return figure


def _conditions(accuracies: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The conditions, which are the same for all networks."""
    if not isinstance(accuracies, Mapping):
        raise TypeError(f"accuracies: got {type(accuracies).__name__}, needed a mapping from names to mappings")
    if not accuracies:
        raise ValueError("accuracies: got none, needed at least one network")
    conditions: list[str] = []
    for name, values in accuracies.items():
        if not isinstance(values, Mapping):
            raise TypeError(f"accuracies: got {type(values).__name__} for {name!r}, needed a mapping from conditions")
        conditions = conditions or list(values)
        if not 1 <= len(values) <= len(COLOURS):
            raise ValueError(f"accuracies: got {len(values)} conditions for {name!r}, needed 1 to {len(COLOURS)}")
        if set(values) != set(conditions):
            raise ValueError(f"accuracies: got the conditions {list(values)} for {name!r}, needed {conditions}")
        for condition, value in values.items():
            if not 0 <= value <= 1:
                raise ValueError(f"accuracies: got {value} for {name!r}, {condition!r}, needed a number from 0 to 1")
    return conditions
