"""Figures with panels at positions in inches, and their colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# Okabe and Ito's colours, told apart with every common kind of colour vision; the order keeps neighbours far apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY = "#8A8A8A"
SMALL_PRINT = "#444444"

MOST_COLUMNS = 8  # of elements, by default


def figure_class() -> type[Figure]:
    """Matplotlib's figure, which belongs to no ``pyplot``.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install escnn-attention[plot]") from error
    return Figure


def pose_colour(pose: int, poses: int) -> str:
    """The colour of one of so many poses: its own, as long as the colours suffice."""
    return COLOURS[pose] if poses <= len(COLOURS) else GREY


class Sheet:
    """A figure with panels and text at positions in inches, from its upper left corner.

    Args:
        width, height: in inches. ``width`` is what the panels need; narrow sheets are widened for the title.
        title: above the panels.
        note: small print below the title.

    Attributes:
        figure: the figure.
        left: by how much a narrow sheet was widened on the left.
    """

    TOP = 0.95
    NARROWEST = 6.4

    def __init__(self, width: float, height: float, title: str, note: str):
        self.width, self.height = max(width, self.NARROWEST), height
        self.left = (self.width - width) / 2
        self.figure = figure_class()(figsize=(self.width, height))
        centre = self.width / 2 - self.left
        self.text(centre, 0.25, title, ha="center", fontsize=12, weight="bold")
        self.text(centre, 0.5, note, ha="center", fontsize=9, color=SMALL_PRINT)

    def panel(self, x: float, y: float, width: float, height: float | None = None) -> Axes:
        """Axes without ticks; square without a height."""
        height = width if height is None else height
        box = (x + self.left, self.height - y - height, width, height)
        ax = self.figure.add_axes(
            (box[0] / self.width, box[1] / self.height, box[2] / self.width, box[3] / self.height)
        )
        ax.set_xticks([])
        ax.set_yticks([])
        return ax

    def cell(self, x: float, y: float, size: float, margin: float = 0.05) -> Axes:
        """Axes in a square cell, with a margin in units of the cell on all sides."""
        return self.panel(x + margin * size, y + margin * size, (1 - 2 * margin) * size)

    def text(self, x: float, y: float, text: str, **style: Any) -> Text:
        """Text that is centred vertically."""
        return self.figure.text((x + self.left) / self.width, 1 - y / self.height, text, va="center", **style)


class Frame:
    """The coloured and numbered frame of a panel that shows what one pose holds.

    Args:
        ax: the panel.
        pose: which pose.
        poses: how many there are.
    """

    def __init__(self, ax: Axes, pose: int, poses: int):
        self.ax, self.poses = ax, poses
        self.number = ax.text(
            0.0, 1.0, "", transform=ax.transAxes, ha="left", va="top", fontsize=7.5, weight="bold"
        )  # fmt: skip
        for spine in ax.spines.values():
            spine.set_linewidth(2.6)
        self.show(pose)

    def show(self, pose: int) -> None:
        """Give the frame the colour and the number of a pose."""
        colour = pose_colour(pose, self.poses)
        for spine in self.ax.spines.values():
            spine.set_edgecolor(colour)
        light = colour in ("#F0E442", "#E69F00", "#56B4E9")
        self.number.set_text(str(pose))
        self.number.set_color("black" if light else "white")
        self.number.set_bbox({"boxstyle": "square,pad=0.16", "facecolor": colour, "edgecolor": "none"})


def map_style(values: Sequence[npt.NDArray[np.floating[Any]]]) -> dict[str, Any]:
    """Colours of feature maps that share a scale: two-sided where they have signs."""
    limit = max(float(np.abs(value).max()) for value in values) or 1.0
    if min(float(value.min()) for value in values) < 0:
        return {"cmap": "PuOr_r", "vmin": -limit, "vmax": limit, "interpolation": "nearest"}
    return {"cmap": "Greys", "vmin": 0.0, "vmax": limit, "interpolation": "nearest"}
