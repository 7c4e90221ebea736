"""Inspection of networks: layers by name, and their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

_LISTED = 12  # names in an error message


class AttentionLayer(Protocol):
    """An attention layer that can be inspected, such as ``GroupSelfAttention``.

    Attributes:
        in_type: the type of the input.
        num_heads: the number of heads.
        plain: the torch module on tensors, with an ``encoding``.
        attention_maps: the attention of queries; see :meth:`escnn_attention.GroupSelfAttention.attention_maps`.

    Example:
        >>> from escnn_attention import GroupSelfAttention, TransformerBlock
        >>> from escnn_attention.equivariance import AttentionLayer, find_attention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer: AttentionLayer = find_attention(TransformerBlock(fields, fields, num_heads=2, kernel_size=3))
        >>> layer.num_heads, type(layer.plain.encoding).__name__
        (2, 'MLPEncoding')
    """

    in_type: FieldType
    num_heads: int
    plain: Any
    attention_maps: Callable[..., Tensor]


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Evaluation mode without gradients, for those arguments that are modules.

    Afterwards every module inside them is in its former mode. escnn expands the filter of a convolution whenever it
    enters evaluation mode. A convolution in evaluation mode inside a model in training mode is therefore expanded
    again: if its weights were changed since, its output changes.
    """
    training = [
        model for model in models if isinstance(model, torch.nn.Module) and any(m.training for m in model.modules())
    ]
    modes = [(module, module.training) for model in training for module in model.modules()]
    # escnn expands weights when the mode changes: without gradients, so that they do not hold on to a graph.
    with torch.no_grad():
        try:
            for model in training:
                model.eval()
            yield
        finally:
            for module, mode in modes:
                module.train(mode)


