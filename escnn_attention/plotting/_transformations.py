"""Transformations of an image by group elements or angles, and of maps back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.angles import DISC, check_angles, rotation_angles
from escnn_attention.equivariance.images import rotate_images
from escnn_attention.groups.fibers import Fibers, is_signed_permutation
from escnn_attention.plotting._arguments import element_indices, grid_elements, planar
from escnn_attention.plotting._fields import transformed
from escnn_attention.plotting._names import stacked
from escnn_attention.plotting._sheet import MOST_COLUMNS


@dataclass(frozen=True)
class Transformation:
    """A transformation of the image, and what it does to poses.

    Attributes:
        name: for people.
        table: of the group.
        element: the index of the element g that it is, or of the one next to the angle.
        angle: of a rotation, in degrees, where it is any; None for an element of the group.
        background: the value around the image.
    """

    name: str
    table: Fibers
    element: int
    angle: float | None
    background: float

    @property
    def exact(self) -> bool:
        """Whether it maps the grid onto itself."""
        if self.angle is not None:
            return self.angle % 90 == 0
        return bool(is_signed_permutation(self.table.action[self.element]))

    def apply(self, x: GeometricTensor) -> GeometricTensor:
        """The image, transformed."""
        if self.angle is not None:
            lowest, highest = min(float(x.tensor.min()), self.background), max(float(x.tensor.max()), self.background)
            rotated = rotate_images(x.tensor, self.angle, background=self.background)
            return GeometricTensor(rotated.clamp(lowest, highest), x.type)
        element = self.table.elements[self.element]
        if self.exact:
            return transformed(x, element)
        # escnn puts zeros around an image.
        found = transformed(GeometricTensor(x.tensor - self.background, x.type), element).tensor
        return GeometricTensor(found + self.background, x.type)

    def undo(self, maps: Tensor, like: FieldType) -> Tensor:
        """Maps ``(poses, h, w)`` of the transformed image, transformed by g⁻¹: in space, and from gh to h."""
        if self.angle is not None:
            returned = rotate_images(maps, -self.angle)
        else:
            gspace = like.gspace
            scalars = GeometricTensor(maps[None], FieldType(gspace, len(maps) * [gspace.trivial_repr]))
            returned = transformed(scalars, self.table.elements[self.table.inverse[self.element]]).tensor[0]
        return returned[self.images_of_poses(len(maps))]

    def images_of_poses(self, poses: int) -> npt.NDArray[np.int_]:
        """The pose gh for each pose h."""
        return self.table.quotient[self.table.inverse[self.element]] if poses > 1 else np.zeros(1, dtype=int)

    def source(self, pose: int) -> int:
        """The pose g⁻¹h that has become ``pose`` h."""
        return int(self.table.quotient[self.element, pose])


def transformations_for(
    x: GeometricTensor,
    elements: Sequence[GroupElement] | None,
    angles: Sequence[float] | npt.NDArray[np.floating[Any]] | None,
    background: float,
    most: int = MOST_COLUMNS,
) -> list[Transformation]:
    """The columns of a picture: chosen elements or angles, by default the elements that map the grid onto itself.

    Raises:
        TypeError: an element is of another type.
        ValueError: both are given, elements of another group, or angles for what is not a square image of scalar
            fields.
    """
    table = planar(x.type.gspace)
    scalar = all(r.is_trivial() for r in x.type.representations)
    if background and not scalar:
        raise ValueError(f"background: got {background} around {x.type}, needed 0 for all but scalar fields")
    if angles is None:
        index = element_indices(table, grid_elements(table)[:most] if elements is None else elements)
        return [Transformation(stacked(table.action[i]), table, i, None, background) for i in index]
    if elements is not None:
        raise ValueError("angles: got both elements and angles, needed one of them")
    if x.tensor.shape[-1] != x.tensor.shape[-2] or not scalar:
        raise ValueError(f"angles: these need a square image of scalar fields, got {x.type} of {tuple(x.tensor.shape)}")
    return [
        Transformation(f"{a:g}°", table, nearest_rotation(table, float(a)), float(a), background)
        for a in check_angles(angles)
    ]


def nearest_rotation(table: Fibers, angle: float) -> int:
    """The index of the rotation in the group that is next to an angle in degrees."""
    rotations = rotation_angles(table)
    return min(rotations, key=lambda i: abs((rotations[i] - angle + 180) % 360 - 180))


def largest_change(returned: Tensor, upright: Tensor, transformation: Transformation) -> float:
    """The largest difference between the maps of the image and those of the transformed image, transformed back.

    Where the transformation does not map the grid onto itself, it is taken within the disc that every rotation
    leaves on the grid.
    """
    difference = (returned - upright).abs()
    if not transformation.exact:
        rows, columns = (torch.linspace(-1, 1, n) * (1 - 1 / n) for n in difference.shape[-2:])
        difference = difference[..., torch.hypot(rows[:, None], columns[None]) <= DISC]
    return float(difference.max()) if difference.numel() else 0.0
