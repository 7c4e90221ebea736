"""Feature maps of an input that rotates, as an animation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.angles import check_angles, relative_change
from escnn_attention.groups.fibers import Fibers
from escnn_attention.plotting._arguments import planar
from escnn_attention.plotting._fields import as_drawn
from escnn_attention.plotting._names import stacked
from escnn_attention.plotting._sheet import Frame, Sheet, figure_class, map_style
from escnn_attention.plotting._stages import Maps, choose_field, stage_runner
from escnn_attention.plotting._transformations import Transformation, nearest_rotation

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = ["animate_feature_maps"]


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

    The upper row of maps is what the layer gives: maps rotate with the input, and whenever the angle passes an element
    of the group each has taken the place of another. A frame has the colour and number of the map that stood there at
    0°, by the element next to the angle. In the lower row this is undone: maps are rotated back, and put back to the
    poses in which they were. Exact equivariance is a lower row that stands still at the elements of the group; how much
    it moves between them is the number below it, the relative change since 0° within a disc that every rotation leaves
    on the grid. (:func:`plot_equivariance_error` measures this without interpolating the input.)

    Args:
        x: one square image, (1, C, S, S), scalar fields or a plain tensor. It is rotated by cubic interpolation,
            without leaving the range of its values, and by multiples of 90° exactly.
        model: a layer, or any module; called in evaluation mode.
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
        ImportError: matplotlib is missing.
        TypeError: ``model`` is not a module, ``x`` no tensor, or ``field`` not an integer.
        ValueError: ``x`` is not one square image of scalar fields over the plane, no angles, or the layer does not
            exist, does not give regular fields, or does not have the field; or the model was exported.

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
    table = planar(x.type.gspace)
    if x.tensor.shape[-1] != x.tensor.shape[-2] or not all(r.is_trivial() for r in x.type.representations):
        raise ValueError(f"x: got {x.type} of shape {tuple(x.tensor.shape)}, needed a square image of scalar fields")
    chosen = np.arange(0, 360, 7.5) if angles is None else check_angles(angles)

    frames = _compute(run, x, name, chosen, field, background)
    note = f"{name}, field {frames.field}; frames of one colour and number: the same map"
    note += f" ({x.type.gspace.fibergroup.name})"
    figure, show = _draw(frames, table, title, note)
    FigureCanvasAgg(figure)
    show(0)
    return FuncAnimation(figure, show, frames=len(chosen), interval=interval, init_func=lambda: [], repeat=True)


@dataclass(frozen=True)
class _Frames:
    """What the images of an animation show.

    Attributes:
        angles: in degrees.
        field: the field that is shown.
        images: the rotated inputs ``(S, S)``.
        maps: of these, ``(poses, h, w)``.
        returned: the maps, rotated back and put back to their poses.
        nearest: the indices of the rotations in the group next to the angles.
        change: the relative changes of what was rotated back.
    """

    angles: npt.NDArray[np.float64]
    field: int
    images: list[npt.NDArray[np.float32]]
    maps: list[npt.NDArray[np.float32]]
    returned: list[npt.NDArray[np.float64]]
    nearest: list[int]
    change: list[float]


def _compute(
    run: Callable[[GeometricTensor], Maps],
    x: GeometricTensor,
    name: str,
    angles: npt.NDArray[np.float64],
    field: int | None,
    background: float,
) -> _Frames:
    """Rotate ``x`` by all angles, and look at a stage."""
    table = planar(x.type.gspace)
    upright = run(x)[name]
    field = choose_field(name, upright, field)
    reference = upright[field].double()
    found = _Frames(angles, field, [], [], [], [], [])
    for angle in map(float, angles):
        element = nearest_rotation(table, angle)
        transformation = Transformation(f"{angle:g}°", table, element, angle, background)
        image = transformation.apply(x)
        maps = run(image)[name][field]
        if maps.shape[-1] != maps.shape[-2]:
            raise ValueError(f"layer: {name!r} gives maps of shape {tuple(maps.shape[1:])}, needed square ones")
        returned = transformation.undo(maps.double(), x.type)
        found.images.append(as_drawn(image.tensor[0]).mean(0).numpy())
        found.maps.append(maps.numpy())
        found.returned.append(returned.numpy())
        found.nearest.append(element)
        found.change.append(relative_change(returned[None], reference[None]))
    return found


def _draw(frames: _Frames, table: Fibers, title: str, note: str) -> tuple[Figure, Callable[[int], Sequence[Artist]]]:
    """The figure, and a function that shows one of the images of the animation."""
    images, poses = frames.images, table.order
    cell = 1.15 if poses <= 4 else 0.8 if poses <= 8 else 0.55
    big = 2 * cell + 0.3
    left, gap, bottom = 0.15, 1.0, 0.5
    start, top = left + big + gap, Sheet.TOP + 0.2
    sheet = Sheet(start + cell * poses + 0.2, top + big + bottom, title, note)
    ax = sheet.panel(left, top, big)
    shade: dict[str, Any] = {"vmin": min(float(i.min()) for i in images), "vmax": max(float(i.max()) for i in images)}
    picture = ax.imshow(images[0], cmap="gray_r", interpolation="nearest", **shade)
    heading = ax.set_title("", fontsize=10, pad=5)
    style = map_style([*frames.maps, *frames.returned])
    rows = []
    for y, label, values in ((top, "maps", frames.maps), (top + cell + 0.3, "rotated\nback", frames.returned)):
        sheet.text(start - 0.12, y + cell / 2, label, ha="right", fontsize=9)
        panels = [sheet.cell(start + p * cell, y, cell) for p in range(poses)]
        drawn = [panel.imshow(values[0][p], **style) for p, panel in enumerate(panels)]
        rows.append((panels, drawn, values))
    for pose, panel in enumerate(rows[0][0]):
        panel.set_title(f"pose {stacked(table.action[pose])}", fontsize=8.5 if poses <= 4 else 7, pad=4)
    upper, _ = ([Frame(panel, pose, poses) for pose, panel in enumerate(panels)] for panels, _, _ in rows)
    said = sheet.text(start + cell * poses / 2, top + big + 0.22, "", ha="center", fontsize=9)

    def show(step: int) -> Sequence[Artist]:
        picture.set_data(images[step])
        heading.set_text(f"input, rotated by {frames.angles[step]:g}°")
        for _, drawn, values in rows:
            for pose, artist in enumerate(drawn):
                artist.set_data(values[step][pose])
        for pose, frame in enumerate(upper):
            frame.show(int(table.quotient[frames.nearest[step], pose]))
        said.set_text(f"relative change of the maps that were rotated back: {frames.change[step]:.2f}")
        return []

    return sheet.figure, show
