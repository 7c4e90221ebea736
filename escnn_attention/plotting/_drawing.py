"""Figures with panels at positions in inches, their colours, and maps drawn over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._elements import as_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text


# Okabe and Ito's colours, told apart with every common kind of colour vision; the order keeps neighbours far apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY = "#8A8A8A"
SMALL_PRINT = "#444444"


def figure_class() -> type[Figure]:
    """Matplotlib's figure, which belongs to no ``pyplot``; without matplotlib an ImportError names the extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install escnn-attention[plot]") from error
    return Figure


def pose_colour(pose: int, poses: int) -> str:
    """The colour of one of so many poses: its own, as long as the colours suffice."""
    return COLOURS[pose] if poses <= len(COLOURS) else GREY


class Sheet:
    """A figure with panels and text at positions in inches, from its upper left corner; ``note`` is small print.

    ``width`` is what the panels need; narrow sheets are widened for the title, by ``left`` on the left.
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

    def text(self, x: float, y: float, text: str, **style: Any) -> Text:
        """Text that is centred vertically."""
        return self.figure.text((x + self.left) / self.width, 1 - y / self.height, text, va="center", **style)

    def bar(self, x: float, y: float, height: float, picture: Any, names: Sequence[str], **style: Any) -> None:
        """A scale of colours, with names at equal distances from the lowest value to the highest."""
        ax = self.panel(x, y, 0.09, height)
        ax.imshow(picture, aspect="auto", extent=(0, 1, 0, len(names) - 1), **style)
        ax.yaxis.tick_right()
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.tick_params(length=2, pad=2)


class Table(Sheet):
    """A figure of square cells in ``rows`` and ``columns``, which are given by the gaps in front of them.

    ``x`` and ``y`` are the places of their upper left corners, ``size`` is their side, and the other arguments are the
    space around all of them; the names of rows are on the left.
    """

    def __init__(
        self,
        size: float,
        columns: Sequence[float],
        rows: Sequence[float],
        title: str,
        note: str,
        *,
        left: float,
        right: float = 0.15,
        above: float = 0.0,
        below: float = 0.15,
    ):
        self.size = size
        self.x = left + np.cumsum(columns) + size * np.arange(len(columns))
        self.y = self.TOP + above + np.cumsum(rows) + size * np.arange(len(rows))
        super().__init__(self.x[-1] + size + right, self.y[-1] + size + below, title, note)

    def cell(self, row: int, column: int, margin: float = 0.05) -> Axes:
        """Axes in a cell, with a margin in units of the cell on all sides."""
        margin *= self.size
        return self.panel(self.x[column] + margin, self.y[row] + margin, self.size - 2 * margin)

    def name(self, row: int, text: str, fontsize: float = 8.5) -> None:
        """Write the name of a row."""
        self.text(self.x[0] - 0.1, self.y[row] + self.size / 2, text, ha="right", fontsize=fontsize)


class Frame:
    """The coloured and numbered frame of a panel ``ax`` that shows what one of so many poses holds."""

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


ATTENTION = (0.835, 0.369, 0.0)
_STRONGEST = 0.9  # opacity


def extents(maps: Sequence[Tensor]) -> tuple[float, float]:
    """The range of colours of maps that share a scale."""
    lowest, highest = min(float(m.min()) for m in maps), max(float(m.max()) for m in maps)
    return (lowest, highest) if highest - lowest > 1e-6 else (lowest - 0.5, lowest + 0.5)


def shades(x: GeometricTensor) -> npt.NDArray[np.float32]:
    """The first image of ``x`` in colour where it has three scalar fields, else the mean over its channels."""
    values = as_drawn(x.tensor[0])
    if len(values) == 3 and all(r.is_trivial() for r in x.type.representations):
        lowest, highest = values.min(), values.max()
        return ((values - lowest) / (highest - lowest).clamp_min(1e-12)).movedim(0, -1).numpy()
    return values.mean(0).numpy()


def draw_image(ax: Axes, image: npt.NDArray[np.float32], *, faint: bool = False, extent: Any = None) -> None:
    """Draw an image, dark on light where it has no colours."""
    options: dict[str, Any] = {"interpolation": "nearest", "extent": extent}
    if image.ndim == 3 and faint:
        ax.imshow(image.mean(-1), cmap="gray", alpha=0.45, **options)
    elif image.ndim == 3:
        ax.imshow(image, **options)
    else:
        ax.imshow(image, cmap="gray_r", alpha=0.35 if faint else 1.0, **options)


def shaded(weights: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """The colour of attention ``(..., 4)``, the more opaque the closer ``weights`` are to 1."""
    colour = np.ones((*weights.shape, 4)) * np.array([*ATTENTION, 0.0])
    colour[..., 3] = _STRONGEST * weights
    return colour


def draw_over(
    ax: Axes,
    image: npt.NDArray[np.float32],
    values: Tensor,
    scale: tuple[float, float],
    covered: tuple[float, float],
) -> None:
    """Draw a map ``(h, w)``, or one value, over the part of the image ``(H, W)`` or ``(H, W, 3)`` that it is of.

    ``scale`` has the values without any colour and with the strongest; ``covered`` the parts of the rows and columns of
    the image, about its centre, that the map is of.
    """
    height, width = image.shape[:2]
    draw_image(ax, image, faint=True, extent=(-width / 2, width / 2, height / 2, -height / 2))
    lowest, highest = scale
    colour = shaded(((values - lowest) / (highest - lowest)).clamp(0, 1).numpy())
    # A map without positions is one value for the whole image.
    half = (width / 2, height / 2) if values.numel() == 1 else (covered[1] * width / 2, covered[0] * height / 2)
    ax.imshow(colour, interpolation="nearest", extent=(-half[0], half[0], half[1], -half[1]))
    ax.set_xlim(-max(width / 2, half[0]), max(width / 2, half[0]))
    ax.set_ylim(max(height / 2, half[1]), -max(height / 2, half[1]))


def draw_bar(sheet: Sheet, x: float, y: float, height: float, scale: tuple[float, float]) -> None:
    """Draw the scale of :func:`draw_over`."""
    sheet.bar(x, y, height, shaded(np.linspace(1, 0, 64)[:, None]), [f"{value:.2f}" for value in scale])


def as_change(value: float) -> str:
    """A change of maps as text, with one significant digit where it is small."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2f}"
