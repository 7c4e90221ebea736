"""What one module passes on to another: options by name, or the other module itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from escnn.nn import EquivariantModule, FieldType

__all__ = ["AttentionLike", "changed", "check_options", "choose_attention", "option_names"]

AttentionLike: TypeAlias = "EquivariantModule | Callable[[FieldType, FieldType], EquivariantModule]"
"""An attention from one type to another, or what makes one of the two types."""


def option_names(layer: Callable[..., Any]) -> list[str]:
    """The arguments of a class or function that are passed by name only.

    Example:
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn_attention.nn.options import option_names
        >>> option_names(GroupSelfAttention)[:3]
        ['head_fields', 'query', 'keys']
    """
    parameters = inspect.signature(layer).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def check_options(owner: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """All names of ``options`` are known.

    Args:
        owner: what got them.
        options: by name.
        known: the names that there are.

    Raises:
        TypeError: one is not known.
    """
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: {owner} has no such option, needed some of {', '.join(known)}")


def choose_attention(
    attention: AttentionLike, in_type: FieldType, out_type: FieldType, unused: Mapping[str, Any]
) -> EquivariantModule:
    """The attention of a block, as it was given.

    Args:
        attention: a module, or a function of two types that makes one.
        in_type: the type that it has to take.
        out_type: the type that it has to give.
        unused: what was asked for of an attention that the block makes itself, by name.

    Raises:
        TypeError: ``attention`` is nothing of the kind, or makes nothing of the kind.
        ValueError: it is of other types, or something is left in ``unused``.
    """
    for name, value in unused.items():
        raise ValueError(f"{name}: got {value!r} beside an attention, which has options of its own; leave out one")
    layer = attention if isinstance(attention, EquivariantModule) or not callable(attention) else None
    if layer is None:
        layer = attention(in_type, out_type)
    if not isinstance(layer, EquivariantModule):
        raise TypeError(
            f"attention: got {type(layer).__name__}, needed an equivariant module, or a function of two types that "
            "makes one"
        )
    for name, got, needed in (("in_type", layer.in_type, in_type), ("out_type", layer.out_type, out_type)):
        if got != needed:
            raise ValueError(f"attention: its {name} is {got}, needed {needed}")
    return layer


def changed(values: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The values that are not their defaults, of ``(value, default)`` by name."""
    return {name: value for name, (value, default) in values.items() if value != default}
