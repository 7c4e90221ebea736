"""Constellations: how often does each pattern occur among the points?"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import one_of
from escnn_attention.training.data.clouds.base import CloudsInMemory, GeneratedClouds

Features = Literal["presence", "constant"]

COPIES = 2
"""The largest number of copies of a pattern."""


_ROOTS = {name: np.exp(2j * np.pi * np.arange(n) / n) for name, n in (("square", 4), ("triangle", 3), ("pentagon", 5))}
PATTERNS = {name: np.stack([corners.real, corners.imag], axis=1) for name, corners in _ROOTS.items()}
PATTERNS["L"] = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [3.0, 2.0], [3.0, 3.0]])
"""The points of each pattern, in the order of the counts: polygons of radius 1 about the origin, and an L."""

_CANDIDATES = COPIES * list(PATTERNS)
_SIZES = np.array([len(PATTERNS[name]) for name in _CANDIDATES])
NUM_POINTS = int(_SIZES.sum())
"""Points of all candidates: 34."""

_EXTENT = 24.0  # of the square in which patterns lie
_LARGER = 3.0  # how much larger it is for polygons in the published data
_CENTRE = np.array([2.0, 2.0])  # of the published polygons before they are rotated about the origin
_ANGLE = 0.33 * np.pi


class Constellation(NamedTuple):
    """Constellations before they are a batch."""

    points: npt.NDArray[np.float64]  # (count, 34, 2)
    present: npt.NDArray[np.bool_]  # (count, 34), whether the pattern that a point is of is there
    owners: npt.NDArray[np.int64]  # (count, 34), the candidate of a point, 0 to 7; c and c + 4 are of one pattern
    counts: npt.NDArray[np.int64]  # (count, 4), how often each pattern is there: 0, 1 or 2


def make_constellations(
    count: int, generator: np.random.Generator, *, noise: float = 0.1, published: bool = False
) -> Constellation:
    """Random constellations, with how often each pattern occurs.

    There are eight candidates, two of each of :data:`PATTERNS`. Each is there with probability 1/2; where none would
    be, one that is drawn at random is. A candidate is rotated about its mean by an angle from U(−0.33π, 0.33π) and
    moved by a vector from U[0, 24]²; every coordinate gets normal noise of the standard deviation ``noise``, where the
    radius of a polygon is 1; and x ↦ x/12 − 1.

    With ``published`` patterns are rotated about a point outside of them (polygons are centred at (2, 2), and rotated
    about the origin), and polygons are moved by U[0, 72]², so that the place of a point tells its pattern. Each cloud
    is scaled to [−1, 1] by the smallest and the largest coordinate, absent candidates included: so absent points have
    an influence, and the scale of a cloud changes when it is rotated.
    """
    present = generator.random((count, len(_CANDIDATES))) < 0.5
    forced = generator.integers(len(_CANDIDATES), size=count)
    none = ~present.any(axis=1)
    present[none, forced[none]] = True

    parts = []
    for name in _CANDIDATES:
        corners = PATTERNS[name]
        if not published:
            corners = corners - corners.mean(axis=0)
        elif name != "L":
            corners = corners + _CENTRE
        extent = _EXTENT * (_LARGER if published and name != "L" else 1.0)
        angles = generator.uniform(-_ANGLE, _ANGLE, count)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        x, y = corners.T
        rotated = np.stack([cos * x - sin * y, sin * x + cos * y], axis=2)
        parts.append(rotated + generator.uniform(0, extent, (count, 1, 2)))
    points = np.concatenate(parts, axis=1) + noise * generator.standard_normal((count, NUM_POINTS, 2))
    if published:
        low, high = points.min(axis=(1, 2), keepdims=True), points.max(axis=(1, 2), keepdims=True)
        points = 2 * (points - low) / (high - low) - 1
    else:
        points = points / (_EXTENT / 2) - 1

    # In an order that does not reveal the pattern of a point.
    order = np.argsort(generator.random((count, NUM_POINTS)), axis=1)
    owners = np.repeat(np.arange(len(_CANDIDATES)), _SIZES)[order]
    counts = present.reshape(count, COPIES, len(PATTERNS)).sum(axis=1).astype(np.int64)
    points = np.take_along_axis(points, order[..., None], axis=1)
    return Constellation(points, np.take_along_axis(present, owners, axis=1), owners, counts)


class Constellations(GeneratedClouds):
    """Constellations in the plane: how often are a square, a triangle, a pentagon and an L among the points?

    Targets are four counts (B, 4) int64, each 0, 1 or 2: four classifications with three classes. A count is 0, 1, 2
    with probabilities of about 1/4, 1/2, 1/4, so that guessing is right half of the time. Clouds are those of
    :func:`make_constellations`. The parts have nothing in common.

    The published test sets are ``rotate_test`` (SE(2); there an angle of 10°, or a uniform one) and ``translate_test``
    (T(2)). The published augmentation moves all clouds of a batch alike, and by the same along both axes.

    Args:
        num_train, num_valid, num_test: clouds of each part; as published 10,000 to train and 1,000 to test.
        features: ``"presence"``, 1 or 0: whether the pattern that a point is of is there, with all 34 points in the
            cloud; ``"constant"``, 1, with the points of present patterns only.
        published: see :func:`make_constellations`.
        **options: of :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    Source: Hutchinson, Le Lan, Zaidi, Dupont, Teh and Kim, *LieTransformer: equivariant self-attention for Lie groups*,
    ICML 2021.

    Example:
        >>> data = Constellations(num_train=8, batch_size=4)
        >>> data.setup("fit")
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch.coords.shape, batch.features.shape, batch.targets.shape
        (torch.Size([136, 2]), torch.Size([136, 1]), torch.Size([4, 4]))
    """

    dim = 2
    in_channels = 1
    num_targets = len(PATTERNS)
    num_classes = COPIES + 1

    def __init__(
        self,
        num_train: int = 10_000,
        num_valid: int = 1_000,
        num_test: int = 1_000,
        features: Features = "presence",
        published: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_train, num_valid, num_test, **options)
        one_of(get_args(Features), features=features)
        self.features: Features = features
        self.published = published

    def _make(self, part: str) -> CloudsInMemory:
        make = functools.partial(make_constellations, published=self.published)
        points, present, _, counts = self._in_blocks(part, make)
        kept = np.ones_like(present) if self.features == "presence" else present
        return CloudsInMemory(
            torch.from_numpy(kept.sum(axis=1)),
            torch.from_numpy(points[kept]).float(),
            torch.from_numpy(present[kept, None]).float(),
            torch.from_numpy(counts),
        )
