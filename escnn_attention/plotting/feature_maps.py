"""Feature maps of inputs that are transformed by group elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.groups.fibers import Fibers
from escnn_attention.plotting._arguments import element_indices, grid_elements, planar
from escnn_attention.plotting._fields import as_drawn, transformed
from escnn_attention.plotting._names import name_element, stacked
from escnn_attention.plotting._sheet import MOST_COLUMNS, Frame, Sheet, figure_class, map_style
from escnn_attention.plotting._stages import Stage, choose_field, stage_runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_feature_maps"]


def plot_feature_maps(
    x: GeometricTensor | Tensor,
    stages: torch.nn.Module | Mapping[str, Stage],
    layers: str | Sequence[str] | None = None,
    *,
    elements: Sequence[GroupElement] | None = None,
    fields: Mapping[str, int] | None = None,
    title: str = "The input is transformed: feature maps follow, poses permute",
) -> Figure:
    """An input transformed by group elements, above the feature maps of each stage (GSA-Nets, Fig. 1).

    A column belongs to a group element, a row to a pose of a regular field. A frame of one colour (and number) marks
    one map and its transformed copies: that they stand in other rows from column to column is the permutation of the
    poses.

    Args:
        x: one image, (1, C, S, S), scalar fields over a planar gspace with a finite group; or a plain tensor for a
            model that takes one. The mean over C is drawn.
        stages: a model, whose layers are shown; or what to show by name: functions from ``x`` to a tensor with regular
            fields, for example a module, or the first modules of a network.
        layers: of a model, the modules to show, by their names in it; by default its first attention layer and its last
            module that gives regular fields.
        elements: the columns; by default all elements (of more than 8: those that map the grid onto itself).
        fields: which field of a stage to draw, by the stage's name; by default the one whose poses differ most.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: ``stages`` is neither a model nor a mapping to functions, ``x`` not a tensor (of fields, for a
            mapping), or an element or a field is of another type.
        ValueError: ``x`` is not one planar image, there is nothing to show, an element is of another group, a stage
            gives something else than regular fields on a grid, there is no such stage, field or layer, or the model was
            exported, and knows no group.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn_attention.plotting import plot_feature_maps
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = HybridNet(g, 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> figure = plot_feature_maps(torch.randn(1, 1, 12, 12), network, ["stages.convolution_1_1", "stages.norm"])
        >>> len(figure.axes)  # four inputs, and below each two stages of four poses
        36
    """
    figure_class()
    run, x, names = stage_runner(x, stages, [layers] if isinstance(layers, str) else layers)
    table = planar(x.type.gspace)
    if elements is None:
        elements = list(table.elements) if table.order <= MOST_COLUMNS else grid_elements(table)
    index = element_indices(table, elements)
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields: got {type(fields).__name__}, needed a mapping from the names of stages")
    for name in fields:
        if name not in names:
            raise ValueError(f"fields: got {name!r}, needed names of stages: {', '.join(map(repr, names))}")
    images = [transformed(x, table.elements[i]) for i in index]
    by_image = [run(image) for image in images]
    maps = {name: [found[name] for found in by_image] for name in names}
    chosen = {name: choose_field(name, values[0], fields.get(name)) for name, values in maps.items()}

    poses, columns = table.order, len(index)
    cell = 0.95 if poses <= 4 else 0.62
    left, right, gap, bottom = 1.75, 0.15, 0.28, 0.15
    total = Sheet.TOP + cell * 1.25 + (cell * poses + gap) * len(maps) + bottom
    note = f"frames of one colour and number: the same map, transformed ({x.type.gspace.fibergroup.name})"
    sheet = Sheet(left + cell * columns + right, total, title, note)
    y = Sheet.TOP
    for column, (image, i) in enumerate(zip(images, index, strict=True)):
        ax = sheet.cell(left + column * cell, y, cell)
        ax.imshow(as_drawn(image.tensor[0]).mean(0).numpy(), cmap="gray_r", interpolation="nearest")
        ax.set_title(stacked(table.action[i]), fontsize=10 if cell > 0.7 else 8, pad=3)
    sheet.text(left - 0.1, y + cell / 2, "input", ha="right", fontsize=10)
    y += 1.15 * cell
    for name, values in maps.items():
        y += gap / 2
        sheet.text(
            left - 1.2, y + cell * poses / 2, f"{name}\n(field {chosen[name]})",
            rotation=90, ha="center", fontsize=_fitting(name, cell * poses),
        )  # fmt: skip
        _draw_stage(sheet, (left, y, cell), [value[chosen[name]].numpy() for value in values], table, index)
        y += cell * poses + gap / 2
    return sheet.figure


def _draw_stage(
    sheet: Sheet,
    place: tuple[float, float, float],
    maps: Sequence[npt.NDArray[np.float32]],
    table: Fibers,
    index: Sequence[int],
) -> None:
    """Draw the maps ``(poses, h, w)`` under each element of ``index``, from ``place`` (x, y, side of a cell) on."""
    x, y, cell = place
    style = map_style(maps)
    for pose in range(table.order):
        sheet.text(x - 0.1, y + cell / 2, f"pose {name_element(table.action[pose])}", ha="right", fontsize=8.5)
        for column, i in enumerate(index):
            ax = sheet.cell(x + column * cell, y, cell)
            ax.imshow(maps[column][pose], **style)
            Frame(ax, int(table.quotient[i, pose]), table.order)
        y += cell


def _fitting(name: str, room: float) -> float:
    """A size of type at which a name fits into so many inches."""
    return min(10.0, 120 * room / max(len(name), 1))
