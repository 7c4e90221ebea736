"""What attentive layers let through, turn by turn: what their pictures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.angles import DISC, check_angles, turn_images, turning
from escnn_attention.equivariance.inspection import evaluating, find_layer, on_fields, watch
from escnn_attention.groups.fibers import Fibers, is_signed_permutation
from escnn_attention.nn import AttentiveConv, FeatureAttention, HalvingPool, PoseAttention
from escnn_attention.plotting._drawing import (
    MOST_COLUMNS,
    Sheet,
    as_drawn,
    check_image,
    check_index,
    element_indices,
    grid_elements,
    planar,
    stacked,
    transformed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ATTENTION = (0.835, 0.369, 0.0)
STRONGEST = 0.9  # opacity

AttentiveLayer: TypeAlias = AttentiveConv | FeatureAttention | PoseAttention


def attentive_layers(model: torch.nn.Module) -> dict[str, AttentiveLayer]:
    """The layers of a model that multiply features or responses by maps, by their names in it."""
    return {name: module for name, module in model.named_modules() if _attends(module)}  # type: ignore[misc]


def _attends(module: torch.nn.Module) -> bool:
    if isinstance(module, AttentiveConv):
        return module.plain.squeeze is not None or module.plain.spatial is not None
    return isinstance(module, (FeatureAttention, PoseAttention))


def find_attentive(
    model: torch.nn.Module, layers: str | torch.nn.Module | Sequence[str | torch.nn.Module] | None
) -> dict[str, AttentiveLayer]:
    """Chosen attentive layers of a model by name, all by default.

    Args:
        model: a layer itself, or any module that contains some.
        layers: names, the layers themselves, or blocks, of which the first such layer is meant.

    Raises:
        TypeError: ``model`` is not a module, or a layer neither a module nor a name.
        ValueError: there is no such layer in ``model``, or none at all.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, needed a torch.nn.Module")
    there = attentive_layers(model)
    if not there:
        raise ValueError(
            f"model: the {type(model).__name__} has no attentive layer (AttentiveConv with attention, FeatureAttention "
            "or PoseAttention)"
        )
    if layers is None:
        return there
    wanted = [layers] if isinstance(layers, (str, torch.nn.Module)) or not isinstance(layers, Sequence) else layers
    if not wanted:
        raise ValueError("layers: got none, needed at least one")
    found = {}
    for layer in wanted:
        inside = attentive_layers(find_layer(model, layer))
        if not inside:
            got = repr(layer) if isinstance(layer, str) else f"a {type(layer).__name__}"
            raise ValueError(f"layer: got {got}, needed an attentive layer: {', '.join(map(repr, list(there)[:12]))}")
        first = next(iter(inside.values()))
        found[next(name for name, module in there.items() if module is first)] = first
    return found


# ------------------------------------------------------------------------------------------------------------- turns


@dataclass(frozen=True)
class Turn:
    """A way to turn the image, and what it does to poses.

    Attributes:
        name: for people.
        table: of the group.
        element: the index of the element that it is, or of the one next to the angle.
        angle: in degrees, where it is any; None for an element of the group.
        background: the value around the image.
    """

    name: str
    table: Fibers
    element: int
    angle: float | None
    background: float

    @property
    def exact(self) -> bool:
        """Whether it maps the grid onto itself."""
        if self.angle is not None:
            return self.angle % 90 == 0
        return bool(is_signed_permutation(self.table.action[self.element]))

    def image(self, x: GeometricTensor) -> GeometricTensor:
        """The image, turned."""
        if self.angle is not None:
            lowest, highest = min(float(x.tensor.min()), self.background), max(float(x.tensor.max()), self.background)
            turned = turn_images(x.tensor, self.angle, background=self.background)
            return GeometricTensor(turned.clamp(lowest, highest), x.type)
        element = self.table.elements[self.element]
        if self.exact:
            return transformed(x, element)
        # escnn puts zeros around an image.
        turned = transformed(GeometricTensor(x.tensor - self.background, x.type), element).tensor
        return GeometricTensor(turned + self.background, x.type)

    def back(self, maps: Tensor, like: FieldType) -> Tensor:
        """Maps ``(poses, h, w)`` turned back, and put back to the poses in which they were."""
        if self.angle is not None:
            returned = turn_images(maps, -self.angle)
        else:
            gspace = like.gspace
            scalars = GeometricTensor(maps[None], FieldType(gspace, len(maps) * [gspace.trivial_repr]))
            returned = transformed(scalars, self.table.elements[self.table.inverse[self.element]]).tensor[0]
        return returned[self.places(len(maps))]

    def places(self, poses: int) -> npt.NDArray[np.int_]:
        """Where each pose has gone: pose h is now pose gh."""
        return self.table.quotient[self.table.inverse[self.element]] if poses > 1 else np.zeros(1, dtype=int)

    def number(self, pose: int) -> int:
        """Which pose it was before the turn."""
        return int(self.table.quotient[self.element, pose])


