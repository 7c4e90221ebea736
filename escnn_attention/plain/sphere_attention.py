"""Self-attention between points of the sphere, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.points.call import Relate
from escnn_attention.geometry.points import Cloud
from escnn_attention.geometry.turns import points_in_rings
from escnn_attention.plain.blocks import Parts
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.point_attention import PointAttention, PointModule, from_poses


class Generators(NamedTuple):
    r"""The generators J of rotations :math:`\exp(\varphi J)` about z and y, ``(n, n)``, for fields ``(m, n)``."""

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
    """Features as they look from the frame of the point where they are, and back, for each distinct representation."""

    def __init__(self, generators: Sequence[Generators]):
        super().__init__()
        self._number = 0
        for part in generators:
            if not (part.about_y.any() or part.about_z.any()):
                continue  # Scalars look the same from everywhere.
            self.register_exact(f"columns_{self._number}", part.columns)
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
                matrix = _exponential(getattr(self, f"{axis}_{i}"), getattr(self, f"{axis}_waves_{i}"), angle)
                fields = fields @ matrix.transpose(-1, -2).to(fields.dtype)
            x = x.index_copy(1, columns.flatten(), fields.flatten(1).to(x.dtype))
        return x


def _exponential(generator: Tensor, waves: Tensor | None, angle: Tensor) -> Tensor:
    """The matrices ``(N, n, n)`` of rotations by angles ``(N,)``: sums of :func:`_waves_of` where there are some."""
    # In the precision of the generators, whatever autocast does, and not in half precision.
    precise = PRECISE[generator.dtype]
    angle = angle.to(precise)
    if waves is None:
        return torch.linalg.matrix_exp(angle[:, None, None] * generator.to(precise))
    phases = angle[:, None] * torch.arange(waves.shape[1], device=angle.device, dtype=precise)
    cosines, sines = waves.to(precise)
    return torch.einsum("nk,kij->nij", phases.cos(), cosines) + torch.einsum("nk,kij->nij", phases.sin(), sines)


def _waves_of(generator: np.ndarray) -> np.ndarray | None:
    r"""The matrices ``(2, K + 1, n, n)`` with :math:`\exp(\varphi J) = \sum_k A_k \cos k\varphi + B_k \sin k\varphi`.

    ONNX has no exponential of matrices. None for a generator J that is not antisymmetric.
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


class SphereAttention(PointAttention):
    """Attention between functions on the frames :math:`R(x) h` of points x, with h in the stabiliser of the north pole.

    What a frame sees of another is their quotient: the last column is the position of the key, the others
    are its axes. A query sees ``axes`` of them: 0 where keys have no poses, 1 for rotations, 2 with reflections.
    """

    def __init__(self, into: LocalFrames, out_of: LocalFrames, axes: int, **arguments: Any):
        super().__init__(**arguments)
        self.sees_offsets = False  # but frames
        self.into = into
        self.out_of = out_of
        self.axes = axes

    def compute(self, x: Tensor, cloud: Cloud) -> Tensor:
        angles = angles_of(cloud.coords.to(PRECISE[self.inverse_action.dtype]))
        where = (cloud.coords, cloud.batch, cloud.edge_index, self.neighbourhood, cloud.edge_attr)
        frames = points_in_rings(frames_at(*angles).flatten(1), *where)
        return self.out_of.outward(self.attend(self.into.inward(x, *angles), frames, cloud.measure), *angles)

    def relate(self) -> Relate:
        """The function of two points that the encoding gets: one frame as seen from the other."""
        return SeenOnSphere(self.inverse_action, self.axes, self.length_scale)


class SeenOnSphere:
    """Another point and its frames, as seen from every frame of a point: see :class:`SphereAttention`."""

    def __init__(self, inverse: Tensor, axes: int, length_scale: float):
        self._inverse, self._axes, self._length_scale = inverse, axes, length_scale

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """The key and its frames, ``(G, S, A, S or 1, K, 3 + 3 · axes)``, of ``(G, A, 1, 9)`` and ``(G, 1, K, 9)``."""
        query, key = query.unflatten(-1, (3, 3)), key.unflatten(-1, (3, 3))
        inverse, dtype = self._inverse.to(query.dtype), self._inverse.dtype
        # The difference is taken first: what one frame sees of a near point is a small number.
        apart = (key[..., 2] - query[..., 2]) / self._length_scale  # G, A, K, 3
        into = query.transpose(-1, -2)
        offset = from_poses((into @ apart.unsqueeze(-1)).squeeze(-1), inverse).unsqueeze(-2)
        if not self._axes:
            return offset.permute(0, 3, 1, 4, 2, 5).to(dtype)
        seen = torch.einsum("sij,gakjl->gaksil", inverse, into @ key)  # of the key's own frame
        stabiliser = inverse.transpose(-1, -2)[..., : self._axes]  # S, 3, axes
        axes = torch.einsum("gaksij,tjn->gakstni", seen, stabiliser).flatten(-2)
        whole = torch.cat([offset.expand(*axes.shape[:-1], 3), axes], dim=-1)  # G, A, K, S, S, 3 + 3 · axes
        return whole.permute(0, 3, 1, 4, 2, 5).to(dtype)


class SphereFeedForward(Parts):
    """At every point ``frames``, ``expand``, a SiLU, ``contract``: ``(N, in)`` to ``(N, in)``."""

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        angles = angles_of(coords.to(PRECISE[self.contract.weight.dtype]))
        hidden = torch.nn.functional.silu(self.expand(self.frames.inward(x, *angles).unsqueeze(0)))
        return self.frames.outward(self.contract(hidden).squeeze(0), *angles)


class SphereTransformerBlock(Parts, PointModule):
    """A transformer block whose pointwise network sees where points are."""

    def compute(self, x: Tensor, cloud: Cloud) -> Tensor:
        coords, edge_index, batch, measure, edge_attr, _ = cloud
        features = () if edge_attr is None else (edge_attr,)
        attended = self.attention(self.norms[0](x), coords, edge_index, batch, None, measure, *features)
        y = self.dropout(attended)
        y = self.shortcut(x) + self.drop_path(self.gains[0](y) if len(self.gains) else y, batch)
        z = self.dropout(self.network(self.norms[1](y), coords))
        out: Tensor = y + self.drop_path(self.gains[1](z) if len(self.gains) else z, batch)
        return out
