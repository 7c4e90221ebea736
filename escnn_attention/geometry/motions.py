r"""Motions of the plane and of space as points: numbers, their quotients and their logarithms.

A motion :math:`g = (x, R)` of SE(2) is the numbers :math:`(x, \theta)`, with the angle of its rotation; of SE(3) the
numbers :math:`(x, q)`, with a unit quaternion, real part first. Both quaternions q and -q are the same rotation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["MOTION_SIZES", "dim_of_motions", "inverse_of_v", "product", "quotient", "rotate", "rotation_vector"]

_JUMP = 7e-3
"""How far beyond a half turn the logarithm of an angle jumps, as in the published implementation of LieConv."""

MOTION_SIZES = {2: 3, 3: 7}
"""The numbers of a motion of the plane and of space."""


def dim_of_motions(g: Tensor) -> int:
    """The dimension of the space that motions ``(..., 3)`` or ``(..., 7)`` move."""
    return 2 if g.shape[-1] == MOTION_SIZES[2] else 3


def quotient(g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    r"""The translation ``(..., d)`` and the rotation of :math:`g^{-1} h`: an angle ``(..., 1)``, or a quaternion.

    Args:
        g, h: motions ``(..., 3)`` or ``(..., 7)``, which broadcast against each other.
    """
    dim = dim_of_motions(g)
    back = _inverse(g[..., dim:])
    return rotate(back, h[..., :dim] - g[..., :dim]), product(back, h[..., dim:])


def product(a: Tensor, b: Tensor) -> Tensor:
    """The rotation b, then a: angles ``(..., 1)``, or quaternions ``(..., 4)``."""
    if a.shape[-1] == 1:
        return a + b
    real, other = a[..., :1], b[..., :1]
    u, v = a[..., 1:], b[..., 1:]
    return torch.cat([real * other - (u * v).sum(-1, keepdim=True), real * v + other * u + _cross(u, v)], dim=-1)


def rotate(rotation: Tensor, x: Tensor) -> Tensor:
    """Vectors ``(..., d)``, rotated by angles ``(..., 1)`` or quaternions ``(..., 4)``."""
    if rotation.shape[-1] == 1:
        return rotation.cos() * x + rotation.sin() * torch.stack([-x[..., 1], x[..., 0]], dim=-1)
    real, axis = rotation[..., :1], rotation[..., 1:]
    across = 2 * _cross(axis, x)
    return x + real * across + _cross(axis, across)


def rotation_vector(rotation: Tensor) -> Tensor:
    r"""The logarithm of rotations, about a half turn at most: ``(..., 1)`` of angles, ``(..., 3)`` of quaternions.

    Angles are between :math:`-\pi + 0.007` and :math:`\pi + 0.007`: rounding has no say in half turns, which evenly
    spaced rotations of the plane have between them.
    """
    if rotation.shape[-1] == 1:
        angle = torch.atan2(rotation.sin(), rotation.cos())
        return torch.where(angle < _JUMP - math.pi, angle + 2 * math.pi, angle)
    rotation = torch.where(rotation[..., :1] < 0, -rotation, rotation)
    real, axis = rotation[..., :1], rotation[..., 1:]
    square = axis.square().sum(-1, keepdim=True)
    still = square == 0
    length = torch.where(still, 1.0, square).sqrt()
    return axis * torch.where(still, 2.0, 2 * torch.atan2(length, real) / length)


def inverse_of_v(omega: Tensor, x: Tensor) -> Tensor:
    r"""The translation of the logarithm of a motion by x that rotates by :math:`\omega`, ``(..., d)``.

    .. math:: V^{-1} x = x - \tfrac12 \omega \times x
        + \tfrac{1}{\theta^2}\left(1 - \tfrac{\theta}{2}\cot\tfrac{\theta}{2}\right) \omega \times (\omega \times x)

    Args:
        omega: ``(..., 1)`` or ``(..., 3)``, of length :math:`\theta` below 2π.
        x: ``(..., d)``.
    """
    square = omega.square().sum(-1, keepdim=True)
    small = square < 1e-12
    half = torch.where(small, 1.0, square).sqrt() / 2
    factor = torch.where(small, 1 / 12, (1 - half * half.cos() / half.sin()) / (4 * half.square()))
    across = _cross(omega, x)
    return x - across / 2 + factor * _cross(omega, across)


def _inverse(rotation: Tensor) -> Tensor:
    return -rotation if rotation.shape[-1] == 1 else torch.cat([rotation[..., :1], -rotation[..., 1:]], dim=-1)


def _cross(omega: Tensor, x: Tensor) -> Tensor:
    """The velocity of x in a rotation about ω; in the plane ω is a number."""
    if omega.shape[-1] == 1:
        return omega * torch.stack([-x[..., 1], x[..., 0]], dim=-1)
    (a, b, c), (u, v, w) = omega.unbind(-1), x.unbind(-1)
    return torch.stack([b * w - c * v, c * u - a * w, a * v - b * u], dim=-1)
