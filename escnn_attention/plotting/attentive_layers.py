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

from escnn_attention.plotting._attended import Attended, find_attentive, look
from escnn_attention.plotting._overlays import as_change, draw_bar, draw_image, draw_over, extents, shades
from escnn_attention.plotting._sheet import Sheet, figure_class, pose_colour
from escnn_attention.plotting._transformations import Transformation, largest_change, transformations_for

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
    r"""The equivariant attention maps of all layers of a network, with the strengths of their poses.

    A row is a layer, a column the image transformed by a group element, or rotated by any angle. The map over the image
    is what the layer lets through, as in :func:`plot_attentive_maps`, in the mean over the poses. Around it an arrow
    for each pose points where the pose takes the first axis; its length is the mean size of what the layer gives in
    that pose, in units of the largest (broken arrows are poses that mirror). When the image is transformed, so are maps
    and arrows.

    The number at the right is the largest difference that maps of all poses, transformed back and put back to their
    poses, have from those of the image as it is: rounding errors, where the network is equivariant.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that
            take one.
        model: any module with attentive layers inside; called in evaluation mode.
        layers: the layers, each by its name in the model, itself, or a block that contains it; by default all.
        elements: the elements that transform the image; by default those that map the grid onto itself, at most eight.
        angles: degrees to rotate it by in place of elements.
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
        >>> from escnn_attention import FeatureAttention
        >>> from escnn_attention.plotting import plot_attentive_layers
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, 3 * [g.regular_repr])
        >>> network = nn.SequentialModule(
        ...     FeatureAttention(image, ratio=1), nn.R2Conv(image, fields, 3), FeatureAttention(fields)
        ... )
        >>> figure = plot_attentive_layers(torch.randn(1, 1, 12, 12), network)
        >>> len(figure.axes)  # the image and two layers, four times, and two scales
        14

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figure 7.
    """
    figure_class()
    chosen = find_attentive(model, layers)
    x, run = look(x, model, chosen)
    columns = transformations_for(x, elements, angles, background)
    upright = run(x)
    images = [t.apply(x) for t in columns]
    seen = [run(image) for image in images]

    cell = 1.35 if len(columns) <= 4 else 1.0
    left, right = 1.5, 1.1
    end = left + cell * len(columns)
    total = Sheet.TOP + cell * (1 + len(chosen)) + 0.05
    note = f"arrows: the strength of each pose ({x.type.gspace.fibergroup.name}); maps and arrows follow the image"
    sheet = Sheet(end + right, total, title, note)
    y = Sheet.TOP - _ROOM * cell
    for column, (transformation, image) in enumerate(zip(columns, images, strict=True)):
        ax = sheet.cell(left + column * cell, y, cell, _ROOM)
        draw_image(ax, shades(image))
        ax.set_title(transformation.name, fontsize=10 if cell > 1.2 else 8, pad=4)
    sheet.text(left - 0.08, y + cell / 2, "input", ha="right", fontsize=10)
    sheet.text(end + 0.75, y + cell / 2, "change,\nmoved\nback", ha="center", fontsize=8)
    labels = _shortened(list(chosen))
    for name, layer in chosen.items():
        y += cell
        label = labels[name] or type(layer).__name__
        sheet.text(left - 0.08, y + cell / 2, label, ha="right", fontsize=min(10.0, 130 / len(label)))
        found = [one[name] for one in seen]
        scale = _draw_row(sheet, (left, y, cell), images, found, columns)
        draw_bar(sheet, end + 0.02, y + _ROOM * cell, cell * (1 - 2 * _ROOM), scale)
        returned = [t.undo(one.passed, x.type) for t, one in zip(columns, found, strict=True)]
        largest = max(largest_change(r, upright[name].passed, t) for r, t in zip(returned, columns, strict=True))
        sheet.text(end + 0.75, y + cell / 2, as_change(largest), ha="center", fontsize=8)
    return sheet.figure


def _draw_row(
    sheet: Sheet,
    place: tuple[float, float, float],
    images: Sequence[GeometricTensor],
    found: Sequence[Attended],
    columns: Sequence[Transformation],
) -> tuple[float, float]:
    """Draw what one layer lets through of each image, from ``place`` (x, y, side of a cell) on; the scale of it."""
    x, y, cell = place
    means = [one.passed.mean(0) for one in found]
    scale = extents(means)
    strongest = max(float(one.strength.max()) for one in found) or 1.0
    for column, (transformation, image, one, mean) in enumerate(zip(columns, images, found, means, strict=True)):
        ax = sheet.cell(x + column * cell, y, cell, _ROOM)
        draw_over(ax, shades(image), mean, scale, one.covered)
        if len(one.strength) > 1:
            _draw_arrows(ax, one.strength.numpy() / strongest, transformation)
    return scale


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Names without their ends, which tell what a layer is and not where, as long as they are told apart."""
    inside = [name.removeprefix("stages.") for name in names]
    stems = [name.rpartition(".")[0] or name for name in inside]
    return dict(zip(names, stems if len(set(stems)) == len(names) else inside, strict=True))


def _draw_arrows(ax: Axes, lengths: npt.NDArray[np.float32], transformation: Transformation) -> None:
    """Draw an arrow for each pose, from the border of the panel outwards."""
    table = transformation.table
    poses = len(lengths)
    longest = _LONGEST / (1 - 2 * _ROOM)  # in units of the panel
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
        tip = start + direction * longest * float(lengths[pose])
        colour = pose_colour(transformation.source(pose), poses)
        ax.annotate(
            "", xy=tuple(0.5 + tip), xytext=tuple(0.5 + start), xycoords="axes fraction", textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0,
                "linestyle": (0, (1.5, 1)) if mirrored else "solid",
            },
        )  # fmt: skip
