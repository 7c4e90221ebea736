"""Figures of equivariant networks: what turns, what is permuted, what is attended to (extra ``plot``).

Every function returns a :class:`matplotlib.figure.Figure` that belongs to nobody else (no ``pyplot`` state): save it
with ``figure.savefig("name.png")``, or let a notebook show it. Matplotlib is imported when a figure is made, so
importing this module does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn import nn as enn
from escnn.group import GroupElement

from .fibers import fibers, is_signed_permutation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["name_element", "plot_accuracies", "plot_attention_maps", "plot_feature_maps"]

# Okabe and Ito's colours, told apart with every common kind of colour vision; the order keeps neighbours far apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_GREY = "#8A8A8A"

Stage = Callable[[enn.GeometricTensor], enn.GeometricTensor]


def name_element(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A name for the orthogonal 2×2 ``matrix``, which acts on (x, y) with y upwards.

    Turns are named by their angle, counter-clockwise; reflections by the angle by which the image is turned after its
    left and right have changed sides.

    Example:
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


def plot_feature_maps(
    x: enn.GeometricTensor,
    stages: Mapping[str, Stage],
    *,
    elements: Sequence[GroupElement] | None = None,
    fields: Mapping[str, int] | None = None,
    title: str = "The input turns: feature maps turn, poses permute",
) -> Figure:
    """An input turned by group elements, above the feature maps of each stage (GSA-Nets, Fig. 1).

    A column belongs to a group element, a row to a pose of a regular field. A frame of one colour (and number) marks
    one map and its turned copies: that they stand in other rows from column to column is the permutation of the poses.

    Args:
        x: one image, (1, C, S, S), scalar fields over a planar gspace with a finite group. The mean over C is drawn.
        stages: what to show below the image, by name: functions from ``x`` to a tensor with regular fields, for example
            a module, or the first modules of a network.
        elements: the columns; by default all elements (at most 8: then those that map the grid onto itself).
        fields: which field of a stage to draw; by default the one whose poses differ most.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: ``x`` is not one planar image, or a stage gives something else than regular fields.
    """
    figure_class = _figure_class()
    _check_image(x)
    gspace = x.type.gspace
    table = fibers(gspace)
    chosen = _elements(table.elements, table.action) if elements is None else list(elements)
    index = [table.index(g) for g in chosen]
    images = [x.transform(g) for g in chosen]
    with torch.no_grad():
        maps = {name: [_poses(name, stage(image)) for image in images] for name, stage in stages.items()}

    poses, columns = table.order, len(chosen)
    cell = 0.95 if poses <= 4 else 0.62
    widths, left, right = cell * columns, 1.75, 0.15
    gap, top, bottom = 0.28, 0.95, 0.15
    heights = [cell * 1.25, *(cell * poses for _ in maps)]
    total = sum(heights) + gap * len(maps) + top + bottom
    figure = figure_class(figsize=(max(widths + left + right, 6.4), total))
    width = figure.get_figwidth()
    left = (width - widths - right + left) / 2

    def axes(column: int, y: float, size: float) -> Axes:
        # y: inches from the top to the upper edge
        pad = 0.05 * size
        box = (left + column * cell + (cell - size) / 2 + pad, total - y - size + pad, size - 2 * pad, size - 2 * pad)
        ax = figure.add_axes((box[0] / width, box[1] / total, box[2] / width, box[3] / total))
        ax.set_xticks([])
        ax.set_yticks([])
        return ax

    def label(y: float, text: str, x_position: float, **style: Any) -> None:
        figure.text(x_position / width, 1 - y / total, text, va="center", **style)

    figure.text(0.5, 1 - 0.25 / total, title, ha="center", va="center", fontsize=12, weight="bold")
    note = f"frames of one colour and number: the same map, turned ({gspace.fibergroup.name})"
    figure.text(0.5, 1 - 0.5 / total, note, ha="center", va="center", fontsize=9.5, color="#444444")

    y = top
    for column, (image, i) in enumerate(zip(images, index, strict=True)):
        ax = axes(column, y, cell)
        ax.imshow(image.tensor[0].mean(0).detach().cpu(), cmap="gray_r", interpolation="nearest")
        ax.set_title(_stacked(table.action[i]), fontsize=10 if cell > 0.7 else 8, pad=3)
    label(y + cell / 2, "input", left - 0.1, ha="right", fontsize=10)
    y += heights[0] - 0.1 * cell
    for name, values in maps.items():
        y += gap / 2
        field = (fields or {}).get(name, _liveliest_field(values[0]))
        shown = [value[field] for value in values]
        limit = max(float(value.abs().max()) for value in shown) or 1.0
        signed = min(float(value.min()) for value in shown) < 0
        style: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -limit} if signed else {"cmap": "Greys", "vmin": 0.0}
        figure.text(
            (left - 1.2) / width, 1 - (y + cell * poses / 2) / total, f"{name}\n(field {field})",
            rotation=90, ha="center", va="center", fontsize=10,
        )  # fmt: skip
        for pose in range(poses):
            label(y + cell / 2, f"pose {name_element(table.action[pose])}", left - 0.1, ha="right", fontsize=8.5)
            for column, i in enumerate(index):
                ax = axes(column, y, cell)
                ax.imshow(shown[column][pose], vmax=limit, interpolation="nearest", **style)
                _frame(ax, int(table.quotient[i, pose]), poses)
            y += cell
        y += gap / 2
    return figure


def plot_attention_maps(
    x: enn.GeometricTensor,
    layer: enn.EquivariantModule,
    network: Callable[..., object] | None = None,
    *,
    positions: Sequence[tuple[int, int]],
    head: int | None = None,
    elements: Sequence[GroupElement] | None = None,
    title: str = "Where a query looks, pose by pose",
) -> Figure:
    """Where attention goes over the image, for chosen query positions and every pose of the query.

    A row is a query position (cross) in the image turned by a group element; the position is turned with it. A column
    is the pose of the query, the map its attention probabilities summed over the poses of the keys. A frame of one
    colour (and number) marks one map and its turned copies.

    Args:
        x: one image, (1, C, S, S), over a planar gspace with a finite group.
        layer: a ``GroupSelfAttention`` or ``LiftingSelfAttention``.
        network: what leads from ``x`` to ``layer``, called with ``x``: a module in which ``layer`` stands. By default
            the layer itself is called.
        positions: query positions (row, column) on the grid of the layer's input, which may be coarser than the image.
        head: the head to show; by default the one whose attention is most concentrated.
        elements: the elements that turn the image; by default the identity and the next element that maps the grid
            onto itself.
        title: above the figure.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: ``x`` is not one planar image, a position lies outside, an element does not map the grid onto
            itself, or ``network`` does not call ``layer``.
    """
    figure_class = _figure_class()
    _check_image(x)
    table = fibers(x.type.gspace)
    if elements is None:
        exact = [g for g, matrix in zip(table.elements, table.action, strict=True) if is_signed_permutation(matrix)]
        elements = exact[:2]
    index = [table.index(g) for g in elements]
    if not all(is_signed_permutation(table.action[i]) for i in index):
        raise ValueError("elements: only those that map the grid onto itself take a position to a position")

    rows: list[tuple[torch.Tensor, tuple[int, int], torch.Tensor, int]] = []
    with torch.no_grad():
        for g, i in zip(elements, index, strict=True):
            turned = x.transform(g)
            features = _input_of(layer, network or layer, turned)
            height, width = features.tensor.shape[-2:]
            queries = [_turn(position, table.action[i], height, width) for position in positions]
            maps = layer.attention_maps(features, queries)[0]  # heads, poses, positions, query poses, key poses, space
            maps = maps.sum(dim=4).mean(dim=3).cpu()
            if head is None:
                entropy = -(maps * maps.clamp_min(1e-12).log()).sum(dim=(-2, -1)).mean(dim=(1, 2))
                head = int(entropy.argmin())
            rows.extend((turned.tensor[0].mean(0).cpu(), q, maps[head, :, k], i) for k, q in enumerate(queries))
    # The rows that belong to one query stand together.
    rows = [rows[e * len(positions) + k] for k in range(len(positions)) for e in range(len(index))]

    poses = table.order
    cell = 1.15 if poses <= 4 else 0.85
    left, top, bottom, gap = 1.25, 0.95, 0.15, 0.2
    span = left + cell * (1 + poses) + 0.3
    total = top + cell * len(rows) + gap * (len(positions) - 1) + bottom
    figure = figure_class(figsize=(max(span, 6.4), total))
    wide = figure.get_figwidth()
    left += (wide - span) / 2
    figure.text(0.5, 1 - 0.25 / total, title, ha="center", va="center", fontsize=12, weight="bold")
    note = f"head {head}; cross: the query; colour: attention; frames of one colour and number: the same map, turned"
    figure.text(0.5, 1 - 0.5 / total, note, ha="center", va="center", fontsize=9, color="#444444")
    strongest = max(float(maps.max()) for _, _, maps, _ in rows)
    for r, (image, query, maps, i) in enumerate(rows):
        y = top + r * cell + gap * (r // len(index))
        centre = 1 - (y + cell / 2) / total
        name = f"turned\n{name_element(table.action[i])}" if i else "as it is"
        figure.text((left - 0.12) / wide, centre, name, ha="right", va="center", fontsize=9)
        for column in range(1 + poses):
            pad = 0.05 * cell
            at = left + column * cell + (0.15 if column else 0.0)
            ax = figure.add_axes(
                ((at + pad) / wide, 1 - (y + cell - pad) / total, (cell - 2 * pad) / wide, (cell - 2 * pad) / total)
            )
            extent = (-0.5, maps.shape[-1] - 0.5, maps.shape[-2] - 0.5, -0.5)  # the grid of the layer
            faint = 1.0 if column == 0 else 0.35
            ax.imshow(image, cmap="gray_r", interpolation="nearest", extent=extent, alpha=faint)
            if column:
                weight = (maps[column - 1] / strongest).sqrt().clamp(0, 1)
                colour = np.ones((*weight.shape, 4)) * np.array([0.835, 0.369, 0.0, 0.0])
                colour[..., 3] = weight.numpy() * 0.9
                ax.imshow(colour, interpolation="nearest", extent=extent)
            ax.plot(query[1], query[0], marker="x", color="black", markersize=7, markeredgewidth=3.4)
            ax.plot(query[1], query[0], marker="x", color="white", markersize=6.2, markeredgewidth=1.6)
            ax.set_xlim(extent[0], extent[1])
            ax.set_ylim(extent[2], extent[3])
            ax.set_xticks([])
            ax.set_yticks([])
            if column:
                _frame(ax, int(table.quotient[i, column - 1]), poses)
            if r == 0:
                heading = f"pose {_stacked(table.action[column - 1])}" if column else "input"
                ax.set_title(heading, fontsize=9 if poses <= 4 else 7.5, pad=4)
    return figure


def plot_accuracies(
    accuracies: Mapping[str, Mapping[str, float]],
    *,
    title: str = "Accuracy on images in orientations that were not trained",
    note: str = "",
) -> Figure:
    """A dot chart: one line per network, one mark per condition.

    Args:
        accuracies: by network, then by condition (at most 8, for all networks the same); from 0 to 1.
        title: above the figure.
        note: small print below the title.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing to draw.
    """
    figure_class = _figure_class()
    if not accuracies:
        raise ValueError("accuracies is empty: there is nothing to draw")
    names = list(accuracies)
    conditions = list(next(iter(accuracies.values())))
    figure = figure_class(figsize=(7.6, 1.75 + 0.55 * len(names)), layout="constrained")
    ax = figure.add_subplot()
    for row, name in enumerate(names):
        values = [100 * value for value in accuracies[name].values()]
        ax.plot([min(values), max(values)], [row, row], color="#CCCCCC", linewidth=3, solid_capstyle="round", zorder=1)
    for k, condition in enumerate(conditions):
        ax.scatter(
            [100 * accuracies[name][condition] for name in names], range(len(names)),
            # Open rings around filled dots: marks that coincide stay visible.
            s=(190, 75, 60, 60)[min(k, 3)], marker="oDs^v<>P"[k], linewidths=2, zorder=3 + k,
            facecolors="none" if k == 0 else _COLOURS[k], edgecolors=_COLOURS[k], label=condition,
        )  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=10)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(-3, 103)
    ax.set_xlabel("test accuracy in %")
    ax.grid(axis="x", color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.suptitle(title, fontsize=12, weight="bold")
    if note:
        ax.set_title(note, fontsize=9, color="#444444")
    figure.legend(loc="outside lower center", ncols=len(conditions), frameon=False, fontsize=10)
    return figure


def _stacked(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """The name of an element in narrow columns."""
    return name_element(matrix).replace(", ", "\n")


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install escnn-attention[plot]") from error
    return Figure


def _check_image(x: enn.GeometricTensor) -> None:
    if not isinstance(x, enn.GeometricTensor):
        raise ValueError(f"x must be a GeometricTensor, got {type(x).__name__}")
    if x.type.gspace.dimensionality != 2 or x.tensor.ndim != 4 or len(x.tensor) != 1:
        raise ValueError(f"x must be one planar image (1, C, S, S), got shape {tuple(x.tensor.shape)}")


def _elements(elements: Sequence[GroupElement], action: npt.NDArray[np.float64]) -> list[GroupElement]:
    if len(elements) <= 8:
        return list(elements)
    return [g for g, matrix in zip(elements, action, strict=True) if is_signed_permutation(matrix)]


def _poses(name: str, features: enn.GeometricTensor) -> torch.Tensor:
    """(fields, |H|, H, W) of the first sample."""
    order = features.type.gspace.fibergroup.order()
    if any(representation.size != order for representation in features.type.representations):
        raise ValueError(f"stage {name!r} must give regular fields, got {features.type}")
    values = features.tensor[0].detach().cpu()
    return values.reshape(-1, order, *values.shape[1:])


def _liveliest_field(values: torch.Tensor) -> int:
    """The field whose poses differ most in their maps, measured against its overall size."""
    differences = (values - values.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2, 3))
    return int((differences / values.square().mean(dim=(1, 2, 3)).clamp_min(1e-12)).argmax())


def _frame(ax: Axes, pose: int, poses: int) -> None:
    colour = _COLOURS[pose] if poses <= len(_COLOURS) else _GREY
    for spine in ax.spines.values():
        spine.set_edgecolor(colour)
        spine.set_linewidth(2.6)
    light = colour in ("#F0E442", "#E69F00", "#56B4E9")
    ax.text(
        0.0, 1.0, str(pose), transform=ax.transAxes, ha="left", va="top", fontsize=7.5, weight="bold",
        color="black" if light else "white",
        bbox={"boxstyle": "square,pad=0.16", "facecolor": colour, "edgecolor": "none"},
    )  # fmt: skip


def _input_of(
    layer: enn.EquivariantModule, network: Callable[..., object], x: enn.GeometricTensor
) -> enn.GeometricTensor:
    """What arrives at ``layer`` when ``network`` is called with ``x``."""
    arrived: list[enn.GeometricTensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: arrived.append(arguments[0]))
    try:
        network(x)
    finally:
        handle.remove()
    if not arrived:
        raise ValueError("network does not call layer: give the network in which the layer stands")
    return arrived[0]


def _turn(position: tuple[int, int], matrix: npt.NDArray[np.float64], height: int, width: int) -> tuple[int, int]:
    """Where the pixel (row, column) is after the grid was turned by ``matrix``, which acts on (x, y) with y upwards."""
    row, column = position
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(f"positions: ({row}, {column}) lies outside the grid of {height}×{width} positions")
    x, y = matrix @ np.array([column - (width - 1) / 2, (height - 1) / 2 - row])
    turned_height, turned_width = (width, height) if abs(matrix[0, 0]) < 0.5 else (height, width)
    return round((turned_height - 1) / 2 - y), round(x + (turned_width - 1) / 2)
