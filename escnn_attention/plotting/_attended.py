"""The maps of attentive layers for an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from escnn.nn import EquivariantModule, GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import evaluating, find_layers, on_fields, watch
from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention
from escnn_attention.nn.resample import HalvingPool
from escnn_attention.plotting._elements import as_drawn, check_image, check_index

AttentiveLayer: TypeAlias = AttentiveConv | FeatureAttention | PoseAttention


def find_attentive(model: torch.nn.Module, layers: Any, argument: str = "layers") -> dict[str, AttentiveLayer]:
    """Chosen attentive layers of a model by name, all by default: see :func:`find_layers`."""
    needed = "attentive layer (AttentiveConv with attention, FeatureAttention or PoseAttention)"
    return find_layers(model, layers, _attends, needed, argument)


def _attends(module: torch.nn.Module) -> bool:
    """Whether a module multiplies features or responses by maps."""
    if isinstance(module, AttentiveConv):
        return module.plain.squeeze is not None or module.plain.spatial is not None
    return isinstance(module, (FeatureAttention, PoseAttention))


@dataclass(frozen=True)
class Attended:
    """The maps of an attentive layer for one image."""

    # (poses, h, w), the factor of the features, averaged over the chosen fields; one position without spatial attention
    passed: Tensor
    # (fields, poses), of the same fields, that of channel attention alone, for AttentiveConv averaged over the input
    channel: Tensor | None
    strength: Tensor  # (poses,), the mean absolute value of the layer's output
    covered: tuple[float, float]  # the fractions of the image's rows and columns, about its centre, that the maps cover


def observe(
    x: GeometricTensor | Tensor,
    model: torch.nn.Module,
    layers: Mapping[str, AttentiveLayer],
    field: int | None = None,
) -> tuple[GeometricTensor, Callable[[GeometricTensor], dict[str, Attended]]]:
    """The image as fields, in the precision of the model, and a function from images to maps of attentive layers.

    The maps are those of one ``field`` of the layers' output, by default the mean over all fields.
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
    """The factor by which a module makes the grid coarser."""
    if isinstance(module, HalvingPool):
        return 2
    if isinstance(module, AttentiveConv):
        return module.plain.geometry.stride
    stride = getattr(module, "stride", None) if isinstance(module, EquivariantModule) else None
    return int(stride[0] if isinstance(stride, (tuple, list)) else stride or 1)


def _spacing(given: Mapping[str, object], name: str, resampling: Mapping[str, torch.nn.Module]) -> int:
    """The pixels of the image between neighbours on the grid of a layer.

    Parallel branches that halve the same grid count once.
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
    """The maps of a layer for ``features``, whose grid has every ``spacing``-th pixel of an image of ``size``."""
    grid = features.tensor.shape[-2:]
    chosen = slice(None) if field is None else slice(field, field + 1)
    channel, alpha = _factors(layer, features, chosen)
    if isinstance(layer, AttentiveConv):
        grid = result.tensor.shape[-2:]
        spacing *= layer.plain.geometry.stride
    values = as_drawn(result.tensor[0]).reshape(-1, len(alpha), *result.tensor.shape[2:])
    if layer.plain.residual:
        alpha, channel = 1 - alpha, None if channel is None else 1 - channel
    return Attended(
        passed=as_drawn(alpha),
        channel=None if channel is None else as_drawn(channel[chosen]),
        strength=values.abs().mean((0, 2, 3)),
        covered=(grid[0] * spacing / size[0], grid[1] * spacing / size[1]),
    )


def _factors(layer: AttentiveLayer, features: GeometricTensor, chosen: slice) -> tuple[Tensor | None, Tensor]:
    """Maps of the channels ``(fields, poses)``, and of all in the mean over fields ``(poses, h, w)``.

    Maps over responses are averaged over the input.
    """
    if isinstance(layer, PoseAttention):
        return None, layer.attention_maps(features)[0]
    maps = layer.attention_maps(features)
    channel, spatial = (None if part is None else part[0] for part in (maps.channel, maps.spatial))
    if isinstance(layer, AttentiveConv):
        by_source, channel = channel, None if channel is None else channel.mean((2, 3))
        if by_source is not None and spatial is not None:
            by_source = by_source[chosen].mean(2)
            both = torch.einsum("opq,opqyx->opyx", by_source, spatial[chosen]).mean(0) / by_source.shape[-1]
            return channel, both
        spatial = None if spatial is None else spatial[chosen].mean((0, 2))
    of_channels = None if channel is None else channel[chosen].mean(0)[:, None, None]
    product: Any = math.prod(part for part in (of_channels, spatial) if part is not None)
    return channel, product
