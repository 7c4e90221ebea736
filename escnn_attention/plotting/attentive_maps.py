"""Maps of attentive convolutions: pose by pose, layer by layer, and image by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    Sheet,
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
    for column, (t, image, one) in enumerate(zip(columns, seen.images, seen.maps, strict=True)):
        sources = [t.source(pose) for pose in range(poses)] if poses > 1 else [0]
        place = (left + column * cell, top, cell)
        _draw_column(sheet, place, t.name, image, one, one.passed, one.channel, sources, scale, channel_scale)
    _name_rows(sheet, (left - 0.1, top, cell), columns[0], poses, upright.channel is not None)
    if back:
        sheet.text(second + block / 2, Sheet.TOP - 0.1, "its maps are transformed back", ha="center", fontsize=9.5)
        sheet.text(second - 0.08, bottom, "change:", ha="right", fontsize=7.5)
        for column, (t, one, maps) in enumerate(zip(columns, seen.maps, seen.returned, strict=True)):
            channel = None if one.channel is None else one.channel[:, t.images_of_poses(poses)]
            place = (second + column * cell, top, cell)
            _draw_column(sheet, place, t.name, seen.image, one, maps, channel, range(poses), scale, channel_scale)
            below = as_change(seen.changes[column])
            sheet.text(second + (column + 0.5) * cell, bottom, below, ha="center", fontsize=7.5)
    draw_bar(sheet, width + 0.08, top + cell + 0.15, 0.9 * cell, scale)
    return sheet.figure


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
    sheet: Sheet,
    place: tuple[float, float, float],
    heading: str,
    image: npt.NDArray[np.float32],
    found: Attended,
    maps: Tensor,
    channel: Tensor | None,
    numbers: Sequence[int],
    scale: tuple[float, float],
    channel_scale: tuple[float, float],
) -> None:
    """Draw an image and over it the maps, in frames of ``numbers``, from ``place`` (x, y, side of a cell) downwards."""
    x, y, cell = place
    ax = sheet.cell(x, y, cell)
    draw_image(ax, image)
    ax.set_title(heading, fontsize=9 if cell > 0.8 else 7.5, pad=4)
    y += cell + 0.1
    for number, values in zip(numbers, maps, strict=True):
        ax = sheet.cell(x, y, cell)
        draw_over(ax, image, values, scale, found.covered)
        if len(maps) > 1:
            Frame(ax, number, len(maps))
        y += cell
    if channel is not None:
        _draw_channels(sheet.cell(x, y + 0.1, cell), channel.numpy(), numbers, channel_scale)


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
    left, right = 1.5, 1.1
    end = left + cell * len(columns)
    total = Sheet.TOP + cell * (1 + len(chosen)) + 0.05
    group = columns[0].table.elements[0].group.name
    note = f"arrows: the strength of each pose ({group}); maps and arrows follow the image"
    sheet = Sheet(end + right, total, title, note)
    y = Sheet.TOP - _ROOM * cell
    images = next(iter(seen.values())).images
    for column, (transformation, image) in enumerate(zip(columns, images, strict=True)):
        ax = sheet.cell(left + column * cell, y, cell, _ROOM)
        draw_image(ax, image)
        ax.set_title(transformation.name, fontsize=10 if cell > 1.2 else 8, pad=4)
    sheet.text(left - 0.08, y + cell / 2, "input", ha="right", fontsize=10)
    sheet.text(end + 0.75, y + cell / 2, "change,\nmoved\nback", ha="center", fontsize=8)
    labels = _shortened(list(chosen))
    for name, layer in chosen.items():
        y += cell
        label = labels[name] or type(layer).__name__
        sheet.text(left - 0.08, y + cell / 2, label, ha="right", fontsize=min(10.0, 130 / len(label)))
        scale = _draw_row(sheet, (left, y, cell), seen[name], columns)
        draw_bar(sheet, end + 0.02, y + _ROOM * cell, cell * (1 - 2 * _ROOM), scale)
        sheet.text(end + 0.75, y + cell / 2, as_change(max(seen[name].changes)), ha="center", fontsize=8)
    return sheet.figure


def _draw_row(
    sheet: Sheet, place: tuple[float, float, float], seen: _Seen, columns: Sequence[Transformation]
) -> tuple[float, float]:
    """Draw what one layer lets through of each image, from ``place`` (x, y, side of a cell) on; the scale of it."""
    x, y, cell = place
    means = [one.passed.mean(0) for one in seen.maps]
    scale = extents(means)
    strongest = max(float(one.strength.max()) for one in seen.maps) or 1.0
    for column, (t, image, one, mean) in enumerate(zip(columns, seen.images, seen.maps, means, strict=True)):
        ax = sheet.cell(x + column * cell, y, cell, _ROOM)
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
    cell, left, gap, between = 0.8, 0.15, 0.35, 0.14
    block = cell * len(columns)
    top = Sheet.TOP + 0.25
    width = left + block + (gap + block + 0.75 if back else 0) + 0.5
    sheet = Sheet(width, top + (2 * cell + between) * len(rows) + 0.1, title, note)
    blocks = [
        (left, "the image is transformed"),
        *([(left + block + gap, "its map is transformed back")] if back else []),
    ]
    for start, heading in blocks:
        sheet.text(start + block / 2, Sheet.TOP - 0.1, heading, ha="center", fontsize=9.5)
    end = blocks[-1][0] + block
    draw_bar(sheet, end + 0.06, top + cell + 0.04 * cell, 0.92 * cell, scale)
    if back:
        sheet.text(end + 0.78, top - 0.1, "change", ha="center", fontsize=8)
    y = top
    for row in rows:
        for k, (start, _) in enumerate(blocks):
            for column, transformation in enumerate(columns):
                x = start + column * cell
                image = row.image if k else row.images[column]
                ax = sheet.cell(x, y, cell, 0.04)
                draw_image(ax, image)
                if y == top:
                    ax.set_title(transformation.name, fontsize=8, pad=3)
                values = (row.returned[column] if k else row.maps[column].passed).mean(0)
                draw_over(sheet.cell(x, y + cell, cell, 0.04), image, values, scale, row.upright.covered)
        if back:
            sheet.text(end + 0.78, y + cell, as_change(max(row.changes)), ha="center", fontsize=8)
        y += 2 * cell + between
    return sheet.figure