def turns_for(
    x: GeometricTensor,
    elements: Sequence[GroupElement] | None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None,
    background: float,
    most: int = MOST_COLUMNS,
) -> list[Turn]:
    """The turns of a picture: chosen elements or angles, by default those elements that map the grid onto itself.

    Raises:
        TypeError: an element is of another type.
        ValueError: both are given, elements of another group, or angles for what is not a square image of scalar
            fields.
    """
    table = planar(x.type.gspace)
    scalar = all(r.is_trivial() for r in x.type.representations)
    if background and not scalar:
        raise ValueError(f"background: got {background} around {x.type}, needed 0 for all but scalar fields")
    if angles is None:
        index = element_indices(table, grid_elements(table)[:most] if elements is None else elements)
        return [Turn(stacked(table.action[i]), table, i, None, background) for i in index]
    if elements is not None:
        raise ValueError("angles: got both elements and angles, needed one of them")
    if x.tensor.shape[-1] != x.tensor.shape[-2] or not scalar:
        raise ValueError(f"angles: these need a square image of scalar fields, got {x.type} of {tuple(x.tensor.shape)}")
    of = turning(table)
    return [
        Turn(f"{a:g}°", table, min(of, key=lambda i: abs((of[i] - a + 180) % 360 - 180)), float(a), background)
        for a in check_angles(angles)
    ]


# -------------------------------------------------------------------------------------------------- what layers do


@dataclass(frozen=True)
class Attended:
    """What an attentive layer does to one image.

    Attributes:
        passed: ``(poses, h, w)``; which part is let through, in the mean over the fields that were asked for. A layer
            without spatial attention has a single position.
        channel: ``(fields, poses)``, of the same fields; which part channel attention alone would let through, of
            AttentiveConv in the mean over the input; None without it.
        strength: ``(poses,)``; the mean size of what the layer gives.
        covered: the parts of the rows and columns of the image, about its centre, that the maps are of.
    """

    passed: Tensor
    channel: Tensor | None
    strength: Tensor
    covered: tuple[float, float]


def look(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layers: Mapping[str, AttentiveLayer],
    field: int | None = None,
) -> tuple[GeometricTensor, Callable[[GeometricTensor], dict[str, Attended]]]:
    """The image as fields in the precision of the model, and a function from such images to what each layer does to
    them.
    """
    call, x = on_fields(model, x)
    check_image(x)
    precision = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.tensor.dtype)
    x = GeometricTensor(x.tensor.to(precision), x.type)
    for layer in layers.values():
        if x.type.gspace != layer.in_type.gspace:
            raise ValueError(f"x: its gspace is {x.type.gspace.name}, that of the layer {layer.in_type.gspace.name}")
        if field is not None:
            check_index("field", field, len(layer.out_type))
    resampling = {f"{name}.": module for name, module in model.named_modules() if _stride(module) > 1}

    def run(image: GeometricTensor) -> dict[str, Attended]:
        given: dict[str, object] = {}
        with evaluating(model):
            # No module is called by a name with a dot at its end.
            left = watch(
                lambda: given.update(watch(lambda: call(image), {**resampling, **layers}, inputs=True)), layers
            )
            found = {}
            for name, layer in layers.items():
                if name not in given:
                    raise ValueError(f"model: the {type(model).__name__} does not call {name!r}")
                features, result = given[name], left[name]
                assert isinstance(features, GeometricTensor)
                assert isinstance(result, GeometricTensor)
                before = {other: module for other, module in resampling.items() if module is not layer}
                spacing = _spacing(given, name, before)
                found[name] = _attended(layer, features, result, spacing, tuple(image.tensor.shape[-2:]), field)
        return found

    return x, run


