r"""Frames at the points of the sphere, on plain tensors.

The frame of a point x is the rotation :math:`R(x) = R_z(\varphi) R_y(\theta)` to its longitude and colatitude: it maps
the north pole to x, and the first two axes to the directions south and east.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention._precision import working_precision
from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["Generators", "LocalFrames", "angles_of", "frames_at"]


class Generators(NamedTuple):
    r"""What rotations about two axes do to the fields of one representation.

    Attributes:
        columns: ``(m, n)``; the channels of the m fields of this representation.
        about_z: ``(n, n)``; :math:`\rho(R_z(\varphi)) = \exp(\varphi J_z)`.
        about_y: ``(n, n)``; the same about y.
    """

    columns: np.ndarray
    about_z: np.ndarray
    about_y: np.ndarray


def angles_of(coords: Tensor) -> tuple[Tensor, Tensor]:
    """Colatitude and longitude of points ``(N, 3)``, of any length. At the poles both have a gradient of 0."""
    x, y, z = coords.unbind(-1)
    planar = x.square() + y.square()
    pole = planar == 0
    colatitude = torch.atan2(planar.masked_fill(pole, 1.0).sqrt().masked_fill(pole, 0.0), z)
    return colatitude, torch.atan2(y, x.masked_fill(pole, 1.0))


def frames_at(colatitude: Tensor, longitude: Tensor) -> Tensor:
    """The matrices :math:`R(x)`, ``(N, 3, 3)``, whose columns are the axes of the frame of each point."""
    ct, st, cp, sp = colatitude.cos(), colatitude.sin(), longitude.cos(), longitude.sin()
    rows = [cp * ct, -sp, cp * st, sp * ct, cp, sp * st, -st, torch.zeros_like(st), ct]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


class LocalFrames(ExactBuffers):
    """Features as they look from the frame of the point where they are, and back.

    Args:
        generators: one entry for each distinct representation.
    """

    def __init__(self, generators: Sequence[Generators]):
        super().__init__()
        self._number = 0
        for part in generators:
            if not (part.about_y.any() or part.about_z.any()):
                continue  # Scalars look the same from everywhere.
            self.register_buffer(f"columns_{self._number}", torch.as_tensor(part.columns), persistent=False)
            for axis, generator in (("z", part.about_z), ("y", part.about_y)):
                self.register_exact(f"{axis}_{self._number}", generator)
                self.register_exact(f"{axis}_waves_{self._number}", _waves_of(generator))
            self._number += 1

    def inward(self, x: Tensor, colatitude: Tensor, longitude: Tensor) -> Tensor:
        r"""Features in the frame of their point, ``(N, size)``: :math:`\rho(R(x))^{-1} f(x)`."""
        return self._rotate(x, [("z", -longitude), ("y", -colatitude)])

    def outward(self, x: Tensor, colatitude: Tensor, longitude: Tensor) -> Tensor:
        r"""Features out of the frame of their point, ``(N, size)``: :math:`\rho(R(x)) f(x)`."""
        return self._rotate(x, [("y", colatitude), ("z", longitude)])

    def _rotate(self, x: Tensor, rotations: Sequence[tuple[str, Tensor]]) -> Tensor:
        for i in range(self._number):
            columns = getattr(self, f"columns_{i}")
            fields = x[:, columns]  # N, m, n
            for axis, angle in rotations:
                generator = getattr(self, f"{axis}_{i}")
                # In the precision of the generators, whatever autocast does, and not in half precision.
                precise = working_precision(generator.dtype)
                waves = getattr(self, f"{axis}_waves_{i}") if exporting() else None
                if waves is None:
                    matrix = torch.linalg.matrix_exp(angle.to(precise)[:, None, None] * generator.to(precise))
                else:
                    matrix = _sum_of_waves(angle.to(precise), waves.to(precise))
                fields = fields @ matrix.transpose(-1, -2).to(fields.dtype)
            x = x.index_copy(1, columns.flatten(), fields.flatten(1).to(x.dtype))
        return x


def _waves_of(generator: np.ndarray) -> np.ndarray | None:
    r"""The matrices :math:`A_k, B_k` with :math:`\exp(\varphi J) = \sum_k A_k \cos k\varphi + B_k \sin k\varphi`.

    ONNX has no exponential of matrices. None for a generator J that is not antisymmetric.

    Returns:
        ``(2, K + 1, n, n)``.
    """
    if not np.allclose(generator, -generator.T, atol=1e-9):
        return None
    frequencies, vectors = np.linalg.eigh(-1j * generator)
    orders = np.rint(frequencies).astype(int)
    if not np.allclose(frequencies, orders, atol=1e-6):
        return None
    waves = np.zeros((2, orders.max() + 1, *generator.shape))
    for order, vector in zip(orders, vectors.T, strict=True):
        projector = np.outer(vector, vector.conj())
        waves[0, abs(order)] += projector.real
        waves[1, abs(order)] -= np.sign(order) * projector.imag
    return waves


def _sum_of_waves(angle: Tensor, waves: Tensor) -> Tensor:
    """The matrices ``(N, n, n)`` of rotations by angles ``(N,)``, of :func:`_waves_of`."""
    phases = angle[:, None] * torch.arange(waves.shape[1], device=angle.device, dtype=angle.dtype)
    return torch.einsum("nk,kij->nij", phases.cos(), waves[0]) + torch.einsum("nk,kij->nij", phases.sin(), waves[1])
