"""Fiber groups by name, and how their elements transform images."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
from escnn import gspaces
from escnn.gspaces import GSpace
from scipy import ndimage

from escnn_attention.groups.fibers import fibers, is_signed_permutation
from escnn_attention.plotting import name_element
from escnn_attention.training.errors import UserError

_LARGEST_ORDER = 32


def describe_gspace(name: str) -> dict[str, Any]:
    """The plane with the group ``cN`` or ``dN``, as a configuration file describes it; see :func:`gspace_by_name`."""
    match = re.fullmatch(r"([cd])([1-9]\d{0,3})", name.lower())
    if match is None:
        raise UserError(
            f"unknown group {name!r}: give cN for rotations by 360°/N or dN with reflections, for example c4 or d4"
        )
    kind, fold = match[1], int(match[2])
    order = fold if kind == "c" else 2 * fold
    if order < 2:
        raise UserError("group 'c1' is no symmetry at all: choose c2 or more")
    if order > _LARGEST_ORDER:
        raise UserError(f"group {name!r} has {order} elements: choose one with at most {_LARGEST_ORDER}")
    if name.lower() == "d1":
        return {"class_path": "escnn.gspaces.flip2dOnR2"}
    space = "rot2dOnR2" if kind == "c" else "flipRot2dOnR2"
    return {"class_path": f"escnn.gspaces.{space}", "init_args": {"N": fold}}


def gspace_by_name(name: str) -> GSpace:
    """The plane with the group ``cN`` (rotations by 360°/N) or ``dN`` (these and reflections).

    Args:
        name: ``"c2"``, ``"c4"``, ``"c8"``, …, ``"d1"``, ``"d4"``, …; upper case is accepted.

    Raises:
        UserError: another name, the trivial group, or more than 32 elements.

    Example:
        >>> gspace_by_name("d4").fibergroup.order()
        8
    """
    described = describe_gspace(name)
    space: GSpace = getattr(gspaces, described["class_path"].rpartition(".")[2])(**described.get("init_args", {}))
    return space


def grid_symmetries(gspace: GSpace) -> dict[str, npt.NDArray[np.float64]]:
    """The elements, other than the identity, that map a square grid of pixels onto itself.

    Returns:
        The 2×2 matrix of each, in (x, y) with y upwards, by its name. Empty for groups such as C3.
    """
    table = fibers(gspace)
    return {
        name_element(matrix): matrix
        for matrix in table.action
        if is_signed_permutation(matrix) and not np.allclose(matrix, np.eye(2))
    }


def transform_by_element(images: npt.NDArray[np.float32], matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Square images (..., S, S) under an element from :func:`grid_symmetries`: pixels change places, not values."""
    size = images.shape[-1]
    centre = (size - 1) / 2
    rows, columns = np.indices((size, size))
    # y grows upwards, rows downwards. What is seen at p afterwards was at the inverse of p before.
    p = np.stack([columns - centre, centre - rows])
    x, y = np.einsum("ij,jrc->irc", matrix.T, p)
    return images[..., np.rint(centre - y).astype(int), np.rint(x + centre).astype(int)]


def rotate_by_angles(images: npt.NDArray[np.float32], angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Images rotated about their centres, by cubic interpolation, with zeros beyond the border.

    Args:
        images: (N, H, W).
        angles: (N,) degrees, counter-clockwise.

    Returns:
        (N, H, W), clipped to the range of values of ``images``, which cubic interpolation overshoots.
    """
    rotated = np.empty_like(images)
    centre = (np.array(images.shape[1:]) - 1) / 2
    for image, angle, out in zip(images, angles, rotated, strict=True):
        c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        matrix = np.array([[c, s], [-s, c]])  # from (row, column) afterwards to (row, column) before
        ndimage.affine_transform(image, matrix, centre - matrix @ centre, output=out, order=3, mode="grid-constant")
    return rotated.clip(images.min(), images.max()) if len(images) else rotated


def random_angles(count: int, seed: int) -> npt.NDArray[np.float64]:
    """``count`` angles in degrees, uniform in [0, 360), the same for the same ``seed``."""
    return np.random.default_rng(seed).uniform(0.0, 360.0, count)
