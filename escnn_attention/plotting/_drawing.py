"""What the pictures share: panels, colours, and the names of group elements."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.groups.fibers import Fibers, fibers, is_regular, is_signed_permutation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# Okabe and Ito's colours, told apart with every common kind of colour vision; the order keeps neighbours far apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY = "#8A8A8A"
SMALL_PRINT = "#444444"

MOST_COLUMNS = 8  # of elements, by default


def name_element(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A name for the orthogonal 2×2 ``matrix``, which acts on (x, y) with y upwards.

    Turns are named by their angle, counter-clockwise; reflections by the angle by which the image is turned after its
    left and right have changed sides.

    Example:
        >>> import numpy as np
        >>> from escnn_attention.plotting import name_element
        >>> name_element(np.array([[0.0, -1.0], [1.0, 0.0]]))
        '90°'
        >>> name_element(np.array([[-1.0, 0.0], [0.0, 1.0]]))
        'mirror'
    """
    mirrored = np.linalg.det(matrix) < 0
    turn = matrix @ np.diag([-1.0, 1.0]) if mirrored else matrix
    degrees = round(math.degrees(math.atan2(turn[1, 0], turn[0, 0])), 1) % 360
    angle = f"{degrees:g}°"
    return ("mirror" if degrees == 0 else f"mirror, {angle}") if mirrored else angle


def stacked(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """The name of an element in narrow columns."""
    return name_element(matrix).replace(", ", "\n")


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
        """Axes without ticks."""
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


class Frame:
    """The coloured and numbered frame of a panel that shows what one pose holds."""

    def __init__(self, ax: Axes, pose: int, poses: int):
        self.ax, self.poses = ax, poses
        self.number = ax.text(
            0.0, 1.0, "", transform=ax.transAxes, ha="left", va="top", fontsize=7.5, weight="bold"
        )  # fmt: skip
        for spine in ax.spines.values():
            spine.set_linewidth(2.6)
        self.show(pose)

    def show(self, pose: int) -> None:
        """Take the colour and the number of a pose."""
        colour = COLOURS[pose] if self.poses <= len(COLOURS) else GREY
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


def as_drawn(values: Tensor) -> Tensor:
    """In a precision that NumPy has, which has no bfloat16, on the CPU, without a graph."""
    return values.detach().float().cpu()


def transformed(x: GeometricTensor, element: GroupElement) -> GeometricTensor:
    """``x.transform(element)`` in any precision: escnn goes through NumPy."""
    precise = x.tensor if x.tensor.dtype == torch.float64 else x.tensor.float()
    found = GeometricTensor(precise, x.type).transform(element)
    return GeometricTensor(found.tensor.to(x.tensor), x.type)


def check_image(x: object) -> GeometricTensor:
    """``x``, if it is one image over the plane.

    Raises:
        TypeError: it is no GeometricTensor.
        ValueError: it is not one image, or not over the plane.
    """
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor")
    if x.type.gspace.dimensionality != 2 or x.tensor.ndim != 4 or len(x.tensor) != 1:
        raise ValueError(
            f"x: got shape {tuple(x.tensor.shape)} over {x.type.gspace.name}, needed one planar image (1, C, S, S)"
        )
    return x


def check_index(name: str, value: Any, count: int) -> int:
    """``value``, if it is an integer from 0 to ``count - 1``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it lies outside.
    """
    try:
        index = operator.index(value)
    except TypeError:
        index = None
    if index is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, needed an integer")
    if not 0 <= index < count:
        raise ValueError(f"{name}: got {index}, needed a number from 0 to {count - 1}")
    return index


def planar(gspace: GSpace) -> Fibers:
    """The tables of a gspace over the plane.

    Raises:
        ValueError: it is over something else.
        NotImplementedError: its fiber group is continuous.
    """
    if gspace.dimensionality != 2:
        raise ValueError(f"model: its gspace {gspace.name} has {gspace.dimensionality} dimensions, needed 2 to draw")
    return fibers(gspace)


def is_regular_map(value: object) -> bool:
    """Whether a value is a tensor of regular fields on a grid in the plane."""
    return (
        isinstance(value, GeometricTensor)
        and value.tensor.ndim == 4
        and not value.type.gspace.fibergroup.continuous
        and all(is_regular(r) for r in value.type.representations)
    )


def grid_elements(table: Fibers) -> list[GroupElement]:
    """The elements that map the grid onto itself."""
    return [g for g, matrix in zip(table.elements, table.action, strict=True) if is_signed_permutation(matrix)]


def pose_indices(table: Fibers, poses: Sequence[int | GroupElement] | None) -> list[int]:
    """The indices of chosen poses, all by default.

    Raises:
        TypeError: a pose that is neither an integer nor an element of a group.
        ValueError: a pose that the group does not have, or none.
    """
    if poses is None:
        return list(range(table.order))
    return [
        _index(table, "poses", pose) if isinstance(pose, GroupElement) else check_index("poses", pose, table.order)
        for pose in _some("poses", poses)
    ]


def element_indices(table: Fibers, elements: Sequence[GroupElement]) -> list[int]:
    """The indices of chosen elements.

    Raises:
        TypeError: one that is no element of a group.
        ValueError: one of another group, or none.
    """
    return [_index(table, "elements", element) for element in _some("elements", elements)]


def _index(table: Fibers, name: str, element: object) -> int:
    group = table.elements[0].group
    if not isinstance(element, GroupElement):
        raise TypeError(f"{name}: got {element!r}, needed an element of {group.name}")
    if element.group != group:
        raise ValueError(f"{name}: got an element of {element.group.name}, needed one of {group.name}")
    return table.index(element)


def _some(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {values!r}, needed a sequence")
    found = list(values)
    if not found:
        raise ValueError(f"{name}: got none, needed at least one")
    return found
