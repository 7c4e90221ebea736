"""Irreps by their frequency, and the matrices of many elements at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from escnn.group import (
    O2,
    O3,
    SO2,
    SO3,
    DirectProductGroup,
    Group,
    GroupElement,
    IrreducibleRepresentation,
    Representation,
    directsum,
)


def factors_of(group: DirectProductGroup) -> tuple[Group, Group]:
    """The finite and the continuous factor of a product of one of each, in this order."""
    return (group.G2, group.G1) if group.G1.continuous else (group.G1, group.G2)


def irreps_of(group: Group, frequency: int) -> Iterator[IrreducibleRepresentation]:
    """The irreps of one frequency of rotation; of frequency 0 all on which rotations are trivial."""
    if isinstance(group, DirectProductGroup):
        finite, continuous = factors_of(group)
        for other in finite.irreps():
            for irrep in irreps_of(continuous, frequency):
                pair = (irrep.id, other.id) if group.G1.continuous else (other.id, irrep.id)
                # The product of two irreps of complex type falls apart in two.
                for i in range(2 if irrep.type == other.type == "C" else 1):
                    yield group.irrep(*pair, i)
    elif isinstance(group, (SO2, SO3)):
        yield group.irrep(frequency)
    elif isinstance(group, O2):
        yield from (group.irrep(j, frequency) for j in ((0, 1) if frequency == 0 else (1,)))
    elif isinstance(group, O3):
        yield from (group.irrep(j, frequency) for j in (0, 1))
    else:
        raise NotImplementedError(f"the irreps of {group.name}")


def band(representation: Representation) -> int:
    """The highest frequency of rotation among the irreps of a representation."""
    return max((_frequency(representation.group, id) for id in representation.irreps), default=0)


def _frequency(group: Group, id: tuple) -> int:
    if isinstance(group, DirectProductGroup):
        return max(_frequency(group.G1, id[0]), _frequency(group.G2, id[1]))
    return int(id[-1]) if group.continuous else 0


def degrees_of_freedom(group: Group, frequency: int) -> int:
    """The dimension of the functions on a group up to a frequency: the number of free values of a sampled function."""
    irreps = (irrep for f in range(frequency + 1) for irrep in irreps_of(group, f))
    return sum(irrep.size**2 // irrep.sum_of_squares_constituents for irrep in irreps)


def faithful(group: Group) -> Representation:
    """A faithful orthogonal representation."""
    if isinstance(group, DirectProductGroup):
        one, two = faithful(group.G1), faithful(group.G2)
        name = f"faithful [{group.name}]"
        if name not in group.representations:
            trivial = group.G1.trivial_representation.irreps[0], group.G2.trivial_representation.irreps[0]
            parts = [group.irrep(id, trivial[1]) for id in one.irreps if id != trivial[0]]
            parts += [group.irrep(trivial[0], id) for id in two.irreps if id != trivial[1]]
            group.representations[name] = directsum(parts, name=name)
        return group.representations[name]
    if group.continuous:
        return group.standard_representation()
    return group.regular_representation


def matrices_of(representation: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    """The matrices of elements, ``(S, n, n)`` float64.

    Put together from those of the irreps, which escnn has fast; it is slow to join them for one element at a time.
    """
    size, group = representation.size, representation.group
    blocks = np.zeros((len(elements), size, size))
    values = {id: stacked(group.irrep(*id), elements) for id in set(representation.irreps)}
    start = 0
    for id in representation.irreps:
        stop = start + values[id].shape[-1]
        blocks[:, start:stop, start:stop] = values[id]
        start = stop
    return representation.change_of_basis @ blocks @ representation.change_of_basis_inv


def stacked(representation: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    """The matrices of elements as escnn has them one by one, ``(S, n, n)`` float64: those of an irrep are fast."""
    return np.stack([np.asarray(representation(h), dtype=np.float64) for h in elements])


def is_subgroup(matrices: np.ndarray) -> bool:
    """Whether the elements with the matrices ``(S, n, n)`` of a faithful orthogonal representation form a group."""
    flat = matrices.reshape(len(matrices), -1)
    for matrix in matrices:
        products = (matrix.T @ matrices).reshape(len(matrices), -1)
        distance = (products**2).sum(1)[:, None] + (flat**2).sum(1) - 2 * products @ flat.T
        if (distance.min(axis=1) > 1e-10).any():
            return False
    return True
