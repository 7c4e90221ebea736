"""Clouds of points in batches, their rigid motions, and data modules of clouds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial import transform
from torch import Tensor

from escnn_attention.plain.cloud_pooling import pool_clouds
from escnn_attention.training.data.base import (
    PARTS,
    Batches,
    DataInParts,
    GeneratedData,
    RandomChange,
    in_range,
    one_of,
)
from escnn_attention.training.errors import UserError


class Clouds(NamedTuple):
    """A batch of B clouds, laid end to end: N points in d dimensions altogether.

    Attributes:
        coords: (N, d) float32.
        features: (N, channels) float32; they do not change when a cloud is moved.
        batch: (N,) int64, the number of the cloud that each point is of, from 0 to B − 1, in order.
        targets: (B, …), one of each cloud: int64 for classes, float32 for numbers.
        point_targets: (N, …), one of each point, where the data has them.
        edge_attr: (B, n, n, channels) float32, where the data has them: the features of all pairs of points of each
            cloud, of the point that attends and of that which it attends to.

    Example:
        >>> import torch
        >>> clouds = Clouds(torch.zeros(5, 3), torch.ones(5, 1), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([4, 7]))
        >>> len(clouds.targets), clouds.batch.bincount().tolist()
        (2, [3, 2])
    """

    coords: Tensor
    features: Tensor
    batch: Tensor
    targets: Tensor
    point_targets: Tensor | None = None
    edge_attr: Tensor | None = None


class CloudsInMemory:
    """Clouds laid end to end: the fields of :class:`Clouds`, with the ``sizes`` (B,) in place of ``batch``.

    With a ``table`` (kinds, channels) the features (N,) are the kinds of the points.
    """

    def __init__(
        self,
        sizes: Tensor,
        coords: Tensor,
        features: Tensor,
        targets: Tensor,
        point_targets: Tensor | None = None,
        table: Tensor | None = None,
    ) -> None:
        of_points = {"coords": coords, "features": features, "point_targets": point_targets}
        for name, values in {**of_points, "targets": targets}.items():
            count, what = (int(sizes.sum()), "points") if name in of_points else (len(sizes), "clouds")
            if values is not None and len(values) != count:
                raise ValueError(f"{name}: got {len(values)}, needed one of each of {count} {what}")
        self.sizes = sizes.to(torch.int64)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.coords, self.features, self.targets = coords, features, targets
        self.point_targets, self.table = point_targets, table

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Clouds:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sizes = self.sizes[chosen]
        batch = torch.repeat_interleave(torch.arange(len(chosen)), sizes)
        # Where the points of each cloud begin here is taken away, and where they begin there is added.
        points = torch.arange(len(batch)) + (self.starts[chosen] - (sizes.cumsum(0) - sizes))[batch]
        features = self.features[points]
        features = features if self.table is None else self.table[features.to(torch.int64)]
        of_points = None if self.point_targets is None else self.point_targets[points]
        return Clouds(self.coords[points], features, batch, self.targets[chosen], of_points)


Array = npt.NDArray[np.float64]

Rotation = Literal["z"] | bool
"""``True``: all rotations; ``"z"``: those about the third axis."""


def moved_points(clouds: Clouds, rotations: Tensor, translations: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinates (N, d) after a rigid motion of each cloud, in float64, and the centres c (B, d).

    The motion is x ↦ R(x − c) + c + t, with c the mean of the points, R (B, d, d) and t (B, d).
    """
    coords = clouds.coords.double()
    centres = pool_clouds(coords, clouds.batch, len(translations), "mean")
    offsets = rotated(coords - centres[clouds.batch], rotations[clouds.batch], 1)
    return offsets + (centres + translations)[clouds.batch], centres


def rotated(values: Tensor, rotations: Tensor, order: int) -> Tensor:
    """Scalars, vectors or matrices (n, …, d, …, d) in new directions: v ↦ Rv, A ↦ RARᵀ, of the order 0, 1 or 2."""
    if order == 0:
        return values
    if order == 1:
        return torch.einsum("nij,n...j->n...i", rotations, values)
    if order == 2:
        return torch.einsum("nij,n...jk,nlk->n...il", rotations, values, rotations)
    raise ValueError(f"order: got {order}, needed 0 (scalars), 1 (vectors) or 2 (matrices)")


def move(clouds: Clouds, rotations: Tensor, translations: Tensor, target_order: int = 0) -> Clouds:
    """The clouds after a rigid motion of each (:func:`moved_points`), and what their targets become.

    These change not at all (``target_order`` 0), like vectors (B, …, d) (1), or like matrices (B, …, d, d) (2).
    """
    coords, _ = moved_points(clouds, rotations, translations)
    targets = rotated(clouds.targets.double(), rotations, target_order) if target_order else clouds.targets
    return clouds._replace(coords=coords.to(clouds.coords.dtype), targets=targets.to(clouds.targets.dtype))


