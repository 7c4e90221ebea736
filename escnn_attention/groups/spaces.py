"""Gspaces that escnn lacks, with escnn's own classes: the tetrahedron, and the motions of the plane or space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from escnn.group import (
    Group,
    GroupElement,
    IrreducibleRepresentation,
    Octahedral,
    Representation,
    cyclic_group,
    directsum,
    so3_group,
)
from escnn.gspaces import GSpace

from escnn_attention.geometry.relations import MOTION_SIZES

_NORMS = ["norm", "gated"]
_INSTEAD = "the layers of this package act at the elements themselves and need none"


class Tetrahedral(Octahedral):
    """The group T of the 12 rotations of a tetrahedron: those of escnn's octahedral group that permute the axes evenly.

    Its irreps are the trivial one, ``(0,)``; the rotations, ``(1,)``; and the rotations of a plane by thirds of a turn,
    ``(2,)``, which are those of its quotient :math:`C_3`. Its subgroups are not implemented.
    """

    _instance: Tetrahedral | None = None

    def __init__(self) -> None:
        Group.__init__(self, "Tetrahedral", False, False)
        rotations = so3_group(1)
        self._identity = self.element(rotations.identity.value)
        even = [e for e in rotations.grid("cube") if _turns(e) is not None]  # of the octahedral group
        self._elements = [self.element(e.value) for e in even]
        thirds = next(e for e in self._elements if _turns(e) == 1)
        halves = next(e for e in self._elements if _turns(e) == 0 and e != self._identity)
        self._generators = [thirds, halves]
        self._build_representations()

    def _build_representations(self) -> None:
        for number in (0, 1, 2):
            self.irrep(number)
        self.representations.update(**{irrep.name: irrep for irrep in self.irreps()})
        self.representations["regular"] = self.regular_representation

    def irrep(self, l: int) -> IrreducibleRepresentation:  # noqa: E741 - escnn's name
        """The irrep of this number: 0, 1 or 2."""
        if (l,) not in self._irreps:
            if l not in (0, 1, 2):
                raise ValueError(f"irrep: got {l}, and the irreps of the tetrahedral group are 0, 1 and 2")
            matrices = {e: self._matrix(l, e) for e in self._elements}
            nonlinearities = ["pointwise", *_NORMS, "gate"] if l == 0 else _NORMS
            size, kind = {0: (1, "R"), 1: (3, "R"), 2: (2, "C")}[l]
            self._irreps[(l,)] = IrreducibleRepresentation(
                self, (l,), f"irrep_{l}", matrices, size, kind, supported_nonlinearities=nonlinearities
            )
        return self._irreps[(l,)]

    def _matrix(self, number: int, element: GroupElement) -> np.ndarray:
        if number == 0:
            return np.eye(1)
        if number == 1:
            rotations = so3_group(1)
            return np.asarray(rotations.irrep(1)(rotations.element(element.value)))
        angle = 2 * np.pi * (_turns(element) or 0) / 3
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    def _is_element(self, element: Any, param: str = Octahedral.PARAM, verbose: bool = False) -> bool:
        if not super()._is_element(element, param, verbose):
            return False
        return _thirds(np.asarray(self._change_param(element, param, "MAT"))) is not None

    def _subgroup(self, id: Any) -> Any:
        raise NotImplementedError(f"subgroup: the tetrahedral group has none here; {_INSTEAD}")

    def testing_elements(self) -> Iterable[GroupElement]:
        """All elements."""
        return iter(self._elements)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tetrahedral)

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> Any:
        return tetra_group, ()

    @classmethod
    def _generator(cls) -> Tetrahedral:
        if cls._instance is None:
            cls._instance = Tetrahedral()
        return cls._instance


class OwnSpace(GSpace):
    """A gspace that escnn lacks: without steerable kernels, and equal to those of its class with the same arguments."""

    def __init__(self, action: Representation, name: str, *arguments: Any) -> None:
        self._action, self._arguments = action, arguments
        super().__init__(action.group, action.size, name)

    @property
    def basespace_action(self) -> Representation:
        """The action on the points."""
        return self._action

    def restrict(self, id: Any) -> Any:
        raise NotImplementedError(f"restrict: {self.name} has no subgroups here; {_INSTEAD}")

    def _basis_generator(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"escnn has no steerable kernels on {self.name}; attention needs none")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnSpace) and (type(self), self._arguments) == (type(other), other._arguments)

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    def __reduce__(self) -> Any:
        return type(self), self._arguments


class TetrahedralSpace(OwnSpace):
    """R^3 with the rotations of the tetrahedron: see :func:`tetraOnR3`."""

    def __init__(self) -> None:
        super().__init__(tetra_group().standard_representation, "Tetrahedral_on_R3")


def tetra_group() -> Tetrahedral:
    """The rotations of the tetrahedron, one object for all, as escnn's groups are."""
    return Tetrahedral._generator()


def tetraOnR3() -> TetrahedralSpace:
    """R^3 with the 12 rotations of a tetrahedron, half of those of ``escnn.gspaces.octaOnR3()``.

    escnn has no convolutions for it; the layers of this package have everything, on grids and at points.

    Example:
        >>> import torch
        >>> from escnn_attention import PointSelfAttention, tetraOnR3
        >>> from escnn import nn
        >>> g = tetraOnR3()
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr] + [g.irrep(1)])
        >>> layer = PointSelfAttention(fields, fields, num_heads=2)
        >>> layer(nn.GeometricTensor(torch.randn(5, 27), fields, torch.randn(5, 3))).shape
        torch.Size([5, 27])
    """
    return TetrahedralSpace()


def _turns(element: GroupElement) -> int | None:
    """The places by which a rotation moves the axes on, as for its matrix."""
    return _thirds(np.asarray(element.to("MAT")))


def _thirds(matrix: np.ndarray) -> int | None:
    """The places by which a signed permutation moves the axes on, 0, 1 or 2; None where it exchanges two."""
    axes = np.abs(matrix).argmax(axis=0)
    shift = int(axes[0])
    return shift if (axes == (np.arange(3) + shift) % 3).all() else None


class MotionSpace(OwnSpace):
    """The group SE(2) or SE(3) as a space, in the numbers of :mod:`escnn_attention.geometry.relations`.

    It acts on itself from the left, and no element but the identity keeps any of its points: the fiber group is
    trivial, and layers are as equivariant as what they see of two points, which is
    :class:`~escnn_attention.LiftedMotion`. A ValueError for another ``dim`` than 2 and 3.

    >>> MotionSpace(3).dimensionality
    7
    """

    def __init__(self, dim: int) -> None:
        if dim not in MOTION_SIZES:
            raise ValueError(f"dim: got {dim!r}, needed one of {', '.join(map(str, MOTION_SIZES))}")
        self.dim, size = dim, MOTION_SIZES[dim]
        action = directsum(size * [cyclic_group(1).trivial_representation], name=f"identity_{size}")
        super().__init__(action, f"motions_of_R{dim}", dim)
