"""Feature maps of an input that is transformed: a figure and an animation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.angles import relative_change
from escnn_attention.equivariance.inspection import attention_layers, evaluating, find_layer, on_fields, watch
from escnn_attention.plotting._drawing import Frame, Table, draw_image, figure_class, map_style
from escnn_attention.plotting._elements import (
    MOST_COLUMNS,
    Transformation,
    as_drawn,
    check_image,
    check_index,
    is_regular_map,
    name_element,
    planar,
    refuse_exported,
    stacked,
    transformations_for,
)

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure


Stage: TypeAlias = Callable[[GeometricTensor], GeometricTensor]
Maps: TypeAlias = dict[str, Tensor]  # by stage, (fields, |H|, H, W)


def stage_runner(
    x: GeometricTensor | Tensor,
    stages: torch.nn.Module | Mapping[str, Stage],
    layers: Sequence[str] | None,
    *,
    one: bool = False,
) -> tuple[Callable[[GeometricTensor], Maps], GeometricTensor, list[str]]:
    """A function from images to feature maps by the names of stages, the image as fields, and these names.

    The stages are functions by name, or the modules ``layers`` of a model; by default its first attention and the last
    with regular fields, of which ``one`` takes the first that there is.
    """
    if isinstance(stages, torch.nn.Module):
        model = stages
        refuse_exported(model)
        call, x = on_fields(model, x)
        check_image(x)
        watched = _watched(call, x, model, layers, one)

        def run(image: GeometricTensor) -> Maps:
            with evaluating(model):
                found = watch(lambda: call(image), watched)
            for name in watched:
                if name not in found:
                    raise ValueError(f"layers: the {type(model).__name__} does not call {name!r}")
            return {name: _maps_of_poses(name, found[name]) for name in watched}

        return run, x, list(watched)
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages: got {type(stages).__name__}, needed a torch.nn.Module or a mapping from names")
    x = check_image(x)
    if layers is not None:
        raise ValueError("layers: these are modules of a model, and stages is a mapping that names what to show")
    functions = dict(stages)
    if not functions:
        raise ValueError("stages: got none, needed at least one, by name")
    for name, stage in functions.items():
        if not callable(stage):
            raise TypeError(f"stages: got {type(stage).__name__} for {name!r}, needed a function")

    def run_stages(image: GeometricTensor) -> Maps:
        with evaluating(*functions.values()):
            return {name: _maps_of_poses(name, stage(image)) for name, stage in functions.items()}

    return run_stages, x, list(functions)


def _watched(
    call: Callable[[GeometricTensor], object],
    x: GeometricTensor,
    model: torch.nn.Module,
    layers: Sequence[str] | None,
    one: bool,
) -> dict[str, torch.nn.Module]:
    """The modules to show, by name; the model itself goes by the name of its class."""
    if layers is not None:
        if not layers:
            raise ValueError("layers: got none, needed at least one name")
        return {name or type(model).__name__: find_layer(model, name) for name in layers}
    named = {name or type(model).__name__: module for name, module in model.named_modules()}
    with evaluating(model):
        found = watch(lambda: call(x), named)
    regular = [name for name, value in found.items() if is_regular_map(value)]
    if not regular:
        raise ValueError(f"model: no module of the {type(model).__name__} gives regular fields on a grid")
    attention = [name or type(model).__name__ for name in attention_layers(model)]
    first = next((name for name in attention if name in regular), None)
    # The model itself is its last module.
    last = next((name for name in reversed(regular) if named[name] is not model), regular[-1])
    chosen = [first or last] if one else [first or regular[0], last]
    return {name: named[name] for name in dict.fromkeys(chosen)}


def _maps_of_poses(name: str, features: object) -> Tensor:
    """Regular fields of the first sample as ``(fields, |H|, H, W)``."""
    if not is_regular_map(features):
        what = features.type if isinstance(features, GeometricTensor) else type(features).__name__
        raise ValueError(f"stage {name!r} must give regular fields, got {what}")
    assert isinstance(features, GeometricTensor)
    values = as_drawn(features.tensor[0])
    return values.reshape(-1, features.type.gspace.fibergroup.order(), *values.shape[1:])


def choose_field(name: str, values: Tensor, field: int | None) -> int:
    """The field that is asked for, or the one whose poses differ most, measured against its overall size."""
    if field is not None:
        return check_index(f"field of {name!r}", field, len(values))
    differences = (values - values.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2, 3))
    return int((differences / values.square().mean(dim=(1, 2, 3)).clamp_min(1e-12)).argmax())


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

    Columns are group elements, rows are poses of a regular field. Frames of one colour (and number) mark one map and
    its transformed copies: they change rows from column to column, which is the permutation of the poses.

    Args:
        x: one image, (1, C, S, S), scalar fields over a planar gspace with a finite group; or a plain tensor for a
            model that takes one. The mean over C is drawn.
        stages: a model, whose layers are shown; or functions by name from ``x`` to a tensor with regular fields, for
            example a module, or the first modules of a network.
        layers: of a model, the modules to show, by their names in it; by default its first attention layer and its last
            module that gives regular fields.
        elements: the columns; by default all elements (of more than 8: those that map the grid onto itself).
        fields: which field of a stage to draw, by the stage's name; by default the one whose poses differ most.
        title: above the figure.

    Raises:
        TypeError: ``stages`` is neither a model nor a mapping to functions, ``x`` not a tensor (of fields, for a
            mapping), or an element or a field is of another type.
        ValueError: ``x`` is not one planar image, there is nothing to show, an element is of another group, a stage
            gives something else than regular fields on a grid, there is no such stage, field or layer, or the model was
            exported, and has no group.

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
    if elements is None and table.order <= MOST_COLUMNS:
        elements = table.elements
    columns = transformations_for(x, elements, None, 0.0, most=table.order)
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields: got {type(fields).__name__}, needed a mapping from the names of stages")
    for name in fields:
        if name not in names:
            raise ValueError(f"fields: got {name!r}, needed names of stages: {', '.join(map(repr, names))}")
    images = [t.apply(x) for t in columns]
    by_image = [run(image) for image in images]
    maps = {name: [found[name] for found in by_image] for name in names}
    chosen = {name: choose_field(name, values[0], fields.get(name)) for name, values in maps.items()}

    poses = table.order
    few = poses <= 4
    note = f"frames of one colour and number: the same map, transformed ({x.type.gspace.fibergroup.name})"
    gaps = [0.0, *len(maps) * [0.28, *[0.0] * (poses - 1)]]
    sheet = Table(0.95 if few else 0.62, len(columns) * [0.0], gaps, title, note, left=1.75, below=0.3)
    sheet.name(0, "input", 10)
    for column, (image, t) in enumerate(zip(images, columns, strict=True)):
        ax = sheet.cell(0, column)
        draw_image(ax, as_drawn(image.tensor[0]).mean(0).numpy())
        ax.set_title(t.name, fontsize=10 if few else 8, pad=3)
    for first, (name, values) in zip(range(1, len(gaps), poses), maps.items(), strict=True):
        _draw_stage(sheet, first, f"{name}\n(field {chosen[name]})", [v[chosen[name]].numpy() for v in values], columns)
    return sheet.figure


def _draw_stage(
    sheet: Table,
    first: int,
    name: str,
    maps: Sequence[npt.NDArray[np.float32]],
    columns: Sequence[Transformation],
) -> None:
    """Draw the maps ``(poses, h, w)`` of each column, from the ``first`` row on."""
    table, style = columns[0].table, map_style(maps)
    height = sheet.size * table.order
    size = min(10.0, 120 * height / max(1, name.index("\n")))  # at which the name fits
    sheet.text(sheet.x[0] - 1.2, sheet.y[first] + height / 2, name, rotation=90, ha="center", fontsize=size)
    for pose in range(table.order):
        sheet.name(first + pose, f"pose {name_element(table.action[pose])}")
        for column, t in enumerate(columns):
            ax = sheet.cell(first + pose, column)
            ax.imshow(maps[column][pose], **style)
            Frame(ax, t.source(pose), table.order)


def animate_feature_maps(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layer: str | None = None,
    *,
    angles: Sequence[float] | npt.NDArray[np.floating] | None = None,
    field: int | None = None,
    background: float = 0.0,
    interval: int = 100,
    title: str = "The input rotates: feature maps rotate, poses cycle",
) -> FuncAnimation:
    r"""An input that rotates through all angles, above its feature maps pose by pose: GSA-Nets' Fig. 1, moving.

    The upper row of maps is the output of the layer: maps rotate with the input, and at every element of the group each
    has taken the place of another. A frame has the colour and number of the map that was there at 0°, by the nearest
    element. The lower row shows the maps rotated back and put back to their poses. With exact equivariance it does not
    change at the elements of the group; the number below it is the relative change since 0° within a disc that every
    rotation keeps on the grid. (:func:`plot_equivariance_error` measures this without interpolating the input.)

    Args:
        x, model: as in :func:`plot_feature_maps`; the image is square. It is rotated by cubic interpolation,
            without leaving the range of its values, and by multiples of 90° exactly.
        layer: the module whose regular fields are shown, by its name in the model; by default the first attention
            layer, or, where there is none, the last module that gives regular fields.
        angles: degrees, one for each image of the animation; by default 48 for one full rotation.
        field: the regular field; by default the one whose poses differ most.
        background: the value around the image.
        interval: between images, in milliseconds.
        title: above the figure.

    Returns:
        The animation. ``animation.save("rotating.gif", writer="pillow", dpi=80)`` writes a GIF, and
        ``animation.to_jshtml()`` is for notebooks. Keep a reference to it until then.

    Raises:
        TypeError, ValueError: as :func:`plot_feature_maps`; the image is not square, or there are no angles.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn_attention.plotting import animate_feature_maps
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = HybridNet(g, 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> animation = animate_feature_maps(torch.randn(1, 1, 12, 12), network, angles=[0, 45, 90])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     animation.save(f"{folder}/rotating.gif", writer="pillow", dpi=40)
    """
    figure_class()
    from matplotlib.animation import FuncAnimation
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    run, x, (name,) = stage_runner(x, model, None if layer is None else [layer], one=True)
    columns = transformations_for(x, None, np.arange(0, 360, 7.5) if angles is None else angles, background)
    frames = _compute(run, x, name, columns, field)
    note = f"{name}, field {frames.field}; frames of one colour and number: the same map"
    note += f" ({x.type.gspace.fibergroup.name})"
    figure, show = _draw_animation(frames, title, note)
    FigureCanvasAgg(figure)
    show(0)
    return FuncAnimation(figure, show, frames=len(columns), interval=interval, init_func=lambda: [], repeat=True)


@dataclass(frozen=True)
class _Frames:
    """The content of the images of an animation, one for each rotation."""

    rotations: Sequence[Transformation]
    field: int
    images: list[npt.NDArray[np.float32]]  # (S, S), the rotated inputs
    maps: list[npt.NDArray[np.float32]]  # (poses, h, w), of the field
    returned: list[npt.NDArray[np.float64]]  # these rotated back and put back to their poses
    change: list[float]  # relative, of the returned maps


def _compute(
    run: Callable[[GeometricTensor], Maps],
    x: GeometricTensor,
    name: str,
    rotations: Sequence[Transformation],
    field: int | None,
) -> _Frames:
    """The maps of a stage for ``x`` in all rotations."""
    upright = run(x)[name]
    field = choose_field(name, upright, field)
    reference = upright[field].double()
    found = _Frames(rotations, field, [], [], [], [])
    for rotation in rotations:
        image = rotation.apply(x)
        maps = run(image)[name][field]
        if maps.shape[-1] != maps.shape[-2]:
            raise ValueError(f"layer: {name!r} gives maps of shape {tuple(maps.shape[1:])}, needed square ones")
        returned = rotation.undo(maps.double(), x.type)
        found.images.append(as_drawn(image.tensor[0]).mean(0).numpy())
        found.maps.append(maps.numpy())
        found.returned.append(returned.numpy())
        found.change.append(relative_change(returned[None], reference[None]))
    return found


def _draw_animation(frames: _Frames, title: str, note: str) -> tuple[Figure, Callable[[int], Sequence[Artist]]]:
    """The figure, and a function that shows one of the images of the animation."""
    images, table = frames.images, frames.rotations[0].table
    poses = table.order
    cell = 1.15 if poses <= 4 else 0.8 if poses <= 8 else 0.55
    big = 2 * cell + 0.3
    sheet = Table(cell, poses * [0.0], [0.0, 0.3], title, note, left=1.15 + big, right=0.2, above=0.2, below=0.5)
    ax = sheet.panel(0.15, sheet.y[0], big)
    shade: dict[str, Any] = {"vmin": min(float(i.min()) for i in images), "vmax": max(float(i.max()) for i in images)}
    picture = ax.imshow(images[0], cmap="gray_r", interpolation="nearest", **shade)
    heading = ax.set_title("", fontsize=10, pad=5)
    style = map_style([*frames.maps, *frames.returned])
    rows = []
    stages: list[tuple[str, Sequence[npt.NDArray[Any]]]] = [("maps", frames.maps), ("rotated\nback", frames.returned)]
    for row, (label, values) in enumerate(stages):
        sheet.name(row, label, 9)
        panels = [sheet.cell(row, pose) for pose in range(poses)]
        drawn = [panel.imshow(values[0][p], **style) for p, panel in enumerate(panels)]
        rows.append((panels, drawn, values))
    for pose, panel in enumerate(rows[0][0]):
        panel.set_title(f"pose {stacked(table.action[pose])}", fontsize=8.5 if poses <= 4 else 7, pad=4)
    upper, _ = ([Frame(panel, pose, poses) for pose, panel in enumerate(panels)] for panels, _, _ in rows)
    said = sheet.text(sheet.x[0] + cell * poses / 2, sheet.y[-1] + cell + 0.22, "", ha="center", fontsize=9)

    def show(step: int) -> Sequence[Artist]:
        picture.set_data(images[step])
        heading.set_text(f"input, rotated by {frames.rotations[step].name}")
        for _, drawn, values in rows:
            for pose, artist in enumerate(drawn):
                artist.set_data(values[step][pose])
        for pose, frame in enumerate(upper):
            frame.show(frames.rotations[step].source(pose))
        said.set_text(f"relative change of the maps that were rotated back: {frames.change[step]:.2f}")
        return []

    return sheet.figure, show
