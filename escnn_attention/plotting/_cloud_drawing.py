"""Clouds of points, drawn with the attention of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from escnn_attention.plotting._drawing import GREY, SMALL_PRINT, Sheet
from escnn_attention.plotting._elements import check_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POSITIVE, _NEGATIVE = np.array([0.835, 0.369, 0.0]), np.array([0.0, 0.447, 0.698])
_BOND = "#9A9A9A"
_FRAME = (0.3, 0.2, 0.12)  # the lengths of the axes of a pose, in inches


@dataclass(frozen=True)
class CloudStyle:
    """The style in which a cloud is drawn.

    Args:
        labels: text on the points, such as the symbols of atoms.
        bonds: pairs of numbers of points between which a line is drawn.
        view: elevation and azimuth in degrees from which clouds in space are seen.

    Raises:
        TypeError: something else than a sequence of labels, pairs, and two numbers.

    Example:
        >>> from escnn_attention.plotting import CloudStyle
        >>> CloudStyle(labels=["O", "H", "H"], bonds=[(0, 1), (0, 2)]).bonds
        [(0, 1), (0, 2)]
    """

    labels: Sequence[str] | None = None
    bonds: Sequence[tuple[int, int]] = ()
    view: tuple[float, float] = (35.0, -60.0)

    def __post_init__(self) -> None:
        if self.labels is not None:
            if isinstance(self.labels, str) or not isinstance(self.labels, Iterable):
                raise TypeError(f"labels: got {self.labels!r}, needed a sequence with one for each point")
            object.__setattr__(self, "labels", [str(label) for label in self.labels])
        try:
            object.__setattr__(self, "bonds", [(i, j) for i, j in self.bonds])
        except (TypeError, ValueError):
            raise TypeError(f"bonds: got {self.bonds!r}, needed pairs of numbers of points") from None
        try:
            elevation, azimuth = self.view
            object.__setattr__(self, "view", (float(elevation), float(azimuth)))
        except (TypeError, ValueError):
            raise TypeError(f"view: got {self.view!r}, needed an elevation and an azimuth in degrees") from None

    def check(self, number: int) -> None:
        """Check that labels and bonds are those of a ``number`` of points.

        Raises:
            TypeError: a bond is not between numbers.
            ValueError: labels are not one a point, or a bond has no such point.
        """
        if self.labels is not None and len(self.labels) != number:
            raise ValueError(f"labels: got {len(self.labels)}, needed one for each of {number} points")
        for i, j in self.bonds:
            check_index("bonds", i, number)
            check_index("bonds", j, number)


@dataclass(frozen=True)
class Row:
    """One pose of the query in one layer."""

    name: str  # of layer, head and pose
    weights: npt.NDArray[np.float64]  # (columns, N), the attention of the query to the points of transformed clouds
    frames: npt.NDArray[np.float64]  # (columns, d, d), the matrices of its pose
    poses: bool  # whether the layer has several


@dataclass(frozen=True)
class _Scale:
    """The scale that all panels share."""

    cell: float  # the width of a panel, in inches
    high: float  # its height, in inches
    reach: float  # from its middle to its sides, in units of the coordinates
    inch: float  # units of the coordinates in an inch
    diameter: float  # of points, in points of typography
    axes: npt.NDArray[np.float64]  # (d, d), the directions to the right, upwards, and to the eye, as rows


def draw_clouds(
    clouds: Sequence[npt.NDArray[np.float64]],
    rows: Sequence[Row],
    headings: Sequence[str],
    point: int,
    style: CloudStyle,
    title: str,
) -> Figure:
    """The figure: a cloud ``(N, d)`` and its heading for each column, in each row with the attention of ``point``."""
    centred = [cloud - cloud.mean(axis=0) for cloud in clouds]
    scale = _scale(centred, style)
    cell, high = scale.cell, scale.high
    left, right, below = 1.25, 0.15, 0.32
    marks = "ring and axes: the query and its pose" if rows[0].poses else "ring: the query"
    note = f"{marks}; colour and lines: its attention; below: the largest difference from the first column"
    sheet = Sheet(left + cell * len(clouds) + right, Sheet.TOP + 0.15 + len(rows) * (high + below), title, note)
    for r, row in enumerate(rows):
        y = Sheet.TOP + 0.1 + r * (high + below)
        sheet.text(left - 0.1, y + high / 2, row.name, ha="right", fontsize=9, linespacing=1.35)
        strongest = float(np.abs(row.weights).max()) or 1.0
        for c, cloud in enumerate(centred):
            x = left + c * cell
            ax = _panel(sheet, x, y, scale) if len(scale.axes) == 2 else _panel_in_space(sheet, x, y, scale, style.view)
            _draw_cloud(
                ax, cloud, row.weights[c] / strongest, point, row.frames[c] if row.poses else None, scale, style
            )
            if r == 0:
                sheet.text(x + cell / 2, y - 0.07, headings[c], ha="center", fontsize=9.5)
            if c:
                difference = float(np.abs(row.weights[c] - row.weights[0]).max())
                found = f"{difference:.0e}" if difference else "0"
                sheet.text(x + cell / 2, y + high + 0.07, found, ha="center", fontsize=8, color=SMALL_PRINT)
    return sheet.figure


def _scale(clouds: Sequence[npt.NDArray[np.float64]], style: CloudStyle) -> _Scale:
    """One scale for all panels, which are as high as the clouds, which are about the origin, need."""
    axes = _screen(style.view) if clouds[0].shape[1] == 3 else np.eye(2)
    across, up = (max(float(np.abs(cloud @ axis).max()) for cloud in clouds) for axis in axes[:2])
    reach = 1.16 * max(across, up) or 1.0
    cell = 2.1
    inch = 2 * reach / cell
    diameter = 12.0 if style.labels else _diameter(clouds[0] / inch * 72)
    return _Scale(cell, cell * max(1.2 * up / reach, 0.5), reach, inch, diameter, axes)


def _diameter(points: npt.NDArray[np.float64]) -> float:
    """The diameter at which most ``points`` do not touch, all in points of typography."""
    if len(points) < 2:
        return 9.0
    apart = np.linalg.norm(points[:, None] - points, axis=-1) + np.diag(np.full(len(points), np.inf))
    return float(np.clip(0.7 * np.median(apart.min(axis=1)), 3.5, 9.0))


def _screen(view: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The directions to the right, upwards, and to the eye, as rows."""
    elevation, azimuth = map(math.radians, view)
    right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    eye = np.array([math.cos(elevation) * right[1], -math.cos(elevation) * right[0], math.sin(elevation)])
    return np.stack([right, np.cross(eye, right), eye])