def random_motions(
    count: int, dim: int, rotate: Rotation, translate: float, reflect: bool, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Rotations (``count``, d, d), half of them, at random, after a mirror if ``reflect``; and normal translations.

    These have the standard deviation ``translate`` along each axis.
    """
    rotations = random_rotations(count, dim, rotate, generator)
    translations = translate * generator.standard_normal((count, dim))
    if reflect:
        rotations[generator.integers(2, size=count) == 1, :, 0] *= -1
    return rotations, translations


def random_rotations(count: int, dim: int, rotate: Rotation, generator: np.random.Generator) -> Array:
    """Rotation matrices (``count``, d, d), uniform by Haar's measure of SO(d), or of SO(2) where ``rotate`` is "z".

    They are identities if ``rotate`` is false.
    """
    if rotate is True and dim == 3:
        # A unit quaternion that is uniform on the sphere is a rotation that is uniform by Haar's measure.
        return transform.Rotation.from_quat(generator.standard_normal((count, 4))[:, [1, 2, 3, 0]]).as_matrix()
    rotations = np.broadcast_to(np.eye(dim), (count, dim, dim)).copy()
    if rotate:
        angles = generator.uniform(0, 2 * np.pi, count)
        cos, sin = np.cos(angles), np.sin(angles)
        rotations[:, :2, :2] = np.moveaxis(np.array([[cos, -sin], [sin, cos]]), 2, 0)
    return rotations


def as_clouds(features: npt.NDArray[Any], targets: npt.NDArray[Any], frames: npt.NDArray[Any]) -> CloudsInMemory:
    """Trajectories of S systems of n bodies as clouds of n points, the positions in the first frame.

    The features are (S, n, C), the targets (S,). The positions and the momenta (or velocities) in T ``frames``
    (S, T, 2, n, d) become ``point_targets`` (S·n, T, 2, d).
    """
    count, bodies = features.shape[:2]
    by_body = torch.from_numpy(frames).permute(0, 3, 1, 2, 4).flatten(0, 1).float().contiguous()
    return CloudsInMemory(
        torch.full((count,), bodies),
        by_body[:, 0, 0].contiguous(),
        torch.from_numpy(features).flatten(0, 1).float(),
        torch.from_numpy(targets).float(),
        by_body,
    )


def move_trajectories(clouds: Clouds, rotations: Tensor, translations: Tensor) -> Clouds:
    """Trajectories, ``point_targets`` (N, T, 2, d), after a rigid motion of each: momenta and velocities rotate."""
    coords, centres = moved_points(clouds, rotations, translations)
    frames = clouds.point_targets
    if frames is None:
        raise ValueError("clouds: got none with point_targets, needed positions and momenta (N, T, 2, d)")
    of_points = rotations[clouds.batch]
    before, after = centres[clouds.batch], (centres + translations)[clouds.batch]
    positions = rotated(frames[:, :, 0].double() - before[:, None], of_points, 1) + after[:, None]
    momenta = rotated(frames[:, :, 1].double(), of_points, 1)
    return clouds._replace(
        coords=coords.to(clouds.coords.dtype), point_targets=torch.stack([positions, momenta], dim=2).to(frames.dtype)
    )


_BLOCK = 64  # clouds that are made from one seed


class PointClouds(DataInParts):
    """Clouds of points in three parts, ``"train"``, ``"valid"`` and ``"test"``, in batches that are :class:`Clouds`.

    Args:
        rotate_train: rotate each training cloud about its mean at random, in another way in each epoch: ``True``, or in
            three dimensions ``"z"`` for rotations about the third axis.
        rotate_test: rotate each test cloud at random, by the seed only. Validation clouds are left as they are.
        translate_train, translate_test: move each cloud by a normal vector, with this standard deviation on each axis.
        reflect_train: mirror each training cloud with probability ½, another half of them in each epoch. For targets
            that a mirror image has, too.
        **options: of :class:`~escnn_attention.training.data.base.DataInParts`, such as ``batch_size``.

    Attributes:
        dim: d.
        in_channels: channels of the features.

    Example:
        >>> from escnn_attention.training import Springs
        >>> data = Springs(num_train=8, batch_size=4, rotate_train=True)  # a PointClouds
        >>> data.setup("fit")
        >>> data.dim, data.in_channels, len(data.train_dataloader())
        (2, 2, 2)
    """

    things = "clouds"
    dim: int
    in_channels: int

    def __init__(
        self,
        *,
        rotate_train: Rotation = False,
        rotate_test: Rotation = False,
        translate_train: float = 0.0,
        translate_test: float = 0.0,
        reflect_train: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rotate_train, self.translate_train, self.reflect_train = rotate_train, translate_train, reflect_train
        self.rotate_test, self.translate_test = rotate_test, translate_test
        self.mover: Callable[[Clouds, Tensor, Tensor], Clouds] = move
        one_of((False, True, "z"), rotate_train=rotate_train, rotate_test=rotate_test)
        one_of((False, True), reflect_train=reflect_train)
        in_range(0, translate_train=translate_train, translate_test=translate_test)
        for name, rotate in (("rotate_train", rotate_train), ("rotate_test", rotate_test)):
            if rotate == "z" and self.dim != 3:
                raise UserError(f'{name}: got "z", but the clouds have {self.dim} dimensions: needed true or false')

    def _batches(self, part: str) -> Batches:
        source: Any = self._sources[part]
        change: tuple[Rotation, float, bool] = {
            "train": (self.rotate_train, self.translate_train, self.reflect_train),
            "valid": (False, 0.0, False),
            "test": (self.rotate_test, self.translate_test, False),
        }[part]
        if not any(change):
            return Batches(source)
        numbers = functools.partial(random_motions, len(source), self.dim, *change)
        return Batches(source, RandomChange(self.mover, numbers, self.seed, PARTS.index(part)))


class GeneratedClouds(GeneratedData, PointClouds):
    """Clouds that the package makes: each is a function of the seed, its part and its number in it alone."""

    def _in_blocks(
        self, part: str, make: Callable[[int, np.random.Generator], tuple[npt.NDArray[Any], ...]]
    ) -> tuple[npt.NDArray[Any], ...]:
        """Arrays of one entry a cloud of ``part``, made by ``make`` in blocks with random numbers of their own."""
        count = self.sizes[part]
        blocks = [
            make(_BLOCK, np.random.default_rng((self.seed, PARTS.index(part), block)))
            for block in range(-(-count // _BLOCK))
        ]
        return tuple(np.concatenate(arrays)[:count] for arrays in zip(*blocks, strict=True))
