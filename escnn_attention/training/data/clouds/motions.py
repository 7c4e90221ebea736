"""Rigid motions of clouds of points."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.data.sampling import Draw

__all__ = ["About", "Motions", "RandomMotions", "Rotation", "move", "moved_points", "random_rotations", "rotated"]

Rotation = Literal["z"] | bool
"""``True``: all rotations; ``"z"``: those about the third axis."""

About = Literal["mean", "origin"]
"""What clouds are rotated about: the mean of their points, or the origin."""


class Motions(NamedTuple):
    """A rigid motion of each cloud, x ↦ R(x − c) + c + t, where c is the mean of the cloud or the origin.

    Attributes:
        rotations: (B, d, d) R, orthogonal.
        translations: (B, d) t.
    """

    rotations: Tensor
    translations: Tensor


def moved_points(clouds: Clouds, motions: Motions, about: About = "mean") -> tuple[Tensor, Tensor]:
    """The coordinates (N, d) after the motions, in float64, and the centres c (B, d)."""
    coords = clouds.coords.double()
    centres = torch.zeros_like(motions.translations)
    if about == "mean":
        centres = centres.index_add(0, clouds.batch, coords) / clouds.batch.bincount(minlength=len(centres))[:, None]
    rotated_coords = rotated(coords - centres[clouds.batch], motions.rotations[clouds.batch], 1)
    return rotated_coords + (centres + motions.translations)[clouds.batch], centres


def rotated(values: Tensor, rotations: Tensor, order: int) -> Tensor:
    """Scalars, vectors or matrices (n, …, d, …, d) in new directions: v ↦ Rv, A ↦ RARᵀ.

    Args:
        values: the last ``order`` axes are of size d.
        rotations: (n, d, d).
        order: 0, 1 or 2.

    Raises:
        ValueError: another order.
    """
    if order == 0:
        return values
    if order == 1:
        return torch.einsum("nij,n...j->n...i", rotations, values)
    if order == 2:
        return torch.einsum("nij,n...jk,nlk->n...il", rotations, values, rotations)
    raise ValueError(f"order: got {order}, needed 0 (scalars), 1 (vectors) or 2 (matrices)")


def move(
    clouds: Clouds, motions: Motions, *, about: About = "mean", target_order: int = 0, point_target_order: int = 0
) -> Clouds:
    """The clouds after a rigid motion of each, and what their targets become.

    Args:
        clouds: what is moved.
        motions: one of each cloud; they are applied in float64.
        about: what the clouds are rotated about: the mean of their points, or the origin.
        target_order: how targets change: 0, not at all; 1, like vectors (B, …, d); 2, like matrices (B, …, d, d).
        point_target_order: likewise for targets of points.

    Example:
        >>> import torch
        >>> clouds = Clouds(torch.tensor([[1.0, 0.0]]), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64),
        ...                 torch.tensor([[1.0, 0.0]]))
        >>> quarter = Motions(torch.tensor([[[0.0, -1.0], [1.0, 0.0]]]).double(), torch.tensor([[0.0, 5.0]]).double())
        >>> moved = move(clouds, quarter, about="origin", target_order=1)
        >>> moved.coords.tolist(), moved.targets.tolist()
        ([[0.0, 6.0]], [[0.0, 1.0]])
    """
    coords, _ = moved_points(clouds, motions, about)
    return clouds._replace(
        coords=coords.to(clouds.coords.dtype),
        targets=_with_order(clouds.targets, motions.rotations, target_order),
        point_targets=None
        if clouds.point_targets is None
        else _with_order(clouds.point_targets, motions.rotations[clouds.batch], point_target_order),
    )


def _with_order(values: Tensor, rotations: Tensor, order: int) -> Tensor:
    return rotated(values.double(), rotations, order).to(values.dtype) if order else values


class RandomMotions:
    """A random isometry of each cloud: a uniform rotation, a normal translation, and perhaps a reflection.

    The motion of a cloud is a function of the seed, the stream, the epoch and the number of the cloud: it does not
    depend on the batch, the worker or the process that the cloud is in.

    Args:
        length: number of clouds.
        dim: d.
        rotate: whether to rotate them, and how.
        translate: standard deviation of the translation along each axis.
        seed: of the random numbers.
        stream: of the random numbers; another stream has others.
        reflect: whether to mirror each with probability ½, along the first axis and before it is rotated.
    """

    def __init__(
        self,
        length: int,
        dim: int,
        rotate: Rotation,
        translate: float,
        seed: int,
        stream: int = 0,
        reflect: bool = False,
    ) -> None:
        self.length, self.dim, self.rotate, self.translate = length, dim, rotate, translate
        self.seed, self.stream, self.reflect = seed, stream, reflect
        self._epoch: int | None = None

    def __call__(self, draw: Draw) -> Motions:
        """The motions of the clouds of ``draw``, float64."""
        if draw.epoch != self._epoch:
            generator = np.random.default_rng((self.seed, draw.epoch, self.stream))
            self._rotations = random_rotations(self.length, self.dim, self.rotate, generator)
            self._translations = self.translate * generator.standard_normal((self.length, self.dim))
            if self.reflect:
                self._rotations[generator.integers(2, size=self.length) == 1, :, 0] *= -1
            self._epoch = draw.epoch
        chosen = np.asarray(draw.indices)
        return Motions(torch.from_numpy(self._rotations[chosen]), torch.from_numpy(self._translations[chosen]))


def random_rotations(count: int, dim: int, rotate: Rotation, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Rotation matrices (``count``, d, d), uniform: by Haar's measure of SO(d), or of SO(2) where ``rotate`` is "z".

    Args:
        count: how many.
        dim: d, 2 or 3.
        rotate: ``False`` gives identities.
        generator: of the random numbers.
    """
    if not rotate:
        return np.broadcast_to(np.eye(dim), (count, dim, dim)).copy()
    if dim == 3 and rotate != "z":
        # A unit quaternion that is uniform on the sphere is a rotation that is uniform by Haar's measure.
        normal = generator.standard_normal((count, 4))
        w, x, y, z = (normal / np.linalg.norm(normal, axis=1, keepdims=True)).T
        rows = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
        return np.moveaxis(np.array(rows), 2, 0).copy()
    angles = generator.uniform(0, 2 * np.pi, count)
    cos, sin = np.cos(angles), np.sin(angles)
    rotations = np.broadcast_to(np.eye(dim), (count, dim, dim)).copy()
    rotations[:, :2, :2] = np.moveaxis(np.array([[cos, -sin], [sin, cos]]), 2, 0)
    return rotations
