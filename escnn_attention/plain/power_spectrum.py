"""The lengths of the irreducible parts of features, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["PowerSpectrum", "SpectrumKind"]

SpectrumKind = Literal["norm", "square"]


class PowerSpectrum(ExactBuffers):
    """The length of each irreducible part of ``(B, size, *space)``, and the trivial parts as they are.

    Args:
        parts: for all fields of one representation their channels ``(m, n)``, the matrix ``(n, n)`` to its irreps, the
            irrep of each of the n coordinates, which of the irreps are trivial, and the places of the m · k outcomes.
        kind: ``"norm"``, or ``"square"`` for its square, with the mean over the coordinates.
    """

    order: Tensor

    def __init__(
        self, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]], kind: SpectrumKind
    ):
        super().__init__()
        self.kind: SpectrumKind = kind
        self.number = len(parts)
        self.trivial: list[list[bool]] = []
        places = []
        for i, (columns, matrix, irreps, trivial, place) in enumerate(parts):
            self.register_buffer(f"columns_{i}", torch.as_tensor(columns), persistent=False)
            self.register_exact(f"matrix_{i}", matrix)
            self.trivial.append(trivial.tolist())
            for number in range(len(trivial)):
                coordinates = torch.as_tensor((irreps == number).nonzero()[0])
                self.register_buffer(f"coordinates_{i}_{number}", coordinates, persistent=False)
            places.append(place.ravel())
        self.register_buffer("order", torch.as_tensor(np.concatenate(places).argsort()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        found = []
        for i in range(self.number):
            columns = getattr(self, f"columns_{i}")
            fields = rows.index_select(-1, columns.flatten()).unflatten(-1, columns.shape)
            parts = fields @ getattr(self, f"matrix_{i}").to(x.dtype).T
            found.append(self._lengths(parts, i).flatten(-2))
        return torch.cat(found, dim=-1).index_select(-1, self.order).movedim(-1, 1)

    def _lengths(self, parts: Tensor, i: int) -> Tensor:
        """The lengths ``(..., m, k)`` of the irreps of coordinates ``(..., m, n)``, of the i-th representation."""
        lengths = []
        for number, is_trivial in enumerate(self.trivial[i]):
            part = parts.index_select(-1, getattr(self, f"coordinates_{i}_{number}"))
            if is_trivial:
                lengths.append(part.squeeze(-1))
            elif self.kind == "square":
                lengths.append(part.square().mean(-1))
            elif part.shape[-1] == 1:
                # PyTorch before 2.13 keeps the axis of a single number when it writes a norm down.
                lengths.append(part.squeeze(-1).abs())
            else:
                lengths.append(torch.linalg.vector_norm(part, dim=-1))
        return torch.stack(lengths, dim=-1)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"
