"""Features in the frames of rotations, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from escnn_attention.geometry.relations import rotation_vector
from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["Frames"]


class Frames(ExactBuffers):
    r"""Fields as they look from a frame that is rotated by R, :math:`\rho(R)^{-1} f`, and back, :math:`\rho(R) f`.

    The matrices are :math:`\exp(\sum_i \omega_i\, d\rho(X_i))`, with the rotation vector :math:`\omega`.

    Args:
        columns: for each representation ``(m, n)``, the channels of its m fields.
        generators: for each ``(k, n, n)``, the matrices of the rotations about each axis; one in the plane.

    Example:
        >>> import numpy as np, torch
        >>> from escnn_attention.plain.frames import Frames
        >>> vectors = Frames([np.array([[0, 1]])], [np.array([[[0.0, -1.0], [1.0, 0.0]]])])
        >>> vectors(torch.tensor([[1.0, 0.0]]), torch.tensor([[torch.pi / 2]])).round(decimals=3)
        tensor([[0., 1.]])
    """

    def __init__(self, columns: Sequence[np.ndarray], generators: Sequence[np.ndarray]):
        super().__init__()
        self.number = len(columns)
        for i, (of_fields, matrices) in enumerate(zip(columns, generators, strict=True)):
            self.register_buffer(f"columns_{i}", torch.as_tensor(of_fields), persistent=False)
            self.register_exact(f"generators_{i}", matrices)

    def forward(self, x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
        """Features ``(M, C)``, each rotated by one of the angles ``(M, 1)`` or quaternions ``(M, 4)``."""
        omega = rotation_vector(rotations)
        omega = -omega if inverse else omega
        for i in range(self.number):
            columns, generators = getattr(self, f"columns_{i}"), getattr(self, f"generators_{i}").to(omega.dtype)
            matrix = torch.matrix_exp((omega[:, :, None, None] * generators).sum(1))
            fields = x[:, columns.flatten()].unflatten(1, columns.shape)
            # Not a matrix product, which autocast has in half precision.
            after = (matrix.unsqueeze(1) * fields.unsqueeze(2)).sum(-1).to(x.dtype)
            x = x.index_copy(1, columns.flatten(), after.flatten(1))
        return x