def _stride(module: torch.nn.Module) -> int:
    """By how much a module makes the grid coarser."""
    if isinstance(module, HalvingPool):
        return 2
    if isinstance(module, AttentiveConv):
        return module.plain.stride
    stride = getattr(module, "stride", None) if isinstance(module, EquivariantModule) else None
    return int(stride[0] if isinstance(stride, (tuple, list)) else stride or 1)


def _spacing(given: Mapping[str, object], name: str, resampling: Mapping[str, torch.nn.Module]) -> int:
    """The pixels of the image between neighbours on the grid of a layer.

    Branches that halve the same grid halve it once.
    """
    factors: dict[tuple[int, ...], int] = {}
    for entered, features in given.items():
        if entered == name:
            break
        if entered in resampling and isinstance(features, GeometricTensor):
            factors[tuple(features.tensor.shape[-2:])] = _stride(resampling[entered])
    return int(np.prod(list(factors.values()), dtype=int))


def _attended(
    layer: AttentiveLayer,
    features: GeometricTensor,
    result: GeometricTensor,
    spacing: int,
    size: tuple[int, ...],
    field: int | None,
) -> Attended:
    grid = features.tensor.shape[-2:]
    chosen = slice(None) if field is None else slice(field, field + 1)
    channel: Tensor | None = None
    spatial: Tensor | None = None
    if isinstance(layer, PoseAttention):
        spatial = layer.attention_maps(features)[0]
        alpha, residual = spatial, layer.plain.residual
    elif isinstance(layer, FeatureAttention):
        maps = layer.attention_maps(features)
        residual = layer.plain.residual
        channel = None if maps.channel is None else maps.channel[0]
        spatial = None if maps.spatial is None else maps.spatial[0]
        alpha = _product(None if channel is None else channel[chosen].mean(0), spatial)
    else:
        maps = layer.attention_maps(features)
        residual = layer.plain.residual
        grid = result.tensor.shape[-2:]
        spacing *= layer.plain.stride
        if maps.channel is not None:
            channel = maps.channel[0].mean((2, 3))
        if maps.spatial is not None:
            spatial = maps.spatial[0, chosen].mean((0, 2))
        if maps.channel is not None and maps.spatial is not None:
            by_source = maps.channel[0, chosen].mean(2)
            alpha = torch.einsum("opq,opqyx->opyx", by_source, maps.spatial[0, chosen]).mean(0) / by_source.shape[-1]
        else:
            alpha = _product(None if channel is None else channel[chosen].mean(0), spatial)
    values = as_drawn(result.tensor[0]).reshape(-1, len(alpha), *result.tensor.shape[2:])
    if residual:
        alpha, channel = 1 - alpha, None if channel is None else 1 - channel
    return Attended(
        passed=as_drawn(alpha),
        channel=None if channel is None else as_drawn(channel[chosen]),
        strength=values.abs().mean((0, 2, 3)),
        covered=(grid[0] * spacing / size[0], grid[1] * spacing / size[1]),
    )


def _product(channel: Tensor | None, spatial: Tensor | None) -> Tensor:
    """``(poses, h, w)``."""
    if channel is None:
        assert spatial is not None
        return spatial
    return channel[:, None, None] if spatial is None else channel[:, None, None] * spatial


