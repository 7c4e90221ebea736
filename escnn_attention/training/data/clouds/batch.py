"""Clouds of points in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["CloudSource", "Clouds", "CloudsInMemory"]


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


class CloudSource(Protocol):
    """Clouds that have a number each, wherever they are."""

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> Clouds:
        """The clouds with the numbers ``indices``, in this order."""
        ...


class CloudsInMemory:
    """Clouds that are kept laid end to end.

    Args:
        sizes: (B,) points of each cloud.
        coords: (N, d) of all clouds.
        features: (N, channels), or with a ``table`` (N,) the kind of each point.
        targets: (B, …).
        point_targets: (N, …).
        table: (kinds, channels) the features of each kind of points.

    Raises:
        ValueError: the tensors are of different lengths.
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
        points = int(sizes.sum())
        for name, values in (("coords", coords), ("features", features), ("point_targets", point_targets)):
            if values is not None and len(values) != points:
                raise ValueError(f"{name}: got {len(values)}, needed one of each of {points} points")
        if len(targets) != len(sizes):
            raise ValueError(f"targets: got {len(targets)}, needed one of each of {len(sizes)} clouds")
        self.sizes = sizes.to(torch.int64)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.coords, self.features, self.targets = coords, features, targets
        self.point_targets, self.table = point_targets, table

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, indices: Sequence[int]) -> Clouds:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sizes = self.sizes[chosen]
        batch = torch.repeat_interleave(torch.arange(len(chosen)), sizes)
        # Where the points of each cloud begin here is taken away, and where they begin there is added.
        points = torch.arange(len(batch)) + (self.starts[chosen] - (sizes.cumsum(0) - sizes))[batch]
        features = self.features[points]
        return Clouds(
            self.coords[points],
            features if self.table is None else self.table[features.to(torch.int64)],
            batch,
            self.targets[chosen],
            None if self.point_targets is None else self.point_targets[points],
        )
