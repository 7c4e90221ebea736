"""Images as they look after a rotation: functions of the plane, and arrays by interpolation."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage
from torch import Tensor

from escnn_attention._checks import check_int

__all__ = ["grid_coordinates", "rotate_images", "smooth_images"]

_WAVES = 8
_PERIODS = 3.0  # of the fastest wave, across the image


def smooth_images(size: int, degrees: float = 0.0, *, number: int = 1, channels: int = 1, seed: int = 0) -> Tensor:
    """Smooth images as functions of the plane, seen on a grid after a rotation: no interpolation, whatever the angle.

    Sums of waves with at most three periods across the image, within a disc at whose edge they fade out.

    Args:
        size: the side of the grid.
        degrees: the angle, counter-clockwise about the centre.
        number: of images.
        channels: of each image.
        seed: what the waves are drawn with.

    Returns:
        ``(number, channels, size, size)`` in float64, of unit variance about the centre.

    Raises:
        TypeError: a size, number or channels that is not an integer.
        ValueError: one below 1.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance.images import smooth_images
        >>> upright, rotated = smooth_images(9), smooth_images(9, 90)
        >>> torch.allclose(upright.rot90(1, (-2, -1)), rotated)
        True
    """
    for name, value in (("size", size), ("number", number), ("channels", channels)):
        check_int(name, value)
    random = np.random.default_rng(seed)
    shape = (number, channels, _WAVES)
    # Waves are uniform in the disc of those with at most so many periods; phases are in radians.
    periods = _PERIODS * np.sqrt(random.uniform(size=shape))
    direction, phase = random.uniform(0, 2 * math.pi, (2, *shape))
    strength = random.normal(size=shape) * math.sqrt(2 / _WAVES)
    x, y = grid_coordinates(size)
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = c * x + s * y, c * y - s * x  # what is seen here was there before the rotation
    along = np.einsum("ncw,ij->ncwij", np.cos(direction), x) + np.einsum("ncw,ij->ncwij", np.sin(direction), y)
    waves = np.cos(math.pi * periods[..., None, None] * along + phase[..., None, None])
    fade = np.clip((0.95 - np.hypot(x, y)) / 0.4, 0, 1)
    return torch.from_numpy((strength[..., None, None] * waves).sum(axis=2) * np.sin(math.pi / 2 * fade) ** 2)


def rotate_images(images: Tensor, degrees: float, *, background: float = 0.0) -> Tensor:
    """Square images rotated about their centres, counter-clockwise.

    Rotations by multiples of 90° move pixels and change no value; what is left, at most 45°, is cubic interpolation.

    Args:
        images: ``(..., S, S)``.
        degrees: the angle.
        background: the value around an image.

    Returns:
        of the same shape, precision and device.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance.images import rotate_images
        >>> rotate_images(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 90)
        tensor([[2., 4.],
                [1., 3.]])
    """
    if images.ndim < 2 or images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images: got shape {tuple(images.shape)}, needed square images (..., S, S)")
    quarters = round(degrees / 90)
    rotated = images.rot90(quarters % 4, (-2, -1))
    rest = degrees - 90 * quarters
    if abs(rest) < 1e-9 or not images.numel():
        return rotated
    c, s = math.cos(math.radians(rest)), math.sin(math.radians(rest))
    matrix = np.array([[c, s], [-s, c]])  # from (row, column) after the rotation to (row, column) before it
    centre = np.full(2, (images.shape[-1] - 1) / 2)
    flat = rotated.detach().cpu().double().reshape(-1, *images.shape[-2:]).numpy()
    found = [
        ndimage.affine_transform(
            image, matrix, centre - matrix @ centre, order=3, mode="grid-constant", cval=background
        )
        for image in flat
    ]
    return torch.from_numpy(np.stack(found)).reshape(images.shape).to(images.device, images.dtype)


def grid_coordinates(size: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Coordinates x and y, ``(size, size)`` each, in units of half the side of the grid, y upwards.

    Example:
        >>> from escnn_attention.equivariance.images import grid_coordinates
        >>> x, y = grid_coordinates(2)
        >>> x.tolist(), y.tolist()
        ([[-0.5, 0.5], [-0.5, 0.5]], [[0.5, 0.5], [-0.5, -0.5]])
    """
    axis = (np.arange(size) - (size - 1) / 2) / (size / 2)
    x, y = np.meshgrid(axis, -axis)
    return x, y