def change(back: Tensor, upright: Tensor, turn: Turn) -> float:
    """The largest change of maps that were turned back; within the disc that every turn leaves on the grid, where it is
    not exact.
    """
    difference = (back - upright).abs()
    if not turn.exact:
        rows, columns = (torch.linspace(-1, 1, n) * (1 - 1 / n) for n in difference.shape[-2:])
        difference = difference[..., torch.hypot(rows[:, None], columns[None]) <= DISC]
    return float(difference.max()) if difference.numel() else 0.0


# ------------------------------------------------------------------------------------------------------------ drawing


def extents(maps: Sequence[Tensor]) -> tuple[float, float]:
    """The range of colours of maps that share a scale."""
    lowest, highest = min(float(m.min()) for m in maps), max(float(m.max()) for m in maps)
    return (lowest, highest) if highest - lowest > 1e-6 else (lowest - 0.5, lowest + 0.5)


def shades(x: GeometricTensor) -> npt.NDArray[np.float32]:
    """An image as it is drawn: in colour where it has three scalar fields, else the mean over its channels."""
    values = as_drawn(x.tensor[0])
    if len(values) == 3 and all(r.is_trivial() for r in x.type.representations):
        lowest, highest = values.min(), values.max()
        colours: npt.NDArray[np.float32] = (
            ((values - lowest) / (highest - lowest).clamp_min(1e-12)).movedim(0, -1).numpy()
        )
        return colours
    grey: npt.NDArray[np.float32] = values.mean(0).numpy()
    return grey


def draw_image(ax: Axes, image: npt.NDArray[np.float32], *, faint: bool = False, extent: Any = None) -> None:
    """An image, dark on light where it has no colours."""
    options: dict[str, Any] = {"interpolation": "nearest", "extent": extent}
    if image.ndim == 3 and faint:
        ax.imshow(image.mean(-1), cmap="gray", alpha=0.45, **options)
    elif image.ndim == 3:
        ax.imshow(image, **options)
    else:
        ax.imshow(image, cmap="gray_r", alpha=0.35 if faint else 1.0, **options)


def draw_over(
    ax: Axes,
    image: npt.NDArray[np.float32],
    values: Tensor,
    scale: tuple[float, float],
    covered: tuple[float, float],
) -> None:
    """A map over the part of the image that it is of."""
    height, width = image.shape[:2]
    draw_image(ax, image, faint=True, extent=(-width / 2, width / 2, height / 2, -height / 2))
    lowest, highest = scale
    weight = ((values - lowest) / (highest - lowest)).clamp(0, 1).numpy()
    colour = np.ones((*weight.shape, 4)) * np.array([*ATTENTION, 0.0])
    colour[..., 3] = STRONGEST * weight
    # A map without positions is one value for the whole image.
    half = (width / 2, height / 2) if values.numel() == 1 else (covered[1] * width / 2, covered[0] * height / 2)
    ax.imshow(colour, interpolation="nearest", extent=(-half[0], half[0], half[1], -half[1]))
    ax.set_xlim(-max(width / 2, half[0]), max(width / 2, half[0]))
    ax.set_ylim(max(height / 2, half[1]), -max(height / 2, half[1]))


def draw_bar(sheet: Sheet, x: float, y: float, height: float, scale: tuple[float, float]) -> None:
    """The scale of :func:`draw_over`."""
    bar = sheet.panel(x, y, 0.09, height)
    colour = np.ones((64, 1, 4)) * np.array([*ATTENTION, 0.0])
    colour[..., 0, 3] = np.linspace(STRONGEST, 0, 64)
    bar.imshow(colour, aspect="auto", extent=(0, 1, 0, 1))
    bar.yaxis.tick_right()
    bar.set_yticks([0, 1], [f"{value:.2f}" for value in scale], fontsize=7)
    bar.tick_params(length=2, pad=2)


def as_change(value: float) -> str:
    """A change, for people."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2f}"
