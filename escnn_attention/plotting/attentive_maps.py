"""What an attentive layer lets through, pose by pose, while the image turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._attentive import (
    ATTENTION,
    STRONGEST,
    as_change,
    change,
    draw_bar,
    draw_image,
    draw_over,
    extents,
    find_attentive,
    look,
    shades,
    turns_for,
)
from escnn_attention.plotting._drawing import COLOURS, GREY, Frame, Sheet, figure_class, name_element, planar

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
    r"""The equivariant attention maps of one layer on turned images.

    A column is the image turned by a group element, or by any angle, and a row a pose h. The map over the image is the
    part of the features that the layer lets through at a position: of :class:`~escnn_attention.FeatureAttention`
    :math:`1 - \alpha^X(x, h)\, \alpha^C_c(h)`, in the mean over the fields c; of
    :class:`~escnn_attention.AttentiveConv`, whose maps are of pairs of fields and poses, in the mean over those of the
    input besides; of :class:`~escnn_attention.PoseAttention` :math:`1 - \alpha(x, h)`; and α in place of 1 − α for
    ``residual=False``. A frame of one colour and number marks one map and its turned copies: map h of the image is map
    gh of the image that was turned by g. The last row is what channel attention alone lets through, field by field
    (rows) and pose by pose (columns, which change places).

    At the right, maps are turned back, and put back to the poses in which they were: in an equivariant layer all
    columns are the same. The number below is the largest difference from the maps of the image as it is; between the
    elements of the group that map the grid onto itself, maps are interpolated, and compared within a disc.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that
            take one.
        model: an attentive layer, or any module in which some stand; called in evaluation mode.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        elements: the elements that turn the image; by default those that map the grid onto itself, at most eight.
        angles: degrees to turn it by in place of elements. Poses are then told apart by the nearest turn of the group.
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
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import AttentiveConv
        >>> from escnn_attention.plotting import plot_attentive_maps
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 3 * [g.regular_repr])
        >>> lifting = AttentiveConv(image, fields, 3, ratio=1)
        >>> figure = plot_attentive_maps(torch.randn(1, 1, 12, 12), lifting, elements=g.fibergroup.elements[:2])
        >>> len(figure.axes)  # twice, turned and turned back, an image, four poses and the channel map; and a scale
        25

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figures 7 and 11.
    """
    figure_class()
    chosen = dict(list(find_attentive(model, layer).items())[:1])
    ((name, module),) = chosen.items()
    x, run = look(x, model, chosen, field)
    turns = turns_for(x, elements, angles, background)
    table = planar(x.type.gspace)
    upright = run(x)[name]
    images = [turn.image(x) for turn in turns]
    seen = [run(image)[name] for image in images]
    returned = [turn.back(found.passed, x.type) for turn, found in zip(turns, seen, strict=True)]
    scale = extents([upright.passed, *(found.passed for found in seen)])

    channel_scale = extents([f.channel for f in [upright, *seen] if f.channel is not None] or [torch.zeros(1)])

    poses, columns = len(upright.passed), len(turns)
    cell = 1.0 if max(poses, columns) <= 4 else 0.66
    left, gap, bar = 0.95, 0.5, 0.6
    block = cell * columns
    lines = 1 + poses + (upright.channel is not None)
    top = Sheet.TOP + 0.25
    what = f"field {field}" if field is not None else "mean over the fields"
    note = f"{name.removeprefix('stages.') or type(module).__name__}, {what}; frames of one colour and number: one map"
    sheet = Sheet(left + block + (gap + block if back else 0) + bar, top + cell * lines + 0.2 + 0.4, title, note)

    def panel(start: float, column: int, y: float) -> Axes:
        return sheet.panel(start + column * cell + 0.05 * cell, y + 0.05 * cell, 0.9 * cell)

    upright_image = shades(x)
    blocks: list[tuple[float, str, list[Any]]] = [
        (left, "the image is turned", [(shades(i), f, f.passed) for i, f in zip(images, seen, strict=True)])
    ]
    if back:
        blocks.append(
            (
                left + block + gap,
                "its maps are turned back",
                [(upright_image, f, r) for f, r in zip(seen, returned, strict=True)],
            )
        )
    for start, heading, panels in blocks:
        sheet.text(start + block / 2, Sheet.TOP - 0.1, heading, ha="center", fontsize=9.5)
        for column, (turn, (image, found, maps)) in enumerate(zip(turns, panels, strict=True)):
            places = turn.places(poses) if start > left else np.arange(poses)
            y = top
            ax = panel(start, column, y)
            draw_image(ax, image)
            ax.set_title(turn.name, fontsize=9 if cell > 0.8 else 7.5, pad=4)
            y += cell + 0.1
            for pose in range(poses):
                ax = panel(start, column, y)
                draw_over(ax, image, maps[pose], scale, found.covered)
                if poses > 1:
                    Frame(ax, pose if start > left else turn.number(pose), poses)
                y += cell
            if found.channel is not None:
                numbers = [pose if start > left else turn.number(pose) for pose in range(poses)] if poses > 1 else [0]
                values = found.channel.numpy()[:, places]
                _draw_channels(panel(start, column, y + 0.1), values, numbers, channel_scale)
            if start > left:
                below = as_change(change(maps, upright.passed, turn))
                sheet.text(start + (column + 0.5) * cell, top + cell * lines + 0.3, below, ha="center", fontsize=7.5)
    y = top + cell + 0.1
    for pose in range(poses):
        label = f"pose {name_element(table.action[pose])}".replace(", ", "\n") if poses > 1 else "all poses"
        sheet.text(left - 0.1, y + cell / 2, label, ha="right", fontsize=8.5)
        y += cell
    if upright.channel is not None:
        sheet.text(left - 0.1, y + 0.1 + cell / 2, "channels", ha="right", fontsize=8.5)
    if back:
        sheet.text(left + block + gap - 0.08, top + cell * lines + 0.3, "change:", ha="right", fontsize=7.5)
    draw_bar(sheet, left + block + (gap + block if back else 0) + 0.08, top + cell + 0.15, 0.9 * cell, scale)
    return sheet.figure


def _draw_channels(
    ax: Axes, values: npt.NDArray[np.float32], numbers: Sequence[int], scale: tuple[float, float]
) -> None:
    """``(fields, poses)``, below the colours of the poses."""
    fields, poses = values.shape
    shown = np.ones((fields, poses, 4)) * np.array([*ATTENTION, 0.0])
    shown[..., 3] = STRONGEST * np.clip((values - scale[0]) / (scale[1] - scale[0]), 0, 1)
    ax.imshow(shown, interpolation="nearest", aspect="auto", extent=(0, poses, fields, 0))
    for place, number in enumerate(numbers):
        colour = COLOURS[number] if poses <= len(COLOURS) else GREY
        ax.plot(
            [place, place + 1], [-0.045 * fields] * 2, color=colour, linewidth=4, solid_capstyle="butt", clip_on=False
        )
    ax.set_xlim(0, poses)
    ax.set_ylim(fields, 0)
