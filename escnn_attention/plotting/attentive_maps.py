"""Maps of attentive convolutions: pose by pose, layer by layer, and image by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.plotting._attended import Attended, AttentiveLayer, find_attentive, observe
from escnn_attention.plotting._drawing import (
    Frame,
    Table,
    as_change,
    draw_bar,
    draw_image,
    draw_over,
    extents,
    figure_class,
    pose_colour,
    shaded,
    shades,
)
from escnn_attention.plotting._elements import (
    MOST_COLUMNS,
    Transformation,
    largest_change,
    stacked,
    transformations_for,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        model: an attentive layer, or any module that contains some; called in evaluation mode.
        layer, title: as in :func:`plot_attention_maps`.
        elements: the elements that transform the image; by default those that map the grid onto itself, at most eight.
        angles: degrees to rotate it by in place of elements. Poses are then told apart by the nearest
            rotation of the group.
        field: one field of the layer's output in place of the mean over all of them.
        back: whether to draw the part at the right.
        background: the value around the image.

    Returns:
        The figure. Where margins or coarser grids are on the way to the layer, its maps lie on the part of the image
        that they are of; their grid is taken to be about the centre, as it is in exact networks.

    Raises:
        TypeError, ValueError: as :func:`plot_attention_maps`; there is no such field, or both elements and angles are
            given, or angles for what is not square and scalar.

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
    chosen = dict(list(find_attentive(model, layer, "layer").items())[:1])
    ((name, module),) = chosen.items()
    columns, found = _see(x, model, chosen, elements, angles, background, field=field)
    seen, upright = found[name], found[name].upright
    scale = extents([upright.passed, *(one.passed for one in seen.maps)])
    channel_scale = extents([f.channel for f in [upright, *seen.maps] if f.channel is not None] or [torch.zeros(1)])

    poses, channels = len(upright.passed), upright.channel is not None
    cell = 1.0 if max(poses, len(columns)) <= 4 else 0.66
    what = f"field {field}" if field is not None else "mean over the fields"
    note = f"{name.removeprefix('stages.') or type(module).__name__}, {what}; frames of one colour and number: one map"
    rows = [0.0, 0.1, *(poses - 1) * [0.0], *channels * [0.1]]
    space: dict[str, float] = {"left": 0.95, "right": 0.6, "above": 0.25, "below": 0.45}
    sheet = Table(cell, _there_and_back(len(columns), back), rows, title, note, **space)
    _head(sheet, len(columns), "the image is transformed", "its maps are transformed back")
    names = [f"pose {stacked(matrix)}" for matrix in columns[0].table.action] if poses > 1 else ["all poses"]
    for row, label in enumerate([*names, *channels * ["channels"]], start=1):
        sheet.name(row, label)
    column, bottom = 0, sheet.y[-1] + cell + 0.15
    for t, image, one in zip(columns, seen.images, seen.maps, strict=True):
        sources = [t.source(pose) for pose in range(poses)] if poses > 1 else [0]
        _draw_column(sheet, column, t.name, image, one, sources, scale, channel_scale)
        column += 1
    if back:
        sheet.text(sheet.x[column] - 0.08, bottom, "change:", ha="right", fontsize=7.5)
        for t, one, maps, change in zip(columns, seen.maps, seen.returned, seen.changes, strict=True):
            channel = None if one.channel is None else one.channel[:, t.images_of_poses(poses)]
            returned = replace(one, passed=maps, channel=channel)
            _draw_column(sheet, column, t.name, seen.image, returned, range(poses), scale, channel_scale)
            sheet.text(sheet.x[column] + cell / 2, bottom, as_change(change), ha="center", fontsize=7.5)
            column += 1
    draw_bar(sheet, sheet.x[-1] + cell + 0.08, sheet.y[1] + 0.05, 0.9 * cell, scale)
    return sheet.figure


def _there_and_back(number: int, back: bool) -> list[float]:
    """The gaps in front of the columns of transformed images, and of their maps transformed back."""
    return [*number * [0.0], *([0.5, *(number - 1) * [0.0]] if back else [])]


def _head(sheet: Table, number: int, *headings: str) -> None:
    """Write one heading above the first ``number`` columns, and another above the next."""
    for first, heading in zip(range(0, len(sheet.x), number), headings, strict=False):
        sheet.text(sheet.x[first] + number * sheet.size / 2, sheet.TOP - 0.1, heading, ha="center", fontsize=9.5)


@dataclass(frozen=True)
class _Seen:
    """The maps of one layer for an image as it is and as it is transformed."""

    image: npt.NDArray[np.float32]  # as it is drawn
    images: list[npt.NDArray[np.float32]]  # transformed, likewise
    upright: Attended  # of the image as it is
    maps: list[Attended]  # of the transformed images
    returned: list[Tensor]  # these transformed back, (poses, h, w)
    changes: list[float]  # the largest differences of these from the upright ones


def _see(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layers: Mapping[str, AttentiveLayer],
    elements: Sequence[GroupElement] | None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None,
    background: float,
    field: int | None = None,
    most: int = MOST_COLUMNS,
) -> tuple[Sequence[Transformation], dict[str, _Seen]]:
    """The transformations of an image, at ``most`` so many by default, and what each layer lets through of it."""
    x, run = observe(x, model, layers, field)
    columns = transformations_for(x, elements, angles, background, most=most)
    images = [t.apply(x) for t in columns]
    upright, by_image = run(x), [run(image) for image in images]
    found = {}
    for name in layers:
        maps = [one[name] for one in by_image]
        returned = [t.undo(one.passed, x.type) for t, one in zip(columns, maps, strict=True)]
        changes = [largest_change(r, upright[name].passed, t) for r, t in zip(returned, columns, strict=True)]
        found[name] = _Seen(shades(x), [shades(image) for image in images], upright[name], maps, returned, changes)
    return columns, found


def _draw_column(
    sheet: Table,
    column: int,
    heading: str,
    image: npt.NDArray[np.float32],
    found: Attended,
    numbers: Sequence[int],
    scale: tuple[float, float],
    channel_scale: tuple[float, float],
) -> None:
    """Draw an image, and over it the maps, in frames of ``numbers``."""
    ax = sheet.cell(0, column)
    draw_image(ax, image)
    ax.set_title(heading, fontsize=9 if sheet.size > 0.8 else 7.5, pad=4)
    for row, (number, values) in enumerate(zip(numbers, found.passed, strict=True), start=1):
        ax = sheet.cell(row, column)
        draw_over(ax, image, values, scale, found.covered)
        if len(numbers) > 1:
            Frame(ax, number, len(numbers))
    if found.channel is not None:
        _draw_channels(sheet.cell(-1, column), found.channel.numpy(), numbers, channel_scale)


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
        layers: the layers, each by its name in the model, itself, or a block that contains it; by default all.
        x, model, elements, angles, background, title: as in :func:`plot_attentive_maps`.

    Raises:
        TypeError, ValueError: as :func:`plot_attentive_maps`.

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
    columns, seen = _see(x, model, chosen, elements, angles, background)

    cell = 1.35 if len(columns) <= 4 else 1.0
    room = _ROOM * cell
    group = columns[0].table.elements[0].group.name
    note = f"arrows: the strength of each pose ({group}); maps and arrows follow the image"
    space: dict[str, float] = {"left": 1.5, "right": 1.1, "above": -room, "below": room + 0.05}
    sheet = Table(cell, len(columns) * [0.0], (1 + len(chosen)) * [0.0], title, note, **space)
    end = sheet.x[-1] + cell
    for column, (t, image) in enumerate(zip(columns, next(iter(seen.values())).images, strict=True)):
        ax = sheet.cell(0, column, _ROOM)
        draw_image(ax, image)
        ax.set_title(t.name, fontsize=10 if cell > 1.2 else 8, pad=4)
    sheet.name(0, "input", 10)
    sheet.text(end + 0.75, sheet.y[0] + cell / 2, "change,\nmoved\nback", ha="center", fontsize=8)
    labels = _shortened(list(chosen))
    for row, (name, layer) in enumerate(chosen.items(), start=1):
        label = labels[name] or type(layer).__name__
        sheet.name(row, label, min(10.0, 130 / len(label)))
        scale = _draw_row(sheet, row, seen[name], columns)
        draw_bar(sheet, end + 0.02, sheet.y[row] + room, cell - 2 * room, scale)
        change = as_change(max(seen[name].changes))
        sheet.text(end + 0.75, sheet.y[row] + cell / 2, change, ha="center", fontsize=8)
    return sheet.figure


def _draw_row(sheet: Table, row: int, seen: _Seen, columns: Sequence[Transformation]) -> tuple[float, float]:
    """Draw what one layer lets through of each image; the scale of it."""
    means = [one.passed.mean(0) for one in seen.maps]
    scale = extents(means)
    strongest = max(float(one.strength.max()) for one in seen.maps) or 1.0
    for column, (t, image, one, mean) in enumerate(zip(columns, seen.images, seen.maps, means, strict=True)):
        ax = sheet.cell(row, column, _ROOM)
        draw_over(ax, image, mean, scale, one.covered)
        if len(one.strength) > 1:
            _draw_arrows(ax, one.strength.numpy() / strongest, t)
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


def plot_attended_images(
    images: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layer: str | torch.nn.Module | None = None,
    *,
    elements: Sequence[GroupElement] | None = None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
    back: bool = True,
    background: float = 0.0,
    title: str = "What attention lets through, image by image",
) -> Figure:
    r"""The equivariant attention maps of one layer for several images, each transformed.

    Two rows belong to an image: the transformed image, and over it what the layer lets through, as in
    :func:`plot_attentive_maps`, in the mean over the poses. The mean knows no poses, so that an equivariant network
    gives one map for an image, which is transformed with it. At the right are the maps transformed back, and the
    largest difference that they have from those of the image as it is, over all poses: zero but for rounding where the
    network is exact, and not where it is so approximately only, as with strides that do not fit the size of a grid
    (Appendix C).

    Args:
        images: (B, C, S, S), over a planar gspace with a finite group: fields, or a plain tensor for models that take
            one. Three scalar fields are drawn as colours.
        elements: the elements that transform the images; by default those that map the grid onto itself, at most four.
        model, layer, angles, back, background, title: as in :func:`plot_attentive_maps`.

    Raises:
        TypeError, ValueError: as :func:`plot_attentive_maps`; there are no images.

    Example:
        >>> import torch
        >>> from escnn_attention import FeatureAttention
        >>> from escnn_attention.plotting import plot_attended_images
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> attention = FeatureAttention(nn.FieldType(g, 3 * [g.trivial_repr]), ratio=1)
        >>> figure = plot_attended_images(torch.randn(2, 3, 12, 12), attention)
        >>> len(figure.axes)  # for each image, there and back, four colour images and four maps
        33

    Source: Romero et al., "Attentive Group Equivariant Convolutional Networks", ICML 2020, Figures 8, 10 and 11.
    """
    figure_class()
    if not isinstance(images, (Tensor, GeometricTensor)):
        raise TypeError(f"images: got {type(images).__name__}, needed a GeometricTensor or a torch.Tensor")
    if not images.shape or not images.shape[0]:
        raise ValueError(f"images: got shape {tuple(images.shape)}, needed at least one image (B, C, S, S)")
    chosen = dict(list(find_attentive(model, layer, "layer").items())[:1])
    ((name, module),) = chosen.items()
    rows = []
    for i in range(images.shape[0]):
        columns, found = _see(images[i : i + 1], model, chosen, elements, angles, background, most=4)
        rows.append(found[name])
    what = name.removeprefix("stages.") or type(module).__name__
    return _draw_images(rows, columns, back, title, f"{what}, mean over fields and poses")


def _draw_images(rows: Sequence[_Seen], columns: Sequence[Transformation], back: bool, title: str, note: str) -> Figure:
    """The figure of all rows."""
    scale = extents([one.passed.mean(0) for row in rows for one in row.maps])
    cell, number = 0.8, len(columns)
    space: dict[str, float] = {"left": 0.15, "right": 1.25 if back else 0.5, "above": 0.25, "below": 0.24}
    gaps = [0.0, 0.0, *(len(rows) - 1) * [0.14, 0.0]]
    sheet = Table(cell, _there_and_back(number, back), gaps, title, note, **space)
    _head(sheet, number, "the image is transformed", "its map is transformed back")
    end = sheet.x[-1] + cell
    draw_bar(sheet, end + 0.06, sheet.y[1] + 0.04 * cell, 0.92 * cell, scale)
    if back:
        sheet.text(end + 0.78, sheet.y[0] - 0.1, "change", ha="center", fontsize=8)
    for first, row in zip(range(0, len(gaps), 2), rows, strict=True):
        maps = [*(one.passed for one in row.maps), *row.returned]
        images = [*row.images, *number * [row.image]]
        for column in range(len(sheet.x)):
            ax = sheet.cell(first, column, 0.04)
            draw_image(ax, images[column])
            if not first:
                ax.set_title(columns[column % number].name, fontsize=8, pad=3)
            ax = sheet.cell(first + 1, column, 0.04)
            draw_over(ax, images[column], maps[column].mean(0), scale, row.upright.covered)
        if back:
            sheet.text(end + 0.78, sheet.y[first + 1], as_change(max(row.changes)), ha="center", fontsize=8)
    return sheet.figure
