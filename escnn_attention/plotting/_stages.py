"""The feature maps of stages of a model, or of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import attention_layers, evaluating, find_layer, on_fields, watch
from escnn_attention.plotting._arguments import check_image, check_index, refuse_exported
from escnn_attention.plotting._fields import as_drawn, is_regular_map

Stage: TypeAlias = Callable[[GeometricTensor], GeometricTensor]
Maps: TypeAlias = dict[str, Tensor]  # by stage, (fields, |H|, H, W)


def stage_runner(
    x: GeometricTensor | Tensor,
    stages: torch.nn.Module | Mapping[str, Stage],
    layers: Sequence[str] | None,
    *,
    one: bool = False,
) -> tuple[Callable[[GeometricTensor], Maps], GeometricTensor, list[str]]:
    """Prepare to look at stages.

    Args:
        x: one image.
        stages: a model, or functions by name.
        layers: modules of the model, by name; by default the first attention and the last with regular fields.
        one: whether only the first of these is wanted.

    Returns:
        A function from images to feature maps by the names of the stages, the image as fields, and the names.

    Raises:
        TypeError: ``stages`` or ``x`` is of another type.
        ValueError: ``x`` is not one planar image, there is no such layer, nothing to show, or the model was exported.
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
        with ExitStack() as stack:
            stack.enter_context(evaluating(*functions.values()))
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
