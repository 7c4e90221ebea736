"""What attention lets through, layer by layer through a network, and for which poses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.groups.fibers import Fibers
from escnn_attention.plotting._attentive import (
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
from escnn_attention.plotting._drawing import COLOURS, GREY, Sheet, figure_class, planar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attentive_layers"]

_LONGEST = 0.16  # arrow, in units of a cell
_ROOM = 0.19  # for arrows at either side of a panel


def plot_attentive_layers(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layers: Sequence[str | torch.nn.Module] | None = None,
    *,
    elements: Sequence[GroupElement] | None = None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
    background: float = 0.0,
    title: str = "What attention lets through, layer by layer",
) -> Figure:
    r"""The equivariant attention maps of all layers of a network, with the strengths of their poses, on turned images.

    A row is a layer, a column the image turned by a group element, or by any angle. The map over the image is what the
    layer lets through, as in :func:`plot_attentive_maps`, in the mean over the poses. Around it an arrow for each pose
    points where the pose takes the first axis; its length is the mean size of what the layer gives in that pose, in
    units of the largest (broken arrows are poses that mirror). When the image turns, maps and arrows turn with it.

    The number at the right is the largest difference that maps of all poses, turned back and put back to their poses,
    have from those of the image as it is: rounding errors, where the network is equivariant.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that
            take one.
        model: any module with attentive layers inside; called in evaluation mode.
        layers: the layers, each by its name in the model, itself, or a block that contains it; by default all.
        elements: the elements that turn the image; by default those that map the grid onto itself, at most eight.
        angles: degrees to turn it by in place of elements.
        background: the value around the image.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: ``model`` is not a module, ``x`` no tensor, or a layer or element is of another type.
        ValueError: ``x`` is not one planar image, there is no such layer or element, the model does not call a layer,
            or both elements and angles are given, or angles for what is not square and scalar.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import FeatureAttention
        >>> from escnn_attention.plotting import plot_attentive_layers
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 3 * [g.regular_repr])
        >>> network = nn.SequentialModule(
        ...     FeatureAttention(image, ratio=1), nn.R2Conv(image, fields, 3), FeatureAttention(fields)
        ... )
        >>> figure = plot_attentive_layers(torch.randn(1, 1, 12, 12), network)
        >>> len(figure.axes)  # the image and two layers, turned four times, and two scales
        14

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figure 7.
    """
    figure_class()
    chosen = find_attentive(model, layers)
    x, run = look(x, model, chosen)
    turns = turns_for(x, elements, angles, background)
    table = planar(x.type.gspace)
    upright = run(x)
    images = [turn.image(x) for turn in turns]
    seen = [run(image) for image in images]

    labels = _shortened(list(chosen))
    columns = len(turns)
    cell = 1.35 if columns <= 4 else 1.0
    left, right = 1.5, 1.1
    total = Sheet.TOP + cell * (1 + len(chosen)) + 0.05
    note = f"arrows: the strength of each pose ({x.type.gspace.fibergroup.name}); maps and arrows turn with the image"
    sheet = Sheet(left + cell * columns + right, total, title, note)
    size = cell * (1 - 2 * _ROOM)

    def panel(column: int, y: float) -> Axes:
        return sheet.panel(left + column * cell + _ROOM * cell, y + _ROOM * cell, size)

    y = Sheet.TOP - _ROOM * cell
    for column, (turn, image) in enumerate(zip(turns, images, strict=True)):
        ax = panel(column, y)
        draw_image(ax, shades(image))
        ax.set_title(turn.name, fontsize=10 if cell > 1.2 else 8, pad=4)
    sheet.text(left - 0.08, y + cell / 2, "input", ha="right", fontsize=10)
    sheet.text(left + columns * cell + 0.75, y + cell / 2, "change,\nturned\nback", ha="center", fontsize=8)
    y += cell
    for name, layer in chosen.items():
        means = [found[name].passed.mean(0) for found in seen]
        scale = extents(means)
        strongest = max(float(found[name].strength.max()) for found in seen) or 1.0
        label = labels[name] or type(layer).__name__
        sheet.text(left - 0.08, y + cell / 2, label, ha="right", fontsize=min(10.0, 130 / len(label)))
        largest = 0.0
        for column, (turn, image, found, mean) in enumerate(zip(turns, images, seen, means, strict=True)):
            ax = panel(column, y)
            attended = found[name]
            draw_over(ax, shades(image), mean, scale, attended.covered)
            if len(attended.strength) > 1:
                _draw_arrows(ax, attended.strength.numpy() / strongest, table, turn.number, cell / size)
            back = turn.back(attended.passed, x.type)
            largest = max(largest, change(back, upright[name].passed, turn))
        x_end = left + columns * cell
        draw_bar(sheet, x_end + 0.02, y + _ROOM * cell, size, scale)
        sheet.text(x_end + 0.75, y + cell / 2, as_change(largest), ha="center", fontsize=8)
        y += cell
    return sheet.figure


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Names without their ends, which tell what a layer is and not where, as long as they are told apart."""
    inside = [name.removeprefix("stages.") for name in names]
    stems = [name.rpartition(".")[0] or name for name in inside]
    return dict(zip(names, stems if len(set(stems)) == len(names) else inside, strict=True))


def _draw_arrows(ax: Axes, lengths: npt.NDArray[np.float32], table: Fibers, number: Any, panels: float) -> None:
    """An arrow for each pose, from the border of the panel outwards; ``panels`` is the side of a cell in panels."""
    poses = len(lengths)
    mirrors = bool((np.linalg.det(table.action) < 0).any())
    for pose in range(poses):
        matrix = table.action[pose]
        direction = matrix[:, 0]
        mirrored = np.linalg.det(matrix) < 0
        # From the border of the square, in units of the panel.
        start = direction * (0.5 / np.abs(direction).max() + 0.02)
        if mirrors:
            # Two poses take the first axis to the same place: they stand side by side.
            start = start + 0.07 * (-1 if mirrored else 1) * np.array([-direction[1], direction[0]])
        tip = start + direction * panels * _LONGEST * float(lengths[pose])
        colour = COLOURS[number(pose)] if poses <= len(COLOURS) else GREY
        ax.annotate(
            "", xy=tuple(0.5 + tip), xytext=tuple(0.5 + start), xycoords="axes fraction", textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0,
                "linestyle": (0, (1.5, 1)) if mirrored else "solid",
            },
        )  # fmt: skip
