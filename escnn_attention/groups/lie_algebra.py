"""The Lie algebra of a continuous group and its representations, read from escnn's group objects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
from escnn import group as groups
from escnn.group import Group, GroupElement

from escnn_attention._escnn.types import FieldType
from escnn_attention.groups.fibers import Fibers, columns_of
from escnn_attention.groups.random_transformation import FieldTransformation, LieRepresentation, RandomTransformation
from escnn_attention.groups.representations import band, factors_of, matrices_of


def random_transformation(in_type: FieldType, out_type: FieldType, group: Fibers) -> RandomTransformation | None:
    """The transformation of the samples of a layer between two types.

    None for a finite group, and where samples are fixed.
    """
    if group.samples is None or group.samples.turn == "fixed":
        return None
    action = in_type.gspace.basespace_action
    if action is None:  # No base space: only the numbers of generators and components matter.
        lines, components = algebra(in_type.fibergroup)
        space = LieRepresentation(np.zeros((len(lines), 0, 0)), np.zeros((len(components), 0, 0)))
    else:
        space = represented(action)
    return RandomTransformation(_field_transformation(in_type), _field_transformation(out_type), space)


def _field_transformation(field_type: FieldType) -> FieldTransformation:
    segments = columns_of(field_type)
    return FieldTransformation([columns for _, columns in segments], [represented(r) for r, _ in segments])


def represented(representation: groups.Representation) -> LieRepresentation:
    r"""The generators of a representation, and its matrices of one element of each connected component.

    The generators are logarithms of the irreps at angles so small that there is but one, which are exact to rounding.
    """
    lines, components = algebra(representation.group)
    generators = np.zeros((len(lines), representation.size, representation.size))
    start = 0
    for id in representation.irreps:
        irrep = representation.group.irrep(*id)
        angle = 1 / (1 + band(irrep))
        stop = start + irrep.size
        for i, line in enumerate(lines):
            logarithm = scipy.linalg.logm(np.asarray(irrep(line(angle)), dtype=np.float64)).real / angle
            generators[i, start:stop, start:stop] = (logarithm - logarithm.T) / 2  # irreps are orthogonal
        start = stop
    generators = representation.change_of_basis @ generators @ representation.change_of_basis_inv
    return LieRepresentation(generators, matrices_of(representation, components))


def algebra(group: Group) -> tuple[list[Callable[[float], GroupElement]], list[GroupElement]]:
    """One-parameter subgroups that generate the identity component, and an element of every component."""
    if isinstance(group, groups.DirectProductGroup):
        finite, continuous = factors_of(group)
        lines, components = algebra(continuous)

        def pair(h: GroupElement, k: GroupElement) -> GroupElement:
            return group.pair_elements(h, k) if group.G1.continuous else group.pair_elements(k, h)

        return (
            [lambda angle, line=line: pair(line(angle), finite.identity) for line in lines],  # type: ignore[misc]
            [pair(c, k) for k in finite.elements for c in components],
        )
    if isinstance(group, groups.SO2):
        return [lambda angle: group.element(angle, "radians")], [group.identity]
    if isinstance(group, groups.O2):
        return [lambda angle: group.element((0, angle), "radians")], [group.identity, group.reflection]
    axes = np.eye(3)
    if isinstance(group, groups.SO3):
        return [lambda angle, axis=axis: group.element(angle * axis, "EV") for axis in axes], [group.identity]  # type: ignore[misc]
    assert isinstance(group, groups.O3)
    return (
        [lambda angle, axis=axis: group.element((0, angle * axis), "EV") for axis in axes],  # type: ignore[misc]
        [group.identity, group.inversion],
    )
