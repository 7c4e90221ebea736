"""Lets pickle write down escnn's types by what they are.

escnn's gspaces, groups and representations are made of local functions, which pickle refuses: no module that holds a
:class:`~escnn.nn.FieldType` can be pickled or saved whole. Each of them follows from a few numbers, and escnn has
factories that make it from those; the reducers registered here name the factory and the numbers. Copies are made the
same way, so that ``copy.deepcopy`` of a module no longer copies the group but refers to the same one.
"""

from __future__ import annotations

import copyreg
from typing import Any

import escnn.group as eg
import numpy as np
from escnn.gspaces import GSpace0D, GSpace2D, GSpace3D
from escnn.nn import FieldType

_GROUPS = (
    *(eg.CyclicGroup, eg.DihedralGroup, eg.SO2, eg.O2, eg.SO3, eg.O3, eg.Icosahedral, eg.Octahedral),
    eg.directproduct.DirectProductGroup,
    eg.doublegroup.DoubleGroup,
)


def register() -> None:
    """Register the reducers. Called when :mod:`escnn_attention` is imported; calling it again changes nothing."""
    for group in _GROUPS:
        copyreg.pickle(group, lambda g: (_make_group, (type(g), g._keys)))  # type: ignore[arg-type]
    copyreg.pickle(eg.GroupElement, lambda e: (e.group.element, (e.value, e.param)))  # type: ignore[arg-type]
    copyreg.pickle(eg.IrreducibleRepresentation, lambda r: (r.group.irrep, r.id))  # type: ignore[arg-type]
    copyreg.pickle(eg.Representation, _reduce_representation)  # type: ignore[arg-type]
    copyreg.pickle(GSpace0D, lambda space: (GSpace0D, (space.fibergroup,)))  # type: ignore[arg-type]
    for kind in (GSpace2D, GSpace3D):
        copyreg.pickle(kind, lambda space: (_make_gspace, (type(space), space._sg_id, space.name)))  # type: ignore[arg-type]
    copyreg.pickle(FieldType, lambda t: (FieldType, (t.gspace, tuple(t.representations))))  # type: ignore[arg-type]


def _make_group(cls: type[eg.Group], keys: dict[str, Any]) -> eg.Group:
    if issubclass(cls, eg.directproduct.DirectProductGroup):
        keys = {"name": None, **keys}  # as direct_product and double_group call it, whose groups are to be found again
    return cls._generator(**keys)


def _make_gspace(cls: type[GSpace2D | GSpace3D], sg_id: tuple[Any, ...], name: str) -> GSpace2D | GSpace3D:
    space = cls(sg_id)
    space.name = name  # part of escnn's hash; the factories make it from the id as it was given
    return space


def _reduce_representation(r: eg.Representation) -> tuple[Any, ...]:
    if r.group.order() > 0 and r.name == "regular":
        return getattr, (r.group, "regular_representation")
    arrays = (np.asarray(r.change_of_basis), np.asarray(r.change_of_basis_inv))
    return _make_representation, (
        r.group,
        r.name,
        tuple(r.irreps),
        sorted(r.supported_nonlinearities),
        *arrays,
        r.attributes,
    )


def _make_representation(
    group: eg.Group,
    name: str,
    irreps: tuple[Any, ...],
    supported_nonlinearities: list[str],
    change_of_basis: np.ndarray,
    change_of_basis_inv: np.ndarray,
    attributes: dict[str, Any],
) -> eg.Representation:
    made = eg.Representation(
        group,
        "",  # escnn refuses the name of a representation that the group holds already
        list(irreps),
        change_of_basis,
        supported_nonlinearities,
        change_of_basis_inv=change_of_basis_inv,
        **attributes,
    )
    made.name = name
    known = group.representations.get(name)
    return known if known == made else made
