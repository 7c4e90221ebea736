"""What a report is about: elements of the group, and layers by name with what goes into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from escnn.group import O3, SO3, Group, GroupElement
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, GeometricTensor, SequentialModule

from escnn_attention.groups.fibers import is_signed_permutation

__all__ = ["elements_of", "inner_layers", "layers_of", "maps_grid"]


@torch.no_grad()
def inner_layers(module: EquivariantModule, x: GeometricTensor) -> dict[str, tuple[EquivariantModule, GeometricTensor]]:
    """The equivariant modules in a module that make nothing but a field of a field, and the first input of each.

    Those that have others inside are left out: what is to be named is the innermost. So are those on another gspace,
    behind which a network has left its group.

    Args:
        module: the module, in evaluation mode.
        x: its input.

    Returns:
        by name, with the class: in the order in which they are called.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance.parts import inner_layers
        >>> from escnn_attention.models import ResidualBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> block = ResidualBlock(fields, fields).eval()
        >>> list(inner_layers(block, fields(torch.randn(1, 4, 5, 5))))[-1]
        'branch.convolution_2 (AttentiveConv)'
    """
    found: dict[str, tuple[EquivariantModule, GeometricTensor]] = {}
    handles = []
    for name, layer in module.named_modules():
        inside = [m for m in layer.modules() if m is not layer and isinstance(m, EquivariantModule)]
        if not name or inside or not isinstance(layer, EquivariantModule) or isinstance(layer, SequentialModule):
            continue
        label = f"{name} ({type(layer).__name__})"

        def catch(called: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], label: str = label) -> None:
            field = given[0] if len(given) == 1 and not named else None
            if isinstance(field, GeometricTensor) and field.type.gspace == x.type.gspace:
                assert isinstance(called, EquivariantModule)
                found.setdefault(label, (called, field))

        handles.append(layer.register_forward_pre_hook(catch, with_kwargs=True))
    try:
        module(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def layers_of(module: EquivariantModule, prefix: str = "") -> Iterator[tuple[str, EquivariantModule]]:
    """The layers of a sequential module, through the sequential modules in it."""
    if isinstance(module, SequentialModule):
        for name, child in module.named_children():
            if isinstance(child, SequentialModule):
                yield from layers_of(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} ({type(child).__name__})", child


def elements_of(group: Group) -> list[GroupElement]:
    """All elements of a finite group; of a continuous one those that escnn tests with, and those of a cube."""
    if not group.continuous:
        return list(group.elements)
    elements = list(group.testing_elements())
    if isinstance(group, (SO3, O3)):
        # escnn's are those of an icosahedron, half of the cube's are not among them.
        elements += [g for g in group.grid("cube") if g not in elements]
    return elements


def maps_grid(space: GSpace, element: GroupElement) -> bool:
    """Whether an element maps a grid onto itself."""
    if space.dimensionality == 0:
        return True
    return bool(is_signed_permutation(np.asarray(space.basespace_action(element))))
