"""What an attentive layer lets through, pose by pose, on transformed images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._attended import find_attentive, look
from escnn_attention.plotting._names import stacked
from escnn_attention.plotting._overlays import (
    as_change,
    draw_bar,
    draw_image,
    draw_over,
    extents,
    shaded,
    shades,
)
from escnn_attention.plotting._sheet import Frame, Sheet, figure_class, pose_colour
from escnn_attention.plotting._transformations import Transformation, largest_change, transformations_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attentive_maps"]


def plot_attentive_maps(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layer: str | torch.nn.Module | None = None,
    *,
    elements: Sequence[GroupElement] | None = None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
    field: int | None = None,
    back: bool = True,
    background: float = 0.0,
    title: str = "What attention lets through, pose by pose",
) -> Figure:
    r"""The equivariant attention maps of one layer on transformed images.

    A column is the image transformed by a group element, or rotated by any angle, and a row a pose h. The map over the
    image is the part of the features that the layer lets through at a position: of
    :class:`~escnn_attention.FeatureAttention` :math:`1 - \alpha^X(x, h)\, \alpha^C_c(h)`, in the mean over the fields
    c; of :class:`~escnn_attention.AttentiveConv`, whose maps are of pairs of fields and poses, in the mean over those
    of the input besides; of :class:`~escnn_attention.PoseAttention` :math:`1 - \alpha(x, h)`; and α in place of 1 − α
    for ``residual=False``. A frame of one colour and number marks one map and its transformed copies: map h of the
    image is map gh of the image that was transformed by g. The last row is what channel attention alone lets through,
    field by field (rows) and pose by pose (columns, which change places).

    At the right, maps are transformed back, and put back to the poses in which they were: in an equivariant layer all
    columns are the same. The number below is the largest difference from the maps of the image as it is; between the
    elements of the group that map the grid onto itself, maps are interpolated, and compared within a disc.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that
            take one.
        model: an attentive layer, or any module in which some stand; called in evaluation mode.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        elements: the elements that transform the image; by default those that map the grid onto itself, at most eight.
        angles: degrees to rotate it by in place of elements. Poses are then told apart by the nearest
            rotation of the group.
        field: one field of the layer's output in place of the mean over all of them.
        back: whether to draw the part at the right.
        background: the value around the image.
        title: above the figure.

    Returns:
        The figure. Where margins or coarser grids are on the way to the layer, its maps lie on the part of the image
        that they are of; their grid is taken to be about the centre, as it is in exact networks.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: ``model`` is not a module, ``x`` no tensor, or a layer, element or field is of another type.
        ValueError: ``x`` is not one planar image, there is no such layer, element or field, the model does not call the
            layer, or both elements and angles are given, or angles for what is not square and scalar.

    Example:
        >>> import torch
        >>> from escnn_attention import AttentiveConv
        >>> from escnn_attention.plotting import plot_attentive_maps
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 3 * [g.regular_repr])
        >>> lifting = AttentiveConv(image, fields, 3, ratio=1)
        >>> figure = plot_attentive_maps(torch.randn(1, 1, 12, 12), lifting, elements=g.fibergroup.elements[:2])
        >>> len(figure.axes)  # twice, there and back, an image, four poses and the channel map; and a scale
        25

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figures 7 and 11.
    """
    figure_class()
    chosen = dict(list(find_attentive(model, layer).items())[:1])
    ((name, module),) = chosen.items()
    x, run = look(x, model, chosen, field)
    columns = transformations_for(x, elements, angles, background)
    upright = run(x)[name]
    images = [t.apply(x) for t in columns]
    seen = [run(image)[name] for image in images]
    returned = [t.undo(found.passed, x.type) for t, found in zip(columns, seen, strict=True)]
    scale = extents([upright.passed, *(found.passed for found in seen)])
    channel_scale = extents([f.channel for f in [upright, *seen] if f.channel is not None] or [torch.zeros(1)])

    poses = len(upright.passed)
    cell = 1.0 if max(poses, len(columns)) <= 4 else 0.66
    left, gap, bar = 0.95, 0.5, 0.6
    block = cell * len(columns)
    second, width = left + block + gap, left + block + (gap + block if back else 0)
    top = Sheet.TOP + 0.25
    bottom = top + cell * (1 + poses + (upright.channel is not None)) + 0.3
    what = f"field {field}" if field is not None else "mean over the fields"
    note = f"{name.removeprefix('stages.') or type(module).__name__}, {what}; frames of one colour and number: one map"
    sheet = Sheet(width + bar, bottom + 0.3, title, note)

    sheet.text(left + block / 2, Sheet.TOP - 0.1, "the image is transformed", ha="center", fontsize=9.5)
    for column, (t, image, found) in enumerate(zip(columns, images, seen, strict=True)):
        sources = [t.source(pose) for pose in range(poses)] if poses > 1 else [0]
        shown = _Column(t.name, shades(image), found.passed, found.channel, sources, found.covered)
        _draw_column(sheet, (left + column * cell, top, cell), shown, scale, channel_scale)
    _name_rows(sheet, (left - 0.1, top, cell), columns[0], poses, upright.channel is not None)
    if back:
        sheet.text(second + block / 2, Sheet.TOP - 0.1, "its maps are transformed back", ha="center", fontsize=9.5)
        sheet.text(second - 0.08, bottom, "change:", ha="right", fontsize=7.5)
        for column, (t, found, maps) in enumerate(zip(columns, seen, returned, strict=True)):
            channel = None if found.channel is None else found.channel[:, t.images_of_poses(poses)]
            shown = _Column(t.name, shades(x), maps, channel, range(poses), found.covered)
            _draw_column(sheet, (second + column * cell, top, cell), shown, scale, channel_scale)
            below = as_change(largest_change(maps, upright.passed, t))
            sheet.text(second + (column + 0.5) * cell, bottom, below, ha="center", fontsize=7.5)
    draw_bar(sheet, width + 0.08, top + cell + 0.15, 0.9 * cell, scale)
    return sheet.figure


@dataclass(frozen=True)
class _Column:
    """One column of a picture.

    Attributes:
        name: its heading.
        image: at the top.
        maps: ``(poses, h, w)``; what is drawn over it, pose by pose.
        channel: ``(fields, poses)``; the map of the channels, if there is one.
        numbers: of the frames, one for each pose.
        covered: the parts of the rows and columns of the image that the maps are of.
    """

    name: str
    image: npt.NDArray[np.float32]
    maps: Tensor
    channel: Tensor | None
    numbers: Sequence[int]
    covered: tuple[float, float]


def _draw_column(
    sheet: Sheet,
    place: tuple[float, float, float],
    column: _Column,
    scale: tuple[float, float],
    channel_scale: tuple[float, float],
) -> None:
    """Draw a column from ``place`` (x, y, side of a cell) downwards."""
    x, y, cell = place
    ax = sheet.cell(x, y, cell)
    draw_image(ax, column.image)
    ax.set_title(column.name, fontsize=9 if cell > 0.8 else 7.5, pad=4)
    y += cell + 0.1
    for number, values in zip(column.numbers, column.maps, strict=True):
        ax = sheet.cell(x, y, cell)
        draw_over(ax, column.image, values, scale, column.covered)
        if len(column.maps) > 1:
            Frame(ax, number, len(column.maps))
        y += cell
    if column.channel is not None:
        _draw_channels(sheet.cell(x, y + 0.1, cell), column.channel.numpy(), column.numbers, channel_scale)


def _name_rows(
    sheet: Sheet, place: tuple[float, float, float], transformation: Transformation, poses: int, channels: bool
) -> None:
    """Write the names of the poses at the left of ``place`` (x, y, side of a cell)."""
    x, y, cell = place
    y += cell + 0.1
    for matrix in transformation.table.action[:poses]:
        label = f"pose {stacked(matrix)}" if poses > 1 else "all poses"
        sheet.text(x, y + cell / 2, label, ha="right", fontsize=8.5)
        y += cell
    if channels:
        sheet.text(x, y + 0.1 + cell / 2, "channels", ha="right", fontsize=8.5)


def _draw_channels(
    ax: Axes, values: npt.NDArray[np.float32], numbers: Sequence[int], scale: tuple[float, float]
) -> None:
    """Draw a map of channels ``(fields, poses)``, below the colours of the poses."""
    fields, poses = values.shape
    ax.imshow(
        shaded(np.clip((values - scale[0]) / (scale[1] - scale[0]), 0, 1)),
        interpolation="nearest",
        aspect="auto",
        extent=(0, poses, fields, 0),
    )
    for place, number in enumerate(numbers):
        colour = pose_colour(number, poses)
        ax.plot(
            [place, place + 1], [-0.045 * fields] * 2, color=colour, linewidth=4, solid_capstyle="butt", clip_on=False
        )
    ax.set_xlim(0, poses)
    ax.set_ylim(fields, 0)
