"""An encoding as all poses of a query together see it."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.encodings.bias import Offers

__all__ = ["FromAllPoses"]


class FromAllPoses:
    r"""What an encoding is to a single pose that has the channels of all: :math:`\rho(h^{-1}\delta)` for every h, side
    by side.

    With queries and keys of all poses side by side, too, the score of that pose is the sum of the scores of all.

    Args:
        encoding: a bound encoding that is a function of the offset, added to the keys.
        inverse: ``(|H|, d, d)``; the matrices by which every pose sees points.
    """

    absolute = False
    rotates_values = False

    def __init__(self, encoding: Offers, inverse: Tensor):
        self.dim = encoding.dim
        self._encoding, self._inverse = encoding, inverse

    @property
    def identity(self) -> Tensor:
        """``(1, d, d)``, the matrix by which the single pose sees points."""
        return torch.eye(self._inverse.shape[-1], dtype=self._inverse.dtype, device=self._inverse.device).unsqueeze(0)

    def offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset, ``(M or 1, ..., |H| · C)`` at ``(..., d)``."""
        values = self._encoding.offsets(torch.einsum("hij,...j->...hi", self._inverse.to(delta.dtype), delta))
        return None if values is None else values.flatten(-2)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features ``(B, |H| · F, n)`` at offsets ``(B, d, n)``; what reads them, ``(M or 1, |H| · C, |H| · F)``."""
        seen = torch.einsum("hij,bjn->hbin", self._inverse.to(columns.dtype), columns)
        offered = self._encoding.features(seen.flatten(0, 1))
        if offered is None:
            return None
        return offered[0].unflatten(0, seen.shape[:2]).transpose(0, 1).flatten(1, 2), self._of_each(offered[1])

    def waves(self) -> tuple[Tensor, Tensor] | None:
        """Frequencies ``(|H| · F, d)`` and what reads cosines and sines, ``(M or 1, |H| · C, 2 · |H| · F)``."""
        offered = self._encoding.waves()
        if offered is None:
            return None
        frequencies, readout = offered
        parts = [self._of_each(part) for part in readout.chunk(2, dim=-1)]
        return (frequencies @ self._inverse.to(frequencies.dtype)).flatten(0, 1), torch.cat(parts, dim=-1)

    def rotations(self) -> None:
        """None: the encoding is added to the keys."""

    def poses(self, relative: Tensor | None = None) -> None:
        """None: a pose sees keys of its own pose only, for which there is one number."""

    def _of_each(self, readout: Tensor) -> Tensor:
        """A matrix ``(M or 1, C, F)`` for each pose, ``(M or 1, |H| · C, |H| · F)``."""
        each = torch.eye(len(self._inverse), dtype=readout.dtype, device=readout.device)
        return torch.einsum("mcf,hg->mhcgf", readout, each).flatten(3, 4).flatten(1, 2)
