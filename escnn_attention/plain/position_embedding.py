"""A learned field that is the same for all inputs, on plain tensors."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.encodings import Encoding
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.cloud_pooling import count_clouds, offsets_from_mean
from escnn_attention.plain.projections import FromPoses

__all__ = ["PositionEmbedding"]


class PositionEmbedding(ExactBuffers):
    """Adds a learned function of the position to features ``(B, size, *space)``, or ``(N, size)`` at points.

    Args:
        encoding: the function, bound with one head and one pose.
        project_out: from its channels at every pose to the features.
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        length_scale: the length that is 1 to the function, between points.
    """

    inverse_action: Tensor

    def __init__(self, encoding: Encoding, project_out: FromPoses, inverse_action: np.ndarray, length_scale: float):
        super().__init__()
        self.encoding = encoding
        self.project_out = project_out
        self.length_scale = length_scale
        self.register_exact("inverse_action", inverse_action)

    def forward(
        self, x: Tensor, coords: Tensor | None = None, batch: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Features with their positions: see :meth:`escnn_attention.PositionEmbedding.forward`."""
        if coords is None:
            grid = Grid(tuple(x.shape[2:]), Window(), dtype=self.inverse_action.dtype, device=x.device)
            field = self._field(grid.coordinates).to(x.dtype)
            return x + field.T.unflatten(1, x.shape[2:])
        precise = coords.to(working_precision(self.inverse_action.dtype))
        offsets = offsets_from_mean(precise, batch, count_clouds(batch, coords, mask), mask)
        y = x + self._field((offsets / self.length_scale).to(self.inverse_action.dtype)).to(x.dtype)
        return y if mask is None else y * mask.to(y.dtype)[:, None]

    def _field(self, points: Tensor) -> Tensor:
        """The field at points ``(N, d)``: ``(N, size)``."""
        seen = self.encoding.offsets(points @ self.inverse_action.transpose(-1, -2))  # 1, |H|, N, C
        assert seen is not None
        field: Tensor = self.project_out(seen.transpose(1, 2).unsqueeze(1))
        return field.squeeze(0)
