"""The elements that leave the north pole of the sphere where it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from escnn.group import O3, SO3
from escnn.nn import FieldType

from escnn_attention._checks import check_int
from escnn_attention.groups.fibers import FrameSegment, columns_of, invariant_vectors
from escnn_attention.groups.lie_algebra import represented
from escnn_attention.plain.local_frames import Generators
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses

__all__ = ["Stabiliser"]


class Stabiliser:
    """Samples of the rotations about the north pole, and of the reflections that fix it."""

    def __init__(self, field_type: FieldType, samples: int):
        group = field_type.fibergroup
        if not isinstance(group, (SO3, O3)) or field_type.gspace.dimensionality != 3:
            raise ValueError(
                f"in_type: the sphere needs a gspace on R³ with the fiber group SO(3) or O(3), "
                f"gspaces.rot3dOnR3() or gspaces.flipRot3dOnR3(), got {field_type.gspace.name}"
            )
        self.reflects = isinstance(group, O3)
        if check_int("samples", samples) % 2 and self.reflects:
            raise ValueError(f"samples: got {samples} for {group.name}, needed an even number: half are reflections")
        number = samples // 2 if self.reflects else samples
        about_z = [_about("z", 2 * math.pi * s / number) for s in range(number)]
        if self.reflects:
            mirror = group.element((1, _about("y", math.pi)), "Q")  # y to -y
            rotations = [group.element((0, q), "Q") for q in about_z]
            self.elements = [*rotations, *(r @ mirror for r in rotations)]
        else:
            self.elements = [group.element(q, "Q") for q in about_z]
        self.group = group
        action = field_type.gspace.basespace_action
        self.matrices = np.stack([np.asarray(action(h), dtype=np.float64) for h in self.elements])

    def segments(self, field_type: FieldType, *, dual: bool = False) -> list[FrameSegment]:
        r"""The matrices :math:`\rho(h_s)^{-1}`, or :math:`\rho(h_s)^T / S`, of a type."""
        out = []
        for representation, columns in columns_of(field_type):
            matrices = np.stack([np.asarray(representation(h), dtype=np.float64) for h in self.elements])
            transposed = np.swapaxes(matrices, 1, 2)
            if not np.allclose(matrices @ transposed, np.eye(representation.size), atol=1e-8):
                raise ValueError(f"{representation.name}: a representation on the sphere must be orthogonal")
            out.append(FrameSegment(columns, transposed / len(matrices) if dual else transposed, None))
        return out

    def read(self, in_type: FieldType, fields: int, **options: Any) -> ToPoses:
        """The map from fields to functions on frames, with the options of :class:`ToPoses`."""
        return ToPoses(self.segments(in_type), in_type.size, fields, len(self.elements), **options)

    def read_scalars(self, in_type: FieldType, fields: int, **options: Any) -> Scalars:
        """The map from scalar fields to numbers, the same in every frame, with the options of :class:`Scalars`."""
        return Scalars(in_type.size, fields, **options)

    def mean(self, out_type: FieldType, fields: int, groups: int, bias: bool) -> FromPoses:
        """The map from functions on frames to the fields whose mean they are."""
        segments = self.segments(out_type, dual=True)
        invariants = invariant_vectors(out_type) if bias else None
        return FromPoses(segments, out_type.size, fields, 1, groups=groups, invariants=invariants)

    def generators(self, field_type: FieldType) -> list[Generators]:
        """What rotations about z and about y do to a type."""
        out = []
        for representation, columns in columns_of(field_type):
            _, about_y, about_z = represented(representation).generators.numpy()
            out.append(Generators(columns, about_z, about_y))
        return out


def _about(axis: str, angle: float) -> np.ndarray:
    """The unit quaternion of a rotation, the real part last."""
    quaternion = np.zeros(4)
    quaternion["xyz".index(axis)] = math.sin(angle / 2)
    quaternion[3] = math.cos(angle / 2)
    return quaternion