def _panel(sheet: Sheet, x: float, y: float, scale: _Scale) -> Axes:
    """Axes of the plane with as many units in an inch in both directions."""
    width, height = scale.cell - 0.1, scale.high - 0.1
    ax = sheet.panel(x + 0.05, y + 0.05, width, height)
    ax.set_xlim(-scale.reach, scale.reach)
    ax.set_ylim(*(np.array([-scale.reach, scale.reach]) * height / width))
    for spine in ax.spines.values():
        spine.set_edgecolor("#DDDDDD")
    return ax


def _panel_in_space(sheet: Sheet, x: float, y: float, scale: _Scale, view: tuple[float, float]) -> Any:
    """Axes of space, seen in parallel from ``view``, with as many units in an inch in all directions."""
    from mpl_toolkits.mplot3d import Axes3D, proj3d  # type: ignore[import-untyped]

    # Axes in space are square: above and below they may reach into their neighbours.
    width, reach = scale.cell, scale.reach
    bottom = sheet.height - y - (scale.high + width) / 2
    box = (x + sheet.left) / sheet.width, bottom / sheet.height, width / sheet.width, width / sheet.height
    space = Axes3D(sheet.figure, box, proj_type="ortho", computed_zorder=False)
    sheet.figure.add_axes(space)
    space.set_axis_off()
    space.patch.set_visible(False)
    space.set(xlim=(-reach, reach), ylim=(-reach, reach), zlim=(-reach, reach))
    space.set_box_aspect((1, 1, 1))
    space.view_init(*view)
    ends = np.outer([-reach, reach], scale.axes[0])
    shown = proj3d.proj_transform(*ends.T, space.get_proj())[0]
    space.set_box_aspect((1, 1, 1), zoom=space.viewLim.width / float(np.ptp(shown)))
    return space


def _draw_cloud(
    ax: Any,
    cloud: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
    point: int,
    frame: npt.NDArray[np.float64] | None,
    scale: _Scale,
    style: CloudStyle,
) -> None:
    """Draw one cloud with shares of attention between -1 and 1; what is near hides what is not."""
    strength = np.sqrt(np.abs(shares))
    hue = np.where(shares[:, None] < 0, _NEGATIVE, _POSITIVE)
    nearness = cloud @ scale.axes[2] if len(scale.axes) == 3 else np.zeros(len(cloud))
    order = 2 + (nearness - nearness.min()) / (np.ptp(nearness) or 1.0)
    for i, j in style.bonds:
        ax.plot(*cloud[[i, j]].T, color=_BOND, linewidth=2.2, zorder=min(order[i], order[j]), solid_capstyle="round")
    for j in range(len(cloud)):
        if j != point and strength[j] > 0.02:  # fainter ones are invisible
            width, alpha = 0.4 + 2.8 * abs(shares[j]), 0.8 * strength[j]
            ax.plot(*cloud[[point, j]].T, color=hue[j], linewidth=width, alpha=alpha, zorder=1.5)
    order[point] += 0.0 if np.ptp(nearness) else 0.5
    flat = {"depthshade": False} if cloud.shape[1] == 3 else {}
    diameter = scale.diameter
    for j in range(len(cloud)):
        ax.scatter(
            *cloud[j][:, None],
            s=(1.1 * diameter if j == point else diameter) ** 2,
            color=[1 - strength[j] * (1 - hue[j])],
            edgecolors="black" if j == point else GREY,
            linewidths=0.2 * diameter if j == point else 0.07 * diameter,
            zorder=order[j] + 0.001,
            **flat,
        )
        if style.labels:
            ax.text(*cloud[j], style.labels[j], ha="center", va="center", fontsize=7.5, zorder=order[j] + 0.002)
    if frame is not None:
        _draw_pose(ax, cloud[point], frame, scale)


def _draw_pose(ax: Any, place: npt.NDArray[np.float64], frame: npt.NDArray[np.float64], scale: _Scale) -> None:
    """Draw the axes of a pose, which are the columns of ``frame``, from the rim of the point at ``place`` outwards."""
    from matplotlib.patheffects import Normal, withStroke

    start = 0.85 * scale.diameter / 72 * scale.inch
    for k, axis in enumerate(frame.T):
        ends = place + np.stack([start * axis, (start + _FRAME[k] * scale.inch) * axis])
        (drawn,) = ax.plot(*ends.T, color="black", linewidth=2.0 - 0.4 * k, zorder=4, solid_capstyle="round")
        drawn.set_path_effects([withStroke(linewidth=4.4 - 0.4 * k, foreground="white"), Normal()])
