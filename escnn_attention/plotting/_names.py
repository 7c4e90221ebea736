"""Names of group elements, for people."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def name_element(matrix: npt.NDArray[np.floating[Any]]) -> str:
    """A name for the orthogonal ``matrix`` of a group element, which acts on (x, y) with y upwards, or on (x, y, z).

    In the plane rotations are named by their angle, counter-clockwise; reflections by the angle by which the image is
    rotated after its left and right have changed sides. In space rotations are named by their angle about an axis.

    Args:
        matrix: 2×2 or 3×3.

    Returns:
        The name.

    Raises:
        ValueError: the matrix has another shape.

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
    cosine = float(np.clip((np.trace(rotation) - 1) / 2, -1, 1))
    degrees = round(math.degrees(math.acos(cosine)), 1)
    if degrees == 0:
        return "inversion" if inverted else "0°"
    # The symmetric part has the axis without a sign, the skew part the sign, but of rotations by 180°.
    line = rotation + rotation.T - 2 * cosine * np.eye(3)
    axis = line[:, int(np.abs(np.diag(line)).round(6).argmax())]
    axis = axis / np.abs(axis).max()
    skew = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    axis = axis * (np.sign(axis @ skew) if degrees < 180 else np.sign(axis[np.abs(axis).round(6).argmax()]))
    if degrees < 180 and axis.round(6).sum() < 0:
        axis, degrees = -axis, round(360 - degrees, 1)
    numbers = [f"{a:.2f}".rstrip("0").rstrip(".") for a in np.where(np.abs(axis) < 5e-3, 0.0, axis)]
    lone = np.flatnonzero(np.abs(axis) > 1e-6)
    along = "xyz"[lone[0]] if len(lone) == 1 else f"({', '.join(numbers)})"
    if inverted and degrees == 180:
        return f"mirror along {along}"
    return f"{degrees:g}° about {along}" + (", inverted" if inverted else "")
