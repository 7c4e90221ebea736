"""Group elements and poses: their names, checks, and their action on images and maps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import Group, GroupElement
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from scipy.spatial.transform import Rotation
from torch import Tensor

from escnn_attention.equivariance.angles import DISC, check_angles, rotate_images, rotation_angles
from escnn_attention.equivariance.inspection import gspace_of
from escnn_attention.groups.fibers import Fibers, fibers, is_regular, is_signed_permutation

MOST_COLUMNS = 8  # of elements, by default


def name_element(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A name for the orthogonal ``matrix`` of a group element, which acts on (x, y) with y upwards, or on (x, y, z).

    In the plane rotations are named by their angle, counter-clockwise; reflections by the angle by which the image is
    rotated after its left and right have changed sides. In space rotations are named by their angle about an axis.

    Raises:
        ValueError: the matrix is neither 2×2 nor 3×3.

    Example:
        >>> import numpy as np
        >>> from escnn_attention.plotting import name_element
        >>> name_element(np.array([[0.0, -1.0], [1.0, 0.0]]))
        '90°'
        >>> name_element(np.array([[-1.0, 0.0], [0.0, 1.0]]))
        'mirror'
        >>> name_element(np.diag([-1.0, -1.0, 1.0]))
        '180° about z'
    """
    if matrix.shape not in ((2, 2), (3, 3)):
        raise ValueError(f"matrix: got shape {matrix.shape}, needed (2, 2) or (3, 3)")
    return _in_space(matrix) if len(matrix) == 3 else _in_the_plane(matrix)


def stacked(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """The name of an element of the plane, over two lines for narrow columns."""
    return name_element(matrix).replace(", ", "\n")


def _in_the_plane(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A rotation by its angle, a reflection by the rotation after a mirror."""
    mirrored = np.linalg.det(matrix) < 0
    rotation = matrix @ np.diag([-1.0, 1.0]) if mirrored else matrix
    degrees = round(math.degrees(math.atan2(rotation[1, 0], rotation[0, 0])), 1) % 360
    angle = f"{degrees:g}°"
    return ("mirror" if degrees == 0 else f"mirror, {angle}") if mirrored else angle


def _in_space(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A rotation by its angle about an axis, what inverts by the rotation that is left without the inversion."""
    inverted = np.linalg.det(matrix) < 0
    rotation = -matrix if inverted else matrix
    vector = Rotation.from_matrix(rotation).as_rotvec(degrees=True)
    degrees = round(float(np.linalg.norm(vector)), 1)
    if degrees == 0:
        return "inversion" if inverted else "0°"
    axis = vector / np.abs(vector).max()
    if degrees == 180:  # about the axis in either direction
        axis = axis * np.sign(axis[np.abs(axis).round(6).argmax()])
    elif axis.round(6).sum() < 0:
        axis, degrees = -axis, round(360 - degrees, 1)
    numbers = [f"{a:.2f}".rstrip("0").rstrip(".") for a in np.where(np.abs(axis) < 5e-3, 0.0, axis)]
    lone = np.flatnonzero(np.abs(axis) > 1e-6)
    along = "xyz"[lone[0]] if len(lone) == 1 else f"({', '.join(numbers)})"
    if inverted and degrees == 180:
        return f"mirror along {along}"
    return f"{degrees:g}° about {along}" + (", inverted" if inverted else "")


def as_drawn(values: Tensor) -> Tensor:
    """``values`` on the CPU without a graph, as float32: NumPy has no bfloat16."""
    return values.detach().float().cpu()


def transformed(x: GeometricTensor, element: GroupElement) -> GeometricTensor:
    """``x.transform(element)`` in any precision, without a graph: escnn goes through NumPy."""
    precise = x.tensor.detach() if x.tensor.dtype == torch.float64 else x.tensor.detach().float()
    coords = None if x.coords is None else x.coords.detach().double()
    found = GeometricTensor(precise, x.type, coords).transform(element)
    return GeometricTensor(found.tensor.to(x.tensor), x.type, None if coords is None else found.coords.to(x.coords))


def is_regular_map(value: object) -> bool:
    """Whether a value is a tensor of regular fields on a grid in the plane."""
    return (
        isinstance(value, GeometricTensor)
        and value.tensor.ndim == 4
        and not value.type.gspace.fibergroup.continuous
        and all(is_regular(r) for r in value.type.representations)
    )


def check_image(x: object) -> GeometricTensor:
    """``x``, if it is one image over the plane."""
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor")
    if x.type.gspace.dimensionality != 2 or x.tensor.ndim != 4 or len(x.tensor) != 1:
        raise ValueError(
            f"x: got shape {tuple(x.tensor.shape)} over {x.type.gspace.name}, needed one planar image (1, C, S, S)"
        )
    return x


def check_index(name: str, value: Any, count: int) -> int:
    """``value``, if it is an integer from 0 to ``count - 1``."""
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
    """The tables of a gspace over the plane."""
    if gspace.dimensionality != 2:
        raise ValueError(f"model: its gspace {gspace.name} has {gspace.dimensionality} dimensions, needed 2 to draw")
    return fibers(gspace)


def pose_indices(table: Fibers, poses: Sequence[int | GroupElement] | None) -> list[int]:
    """The indices of chosen poses, all by default."""
    if poses is None:
        return list(range(table.order))
    group = table.elements[0].group
    return [
        table.index(check_element("poses", pose, group))
        if isinstance(pose, GroupElement)
        else check_index("poses", pose, table.order)
        for pose in check_some("poses", poses)
    ]


def check_element(name: str, element: object, group: Group) -> GroupElement:
    """``element``, if it is one of ``group``."""
    if not isinstance(element, GroupElement):
        raise TypeError(f"{name}: got {element!r}, needed an element of {group.name}")
    if element.group != group:
        raise ValueError(f"{name}: got an element of {element.group.name}, needed one of {group.name}")
    return element


def check_some(name: str, values: Any) -> list[Any]:
    """``values`` as a list, if they are some."""
    if isinstance(values, (str, GroupElement)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {values!r}, needed a sequence")
    found = list(values)
    if not found:
        raise ValueError(f"{name}: got none, needed at least one")
    return found


def refuse_exported(model: object) -> None:
    """Refuse a network that was exported, which knows no group."""
    if not isinstance(model, torch.nn.Module) or gspace_of(model) is not None:
        return
    if any(type(module).__module__.startswith("escnn_attention.plain") for module in model.modules()):
        raise ValueError(
            f"model: the {type(model).__name__} was exported, and knows neither its group nor its fields any more;"
            " needed the network that it was exported from"
        )


@dataclass(frozen=True)
class Transformation:
    """A transformation of the image, and what it does to poses.

    It is the element g with the index ``element``; or the rotation by an ``angle`` in degrees, of which g is the
    nearest. ``background`` is the value around the image.
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
    """The columns of a picture: chosen elements or angles, by default the elements that map the grid onto itself."""
    table = planar(x.type.gspace)
    scalar = all(r.is_trivial() for r in x.type.representations)
    if background and not scalar:
        raise ValueError(f"background: got {background} around {x.type}, needed 0 for all but scalar fields")
    if angles is None:
        if elements is None:
            elements = [table.elements[i] for i in np.flatnonzero(is_signed_permutation(table.action))[:most]]
        chosen = check_some("elements", elements)
        index = [table.index(check_element("elements", g, table.elements[0].group)) for g in chosen]
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
