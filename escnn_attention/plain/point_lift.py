"""The lift of points to motions, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.geometry.cache import kept
from escnn_attention.geometry.points import ranks
from escnn_attention.geometry.relations import rotation_vector
from escnn_attention.plain.blocks import Parts
from escnn_attention.plain.buffers import ExactBuffers


class Frames(ExactBuffers):
    r"""Fields in the frame of a rotation, :math:`\rho(R)^{-1} f`, and back: :math:`\exp(\sum \omega_i\, d\rho(X_i))`.

    Args:
        columns: for each representation ``(m, n)``, the channels of its m fields.
        generators: for each ``(k, n, n)``, the matrices of the rotations about each axis; one in the plane.

    >>> vectors = Frames([np.array([[0, 1]])], [np.array([[[0.0, -1.0], [1.0, 0.0]]])])
    >>> vectors(torch.tensor([[1.0, 0.0]]), torch.tensor([[torch.pi / 2]])).round(decimals=3)
    tensor([[0., 1.]])
    """

    def __init__(self, columns: Sequence[np.ndarray], generators: Sequence[np.ndarray]):
        super().__init__()
        self.number = len(columns)
        for i, (of_fields, matrices) in enumerate(zip(columns, generators, strict=True)):
            self.register_exact(f"columns_{i}", of_fields)
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


class LiftedCloud(NamedTuple):
    """Points with S lifts each, side by side: motions ``(N · S, 3 or 7)``, and edges ``(2, E · S²)``."""

    x: Tensor
    coords: Tensor
    edge_index: Tensor | None
    batch: Tensor | None
    mask: Tensor | None
    measure: Tensor | None


class PointLift(torch.nn.Module):
    """The lift of points with rotations that are drawn for each: see :class:`escnn_attention.PointLift`."""

    def __init__(self, dim: int, num_samples: int, positive_quaternions: bool = False, frames: Frames | None = None):
        super().__init__()
        self.frames = frames
        self.dim, self.num_samples, self.positive_quaternions = dim, num_samples, positive_quaternions

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        lifts: Tensor | None = None,
    ) -> LiftedCloud:
        """The lifted cloud, by ``lifts``: angles ``(N, S)``, or quaternions ``(N, S, 4)``; None to draw them."""
        number = self.num_samples
        rotations = self._checked(lifts, coords)
        if rotations is None:
            places = (batch, mask, coords.shape[0], coords.device)
            rotations = self.draw(len(coords)) if self.training else self.spread(kept(ranks, *places))
            if self.positive_quaternions:  # the same rotations
                rotations = torch.where(rotations[..., :1] < 0, -rotations, rotations)
        precise = PRECISE[coords.dtype]
        rotations = rotations.to(coords.device, precise).flatten(0, 1)
        x = x.repeat_interleave(number, 0)
        of_points = (None if t is None else t.repeat_interleave(number, 0) for t in (batch, mask, measure))
        return LiftedCloud(
            x if self.frames is None else self.frames(x, rotations, inverse=True),
            torch.cat([coords.to(precise).repeat_interleave(number, 0), rotations], dim=1),
            None if edge_index is None else _lifted_edges(edge_index, number),
            *of_points,
        )

    def _checked(self, lifts: Tensor | None, coords: Tensor) -> Tensor | None:
        """Angles ``(N, S, 1)`` or unit quaternions ``(N, S, 4)``."""
        if lifts is None:
            return None
        needed = (coords.shape[0], self.num_samples, *(() if self.dim == 2 else (4,)))
        if tuple(lifts.shape) != needed:
            what = "angles" if self.dim == 2 else "quaternions"
            raise ValueError(f"lifts: got shape {tuple(lifts.shape)}, needed {what} of shape {needed}")
        return lifts.unsqueeze(-1) if self.dim == 2 else F.normalize(lifts, dim=-1)

    def draw(self, number: int) -> Tensor:
        """Random lifts ``(N, S, 1 or 4)``, in the plane equally spaced, by torch's generator on the CPU."""
        if self.dim == 2:
            return self._from_first(torch.rand(number, dtype=torch.float64, device="cpu"))
        # Gaussian directions in four dimensions are uniform.
        return F.normalize(torch.randn(number, self.num_samples, 4, dtype=torch.float64, device="cpu"), dim=-1)

    def spread(self, index: Tensor) -> Tensor:
        """The lifts ``(N, S, 1 or 4)`` at places ``(N,)`` of a sequence that fills the rotations evenly.

        Multiples of powers of the generalised golden ratio, the root of :math:`x^{d+1} = x + 1`, are spread evenly in a
        cube; from there a map that keeps volumes leads to the quaternions.
        """
        if self.dim == 2:
            return self._from_first((index.double() * _GOLDEN[1]).frac())
        places = (index * self.num_samples).unsqueeze(-1) + torch.arange(self.num_samples, device=index.device)
        u, v, w = ((places.double() * _GOLDEN[3] ** k + 0.5).frac() for k in (1, 2, 3))
        near, far, v, w = (1 - u).sqrt(), u.sqrt(), 2 * math.pi * v, 2 * math.pi * w
        return torch.stack([near * v.sin(), near * v.cos(), far * w.sin(), far * w.cos()], dim=-1)

    def _from_first(self, turns: Tensor) -> Tensor:
        """Angles that are equally far from each other, ``(N, S, 1)``, from one of each point."""
        steps = torch.arange(self.num_samples, dtype=turns.dtype, device=turns.device) / self.num_samples
        return 2 * math.pi * (turns[:, None] + steps).unsqueeze(-1)


_GOLDEN = {1: 0.6180339887498949, 3: 0.8191725133961645}
"""The inverse of the generalised golden ratio of so many dimensions."""


def _lifted_edges(edge_index: Tensor, number: int) -> Tensor:
    """Edges from every lift of a key to every lift of a query."""
    lifts = torch.arange(number, device=edge_index.device)
    keys, queries = edge_index[:, :, None, None] * number
    pairs = torch.broadcast_tensors(keys + lifts[:, None], queries + lifts)
    return torch.stack([pair.flatten() for pair in pairs])


class LiftedNetwork(Parts):
    """A ``network`` of ``(x, coords, edge_index, batch, mask, measure)`` behind a ``lift``."""

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        lifts: Tensor | None = None,
    ) -> Tensor:
        """The output of the network: see :meth:`escnn_attention.models.LieTransformer.forward`."""
        y: Tensor = self.network(*self.lift(x, coords, edge_index, batch, mask, measure, lifts))
        return y
