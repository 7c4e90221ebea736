"""The motions of the plane or of space as a space by themselves, with escnn's own classes."""

from __future__ import annotations

from typing import Any

from escnn.group import Representation, cyclic_group, directsum
from escnn.gspaces import GSpace

from escnn_attention.geometry.relations import MOTION_SIZES

__all__ = ["MotionSpace"]


class MotionSpace(GSpace):
    """The group SE(2) or SE(3) as a space, in the numbers of :mod:`escnn_attention.geometry.relations`.

    It acts on itself from the left, and no element but the identity keeps any of its points: the fiber group is
    trivial, and layers are as equivariant as what they see of two points, which is
    :class:`~escnn_attention.LiftedMotion`.

    Args:
        dim: 2 or 3.

    Raises:
        ValueError: another dimension.

    Example:
        >>> from escnn_attention.groups.motion_space import MotionSpace
        >>> MotionSpace(3).dimensionality
        7
    """

    def __init__(self, dim: int) -> None:
        if dim not in MOTION_SIZES:
            raise ValueError(f"dim: got {dim!r}, needed one of {', '.join(map(str, MOTION_SIZES))}")
        self.dim = dim
        group, size = cyclic_group(1), MOTION_SIZES[dim]
        self._action = directsum(size * [group.trivial_representation], name=f"identity_{size}")
        super().__init__(group, size, f"motions_of_R{dim}")

    @property
    def basespace_action(self) -> Representation:
        """The identity."""
        return self._action

    def restrict(self, id: Any) -> Any:
        raise NotImplementedError("restrict: the fiber group of motions is trivial and has no subgroups")

    def _basis_generator(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("escnn has no steerable kernels on motions; attention between points needs none")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MotionSpace) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> Any:
        return MotionSpace, (self.dim,)