def attention_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The attention layers of a model by their names in it, in the order in which they were added.

    These are the modules with the attributes of an :class:`AttentionLayer`: ``GroupSelfAttention``,
    ``LiftingSelfAttention`` and similar ones. Layers without attention maps, such as ``DilationSelfAttention``, are not
    among them.

    Example:
        >>> from escnn_attention.equivariance.inspection import attention_layers
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> network = HybridNet(gspaces.rot2dOnR2(4), 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> list(attention_layers(network))
        ['stages.attention_2_1.attention']
    """
    return {
        name: module
        for name, module in model.named_modules()
        # Of a grid, which has a window; points have neighbourhoods.
        if _attends(module) and hasattr(module, "attention_maps") and not hasattr(module.plain, "neighbourhood")
    }


def _attends(module: torch.nn.Module) -> bool:
    """Whether a module is an attention layer with an encoding."""
    return hasattr(getattr(module, "plain", None), "encoding")


def find_layer(model: torch.nn.Module, layer: str | torch.nn.Module) -> torch.nn.Module:
    """A module inside ``model``, by its name or as it is.

    Raises:
        TypeError: ``model`` is not a module, or ``layer`` neither a module nor a name.
        ValueError: there is no such module in ``model``.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance import find_layer
        >>> find_layer(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), "1")
        Tanh()
    """
    _check_model(model)
    named = dict(model.named_modules())
    if isinstance(layer, torch.nn.Module):
        if not any(layer is module for module in named.values()):
            raise ValueError(f"layer: the {type(layer).__name__} is not a part of the {type(model).__name__}")
        return layer
    if not isinstance(layer, str):
        raise TypeError(f"layer: got {type(layer).__name__}, needed a module or its name")
    if layer not in named:
        raise ValueError(
            f"layer: {type(model).__name__} has no module {layer!r}, needed the name of one, for example "
            # Without the plain modules of this package's layers.
            f"{_listed(name for name in named if name and 'plain' not in name.split('.'))}"
        )
    return named[layer]


def find_attention(model: torch.nn.Module, layer: str | torch.nn.Module | None = None) -> Any:
    """An attention layer of a model, an :class:`AttentionLayer`.

    Args:
        model: a layer itself, or any module that contains some.
        layer: which one: its name in the model, the layer itself, or a block that contains it. By default the first.

    Raises:
        TypeError: ``model`` is not a module, or ``layer`` neither a module nor a name.
        ValueError: there is no such layer in ``model``, or only one without attention maps.

    Example:
        >>> from escnn_attention import GroupSelfAttention, SiLU
        >>> from escnn_attention.equivariance import find_attention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> attention = GroupSelfAttention(fields, fields, kernel_size=3)
        >>> find_attention(nn.SequentialModule(SiLU(fields), attention)) is attention
        True
    """
    _check_model(model)
    inside = model if layer is None else find_layer(model, layer)
    found = attention_layers(inside)
    if not found:
        there = attention_layers(model)
        without = sorted({type(m).__name__ for m in inside.modules() if _attends(m)})
        why = f"; of {', '.join(without)} there are no attention maps" if without else ""
        if there:
            raise ValueError(
                f"layer: got {_shown(layer)}, needed an attention layer of the model: {_listed(there)}{why}"
            )
        raise ValueError(
            f"model: the {type(model).__name__} has no attention layer (GroupSelfAttention or LiftingSelfAttention)"
            f"{why}"
        )
    return next(iter(found.values()))


def find_layers(
    model: object, layers: Any, accepts: Callable[[torch.nn.Module], bool], needed: str, argument: str = "layers"
) -> dict[str, Any]:
    """Chosen layers of one kind, by their names in a model.

    Args:
        model: a layer itself, whose name is empty, or any module that contains some.
        layers: names, layers, or modules that contain some; one of these, or a sequence; None for all layers.
        accepts: whether a module is such a layer.
        needed: the kind of layer, for messages.
        argument: the name of ``layers``, for messages.

    Raises:
        TypeError: ``model`` is not a module, or a layer neither a module nor a name.
        ValueError: there is no such layer in ``model``, or none at all.
    """
    _check_model(model)
    assert isinstance(model, torch.nn.Module)
    there = {name: module for name, module in model.named_modules() if accepts(module)}
    if not there:
        raise ValueError(f"model: the {type(model).__name__} has no {needed}")
    if layers is None:
        return there
    found: dict[str, Any] = {}
    for layer in layers if isinstance(layers, (list, tuple)) else [layers]:
        inside = set(find_layer(model, layer).modules())
        chosen = {name: module for name, module in there.items() if module in inside}
        if not chosen:
            raise ValueError(f"{argument}: got {_shown(layer)}, needed {needed}: {_listed(there)}")
        found |= chosen
    if not found:
        raise ValueError(f"{argument}: got none, needed at least one")
    return found


def gspace_of(model: torch.nn.Module) -> GSpace | None:
    """The gspace of a model: that of the first of its modules that has an ``in_type``. None where there is none."""
    for module in model.modules():
        in_type = getattr(module, "in_type", None)
        if isinstance(in_type, FieldType):
            return in_type.gspace
    return None


def on_fields(
    model: torch.nn.Module, x: GeometricTensor | Tensor
) -> tuple[Callable[[GeometricTensor], object], GeometricTensor]:
    """A model as a function of fields, which a group can transform, and its input as fields.

    Args:
        model: any module. escnn's modules are called with GeometricTensors, all others with the kind of tensor that
            ``x`` is.
        x: fields; or a plain tensor, which is of the model's ``in_type`` if it has one and of scalar fields otherwise.

    Raises:
        TypeError: ``model`` is not a module, or ``x`` no tensor.
        ValueError: ``x`` does not have the channels of ``in_type`` or the dimensions of its space, or no module of
            ``model`` has a gspace.
    """
    _check_model(model)
    if isinstance(x, GeometricTensor):
        return model, x
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor or a torch.Tensor")
    if x.ndim < 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, needed (B, C, *space)")
    in_type = getattr(model, "in_type", None)
    if not isinstance(in_type, FieldType):
        gspace = gspace_of(model)
        if gspace is None:
            raise ValueError(f"model: no module of the {type(model).__name__} has a gspace; give x as GeometricTensor")
        in_type = FieldType(gspace, x.shape[1] * [gspace.trivial_repr])
    size, space = in_type.size, in_type.gspace.dimensionality
    if x.ndim != 2 + space or x.shape[1] != size:
        raise ValueError(
            f"x: got shape {tuple(x.shape)}, needed {size} channels over {in_type.gspace.name}, "
            f"(B, {', '.join(map(str, (size, *'DHW'[3 - space :])))})"
        )
    fields = GeometricTensor(x, in_type)
    if isinstance(model, EquivariantModule):
        return model, fields
    return (lambda fields: model(fields.tensor)), fields


def watch(
    run: Callable[[], object], modules: Mapping[str, torch.nn.Module], *, inputs: bool | Literal["all"] = False
) -> dict[str, Any]:
    """The results of modules, or their inputs, while ``run`` is called.

    Args:
        run: calls a network.
        modules: the modules to watch, by any names.
        inputs: whether to catch the first argument of a module and not its result; ``"all"`` for all arguments, as a
            tuple and a dictionary.

    Returns:
        By name, in the order in which the modules were entered (``inputs``) or left, without those that are not called;
        of a module that is called several times the first call. Tensors are copies: a later module may work in place.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance import watch
        >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(dim=0))
        >>> watch(lambda: network(torch.tensor([-1.0, 2.0])), {"activation": network[0]})
        {'activation': tensor([0., 2.])}
    """
    caught: dict[str, Any] = {}

    def entering(name: str, _: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if name in caught:
            return
        if inputs == "all":
            caught[name] = tuple(map(_copy, arguments)), {key: _copy(value) for key, value in named.items()}
        else:
            caught[name] = _copy(next(iter((*arguments, *named.values())), None))

    def leaving(name: str, _: torch.nn.Module, arguments: tuple[Any, ...], result: object) -> None:
        caught.setdefault(name, _copy(result))

    handles = [
        module.register_forward_pre_hook(partial(entering, name), with_kwargs=True)
        if inputs
        else module.register_forward_hook(partial(leaving, name))
        for name, module in modules.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return caught


def _copy(value: object) -> object:
    if isinstance(value, GeometricTensor):
        coords = value.coords if value.type.gspace.dimensionality else None  # escnn cannot transform empty ones
        return GeometricTensor(value.tensor.detach().clone(), value.type, coords)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, needed a torch.nn.Module")


def _shown(layer: object) -> str:
    return repr(layer) if isinstance(layer, str) else f"a {type(layer).__name__}"


def _listed(names: Any) -> str:
    names = list(names)
    more = ", …" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more
