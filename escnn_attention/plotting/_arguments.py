"""Checks of what pictures are asked for: images, models, poses and group elements."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from escnn.group import Group, GroupElement
from escnn.gspaces import GSpace
from escnn.nn import GeometricTensor

from escnn_attention.equivariance.inspection import gspace_of
from escnn_attention.groups.fibers import Fibers, fibers, is_signed_permutation


def check_image(x: object) -> GeometricTensor:
    """``x``, if it is one image over the plane.

    Raises:
        TypeError: it is no GeometricTensor.
        ValueError: it is not one image, or not over the plane.
    """
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor")
    if x.type.gspace.dimensionality != 2 or x.tensor.ndim != 4 or len(x.tensor) != 1:
        raise ValueError(
            f"x: got shape {tuple(x.tensor.shape)} over {x.type.gspace.name}, needed one planar image (1, C, S, S)"
        )
    return x


def check_index(name: str, value: Any, count: int) -> int:
    """``value``, if it is an integer from 0 to ``count - 1``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it lies outside.
    """
    try:
        index = operator.index(value)
    except TypeError:
        index = None
    if index is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, needed an integer")
    if not 0 <= index < count:
        raise ValueError(f"{name}: got {index}, needed a number from 0 to {count - 1}")
    return index


def planar(gspace: GSpace) -> Fibers:
    """The tables of a gspace over the plane.

    Raises:
        ValueError: it is over something else.
        NotImplementedError: its fiber group is continuous.
    """
    if gspace.dimensionality != 2:
        raise ValueError(f"model: its gspace {gspace.name} has {gspace.dimensionality} dimensions, needed 2 to draw")
    return fibers(gspace)


def grid_elements(table: Fibers) -> list[GroupElement]:
    """The elements that map the grid onto itself."""
    return [g for g, matrix in zip(table.elements, table.action, strict=True) if is_signed_permutation(matrix)]


def pose_indices(table: Fibers, poses: Sequence[int | GroupElement] | None) -> list[int]:
    """The indices of chosen poses, all by default.

    Raises:
        TypeError: a pose that is neither an integer nor an element of a group.
        ValueError: a pose that the group does not have, or none.
    """
    if poses is None:
        return list(range(table.order))
    group = table.elements[0].group
    return [
        table.index(check_element("poses", pose, group))
        if isinstance(pose, GroupElement)
        else check_index("poses", pose, table.order)
        for pose in check_some("poses", poses)
    ]


def element_indices(table: Fibers, elements: Sequence[GroupElement]) -> list[int]:
    """The indices of chosen elements.

    Raises:
        TypeError: one that is no element of a group.
        ValueError: one of another group, or none.
    """
    group = table.elements[0].group
    return [table.index(check_element("elements", g, group)) for g in check_some("elements", elements)]


def check_element(name: str, element: object, group: Group) -> GroupElement:
    """``element``, if it is one of ``group``.

    Raises:
        TypeError: it is no element of a group.
        ValueError: it is one of another group.
    """
    if not isinstance(element, GroupElement):
        raise TypeError(f"{name}: got {element!r}, needed an element of {group.name}")
    if element.group != group:
        raise ValueError(f"{name}: got an element of {element.group.name}, needed one of {group.name}")
    return element


def check_some(name: str, values: Any) -> list[Any]:
    """``values`` as a list, if they are some.

    Raises:
        TypeError: they are no sequence.
        ValueError: there are none.
    """
    if isinstance(values, (str, GroupElement)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {values!r}, needed a sequence")
    found = list(values)
    if not found:
        raise ValueError(f"{name}: got none, needed at least one")
    return found


def refuse_exported(model: object) -> None:
    """Refuse a network that was exported, which knows no group.

    Raises:
        ValueError: ``model`` is one.
    """
    if not isinstance(model, torch.nn.Module) or gspace_of(model) is not None:
        return
    if any(type(module).__module__.startswith("escnn_attention.plain") for module in model.modules()):
        raise ValueError(
            f"model: the {type(model).__name__} was exported, and knows neither its group nor its fields any more;"
            " needed the network that it was exported from"
        )
