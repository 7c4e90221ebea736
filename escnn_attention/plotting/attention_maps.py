"""Attention maps of chosen queries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import evaluating, find_attention, on_fields, watch
from escnn_attention.groups.fibers import Fibers
from escnn_attention.nn.resample import Crop
from escnn_attention.plotting._drawing import Frame, Table, draw_image, figure_class, shaded
from escnn_attention.plotting._elements import (
    as_drawn,
    check_image,
    check_index,
    name_element,
    pose_indices,
    refuse_exported,
    stacked,
    transformations_for,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Row:
    """One query in one orientation of the image."""

    image: Tensor  # (H, W)
    covered: tuple[float, float]  # the parts of its rows and columns, about its centre, that the layer's grid covers
    query: tuple[int, int]  # its position on that grid
    maps: Tensor  # (columns, h, w), the attention of each pose that is drawn
    numbers: list[int]  # the poses that these were before the image was transformed
    element: int  # by which it was


def plot_attention_maps(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layer: str | torch.nn.Module | None = None,
    *,
    positions: Sequence[tuple[int, int]],
    poses: Sequence[int | GroupElement] | None = None,
    head: int | None = None,
    elements: Sequence[GroupElement] | None = None,
    title: str = "Where a query looks, pose by pose",
) -> Figure:
    r"""Attention over the image, for chosen query positions and poses.

    Rows are query positions (crosses) in the image transformed by a group element, which moves the position, too.
    Columns are poses h of the query; a map shows its attention probabilities summed over the poses of the keys. Frames
    of one colour (and number) mark one map and its transformed copies.

    With chosen ``poses`` queries (x, h) are transformed to (gx, gh), so that a column shows one map, transformed.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that
            take one. The mean over C is drawn.
        model: an attention layer, or any module that contains some. It is called with ``x`` in evaluation mode, and
            attention is computed for the features that reach the layer.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        positions: query positions (row, column) on the grid of the layer's input, which may be coarser than the image.
        poses: the poses of the queries, as indices or elements; by default all.
        head: the head to show; by default the one whose attention is most concentrated.
        elements: the elements that transform the image; by default the identity and the next element that maps the grid
            onto itself.
        title: above the figure.

    Returns:
        The figure. Where a :class:`Crop` in front of the layer removes margins, the maps cover the middle of the image.

    Raises:
        TypeError: ``model`` is not a module, ``x`` no tensor, or a head, pose, position or element is of another type.
        ValueError: ``x`` is not one planar image, there is no such layer, head, pose, position or element, an element
            does not map the grid onto itself, or the model does not call the layer, or was exported and has no group.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn_attention.plotting import plot_attention_maps
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = HybridNet(g, 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 2))
        >>> figure = plot_attention_maps(
        ...     torch.randn(1, 1, 16, 16), network, "stages.attention_2_2", positions=[(3, 4)], poses=[0, 1]
        ... )
        >>> len(figure.axes)  # two orientations: the image and two poses
        6

    Source: the picture that GSA-Nets (Romero and Cordonnier 2021) describe by Figures B.1 and B.2.
    """
    figure_class()
    refuse_exported(model)
    call, x = on_fields(model, x)
    check_image(x)
    attention = find_attention(model, layer)
    if x.type.gspace != attention.in_type.gspace:
        raise ValueError(f"x: its gspace is {x.type.gspace.name}, that of the layer {attention.in_type.gspace.name}")
    columns = transformations_for(x, elements, None, 0.0, most=2)
    table = columns[0].table
    if not all(t.exact for t in columns):
        raise ValueError("elements: only those that map the grid onto itself take a position to a position")
    positions = _pairs(positions)
    if head is not None:
        head = check_index("head", head, attention.num_heads)
    queried = pose_indices(table, poses)

    rows: list[_Row] = []
    with evaluating(model):
        for t in columns:
            image = t.apply(x)
            features, covered = _arriving(call, image, model, attention)
            height, width = features.tensor.shape[-2:]
            queries = [_moved(position, table.action[t.element], height, width) for position in positions]
            # By default all poses, else the poses gh, which were the poses h of the image before.
            shown = queried if poses is None else [int(t.images_of_poses(table.order)[h]) for h in queried]
            numbers = [t.source(h) for h in shown]
            # heads, poses, positions, query poses, key poses, space
            maps = as_drawn(attention.attention_maps(features, queries, shown)[0]).sum(dim=4).mean(dim=3)
            if head is None:
                entropy = -(maps * maps.clamp_min(1e-12).log()).sum(dim=(-2, -1)).mean(dim=(1, 2))
                head = int(entropy.argmin())
            grey = as_drawn(image.tensor[0]).mean(0)
            rows += [_Row(grey, covered, q, maps[head, :, k], numbers, t.element) for k, q in enumerate(queries)]
    # The rows of one query are adjacent.
    rows = [rows[e * len(positions) + k] for k in range(len(positions)) for e in range(len(columns))]
    note = (
        f"head {head}; cross: the query; colour: attention; frames of one colour and number: the same map, transformed"
    )
    return _draw(rows, table, queried, len(columns), title, note)


def _draw(rows: Sequence[_Row], table: Fibers, poses: Sequence[int], together: int, title: str, note: str) -> Figure:
    """The figure, with so many rows ``together`` and the columns named by ``poses``."""
    few = len(poses) <= 4
    gaps = [0.2 if r and not r % together else 0.0 for r in range(len(rows))]
    sheet = Table(1.15 if few else 0.85, [0.0, 0.15, *[0.0] * (len(poses) - 1)], gaps, title, note, left=1.25)
    strongest = max(float(row.maps.max()) for row in rows) or 1.0
    for r, row in enumerate(rows):
        identity = np.allclose(table.action[row.element], np.eye(2))
        sheet.name(r, "as it is" if identity else f"transformed\n{name_element(table.action[row.element])}", 9)
        for column in range(1 + len(poses)):
            ax = sheet.cell(r, column)
            _draw_panel(ax, row, None if column == 0 else (row.maps[column - 1] / strongest).sqrt().clamp(0, 1))
            if column:
                Frame(ax, row.numbers[column - 1], table.order)
            if r == 0:
                heading = f"pose {stacked(table.action[poses[column - 1]])}" if column else "input"
                ax.set_title(heading, fontsize=9 if few else 7.5, pad=4)
    return sheet.figure


def _draw_panel(ax: Axes, row: _Row, weights: Tensor | None) -> None:
    """Draw the image with the query, faintly under ``weights`` ``(h, w)`` where there are some."""
    h, w = row.maps.shape[-2:]
    grid = (-0.5, w - 0.5, h - 0.5, -0.5)
    # The image in units of the layer's grid, about the same centre.
    margin = [(n / part - n) / 2 for n, part in zip((h, w), row.covered, strict=True)]
    extent = (grid[0] - margin[1], grid[1] + margin[1], grid[2] + margin[0], grid[3] - margin[0])
    draw_image(ax, row.image.numpy(), faint=weights is not None, extent=extent)
    if weights is not None:
        ax.imshow(shaded(weights.numpy()), interpolation="nearest", extent=grid)
    ax.plot(row.query[1], row.query[0], marker="x", color="black", markersize=7, markeredgewidth=3.4)
    ax.plot(row.query[1], row.query[0], marker="x", color="white", markersize=6.2, markeredgewidth=1.6)
    ax.set_xlim(extent[0], extent[1])
    ax.set_ylim(extent[2], extent[3])


def _arriving(
    call: Callable[[GeometricTensor], object], x: GeometricTensor, model: torch.nn.Module, layer: torch.nn.Module
) -> tuple[GeometricTensor, tuple[float, float]]:
    """The features that reach the layer, and the fractions of the rows and columns of ``x`` that its grid covers."""
    crops = {name: module for name, module in model.named_modules() if isinstance(module, Crop)}
    # No module has a name that ends in a dot.
    caught = watch(lambda: call(x), {**crops, "layer.": layer}, inputs=True)
    if "layer." not in caught:
        raise ValueError(f"model: the {type(model).__name__} does not call the layer")
    rows = columns = 1.0
    for name, features in caught.items():
        assert isinstance(features, GeometricTensor)
        if name == "layer.":
            break
        height, width = features.tensor.shape[-2:]
        rows *= 1 - 2 * crops[name].margin / height
        columns *= 1 - 2 * crops[name].margin / width
    arrived = caught["layer."]
    assert isinstance(arrived, GeometricTensor)
    return arrived, (rows, columns)


def _pairs(positions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Positions (row, column); whether they lie on the grid is known when features arrive on it."""
    try:
        found = [(operator.index(row), operator.index(column)) for row, column in positions]
    except (TypeError, ValueError):
        raise TypeError(f"positions: got {positions!r}, needed pairs of integers (row, column)") from None
    if not found:
        raise ValueError("positions: got none, needed at least one (row, column)")
    return found


def _moved(position: tuple[int, int], matrix: npt.NDArray[np.float64], height: int, width: int) -> tuple[int, int]:
    """The pixel (row, column) of a grid under ``matrix``, which acts on (x, y) with y upwards.

    ``height`` and ``width`` are those of the transformed grid.
    """
    before = (width, height) if abs(matrix[0, 0]) < 0.5 else (height, width)
    row, column = position
    if not (0 <= row < before[0] and 0 <= column < before[1]):
        raise ValueError(
            f"positions: ({row}, {column}) lies outside the grid of {before[0]}×{before[1]} positions of the layer"
        )
    x, y = matrix @ np.array([column - (before[1] - 1) / 2, (before[0] - 1) / 2 - row])
    return round((height - 1) / 2 - y), round(x + (width - 1) / 2)
