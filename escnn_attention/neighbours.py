r"""Which points of a cloud see each other.

Clouds of a batch lie end to end, as in PyTorch Geometric: ``coords`` is ``(N, d)`` and ``batch``, ``(N,)``, is the
number of the cloud of each point. A neighbourhood is a list of keys for every query, which attention reads: ``(N, K)``
indices, filled up with -1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from escnn_attention.functional.terms import working_precision
from escnn_attention.positions import Blocks, Positions

__all__ = ["Cloud", "Neighbourhood", "among", "cloud_slices", "list_edges", "where_present"]


@dataclass(frozen=True)
class Neighbourhood:
    """The rule by which the points of a cloud are neighbours. A point is a neighbour of itself.

    Attributes:
        radius: the largest distance, in the units of the coordinates; None for any.
        num_neighbours: the nearest so many, the point itself included; None for all. Of other points at the same
            distance any is taken.
    """

    radius: float | None = None
    num_neighbours: int | None = None

    @property
    def is_global(self) -> bool:
        """Whether every point sees its whole cloud."""
        return self.radius is None and self.num_neighbours is None

    def __call__(self, coords: Tensor, batch: Tensor | None = None) -> Tensor:
        """The neighbours of every point.

        Args:
            coords: ``(N, d)``.
            batch: ``(N,)``, the number of the cloud of each point, in any order; None for a single cloud.

        Returns:
            ``(N, K)``, the points that each point sees; -1 fills up.
        """
        x = coords.detach()
        cloud = torch.zeros(len(x), dtype=torch.long, device=x.device) if batch is None else batch
        if self.is_global:
            edges = _everyone(cloud)
        elif x.device.type == "cpu":
            edges = self._by_tree(x, cloud)
        else:
            edges = self._by_distances(x, cloud)
        return list_edges(edges, len(x))

    def _by_tree(self, x: Tensor, cloud: Tensor) -> Tensor:
        if not len(x):
            return torch.zeros(2, 0, dtype=torch.long)
        points = x.double().numpy()
        extent = float(np.ptp(points, axis=0).max(initial=0.0)) * max(1, points.shape[1]) ** 0.5
        cloud = cloud.unique(return_inverse=True)[1]
        # Clouds side by side along one more axis, so far apart that all points of a cloud are nearer than any other.
        apart = 2 * max(extent, self.radius or 0.0, 1.0)
        points = np.concatenate([points, apart * cloud.numpy()[:, None]], axis=1)
        tree = cKDTree(points)
        if self.num_neighbours is None:
            assert self.radius is not None
            pairs = torch.as_tensor(tree.query_pairs(self.radius, output_type="ndarray").astype(np.int64)).T
            own = torch.arange(len(x)).expand(2, -1)
            return torch.cat([pairs, pairs.flip(0), own], dim=1)
        number = min(self.num_neighbours, len(x))
        bound = np.inf if self.radius is None else np.nextafter(self.radius, np.inf)
        distance, nearest = tree.query(points, k=number, distance_upper_bound=bound)
        distance, nearest = (torch.as_tensor(a).view(len(x), number) for a in (distance, nearest))
        found = distance.isfinite()
        keys = torch.where(found, nearest, 0)
        found &= cloud[keys] == cloud[:, None]
        queries = torch.arange(len(x))[:, None].expand_as(keys)
        # Where so many others lie at the same place, one of them gives way.
        absent = ~((keys == queries) & found).any(1)
        keys[absent, 0] = queries[absent, 0]
        return torch.stack([keys[found], queries[found]])

    def _by_distances(self, x: Tensor, cloud: Tensor) -> Tensor:
        if not len(x):
            return cloud.new_zeros(2, 0)
        x = x.to(working_precision(x.dtype))
        bound = torch.finfo(x.dtype).max if self.radius is None else self.radius
        order, start, counts = _in_order(cloud)
        edges = []
        # All distances of a few queries at a time, to the points of their clouds, which are `counts` from `start` on.
        size = max(1, _DISTANCES // int(counts.max()))
        for queries, first, number in zip(order.split(size), start.split(size), counts.split(size), strict=True):
            place = torch.arange(int(number.max()), device=x.device)
            there = place < number[:, None]
            keys = order[torch.where(there, first[:, None] + place, 0)]
            distance = (x[keys] - x[queries][:, None]).square().sum(-1).sqrt().masked_fill(~there, torch.inf)
            # A point is the nearest to itself, also where others lie at the same place.
            distance = distance.masked_fill((keys == queries[:, None]) & there, -1.0)
            if self.num_neighbours is not None and self.num_neighbours < keys.shape[1]:
                distance, nearest = distance.topk(self.num_neighbours, largest=False)
                keys = keys.gather(1, nearest)
            found = distance <= bound
            edges.append(torch.stack([keys[found], queries[:, None].expand_as(keys)[found]]))
        return torch.cat(edges, dim=1)


# The distances that are worked out at once on a GPU.
_DISTANCES = 2**22


def cloud_slices(batch: Tensor | None, num_points: int) -> list[slice] | None:
    """The stretch of every cloud; None where the points of a cloud do not lie in one stretch."""
    if batch is None:
        return [slice(0, num_points)]
    cloud, counts = torch.unique_consecutive(batch, return_counts=True)
    if len(cloud.unique()) < len(cloud):
        return None
    stops = counts.cumsum(0).tolist()
    return [slice(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]


def among(there: Tensor, mask: Tensor, edges: Tensor | None) -> Tensor | None:
    """The edges ``(2, E)`` between the points ``there``, which are those of ``mask``, numbered among themselves."""
    if edges is None:
        return None
    place = edges.new_zeros(len(mask)).index_copy(0, there, torch.arange(len(there), device=there.device))
    return place[edges[:, mask[edges].all(0)]]


def where_present(
    layer: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor],
    mask: Tensor,
    x: Tensor,
    coords: Tensor,
    edge_index: Tensor | None,
    batch: Tensor | None,
    measure: Tensor | None,
) -> Tensor:
    """A layer on the points that a mask shows, and zeros at the others.

    Whatever the points that are not there hold, it reaches nothing, gradients included.
    """
    there = mask.nonzero().squeeze(-1)
    batch, measure = (None if t is None else t[there] for t in (batch, measure))
    y = layer(x[there], coords[there], among(there, mask, edge_index), batch, measure)
    return y.new_zeros(len(mask), y.shape[1]).index_copy(0, there, y)


def list_edges(edges: Tensor, num_points: int) -> Tensor:
    """The neighbours ``(N, K)`` that edges ``(2, E)`` give, from keys in the first row to queries in the second."""
    keys, queries = edges
    queries, order = queries.sort(stable=True)
    degree = torch.bincount(queries, minlength=num_points)
    place = torch.arange(len(queries), device=edges.device) - (degree.cumsum(0) - degree)[queries]
    listed = edges.new_full((num_points, int(degree.max()) if len(degree) else 0), -1)
    listed[queries, place] = keys[order]
    return listed


def _everyone(cloud: Tensor) -> Tensor:
    """The edges between all points of each cloud."""
    order, first, degree = _in_order(cloud)
    # For every query as many keys as its cloud has points.
    queries = torch.arange(len(cloud), device=cloud.device).repeat_interleave(degree)
    before = (degree.cumsum(0) - degree).repeat_interleave(degree)
    keys = torch.arange(len(queries), device=cloud.device) - before + first.repeat_interleave(degree)
    return torch.stack([order[keys], order[queries]])


def _in_order(cloud: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The points cloud by cloud; for each of them where its cloud starts in this order, and how many points it has."""
    order = cloud.argsort(stable=True)
    _, counts = torch.unique_consecutive(cloud[order], return_counts=True)
    start = counts.cumsum(0) - counts
    return order, start.repeat_interleave(counts), counts.repeat_interleave(counts)


class Cloud(Positions):
    r"""One cloud in which every point sees every other, for the backends of :mod:`escnn_attention.functional`.

    Args:
        coords: ``(N, d)``, in the units in which the encoding measures. Gradients flow to them.
    """

    def __init__(self, coords: Tensor):
        self.coordinates = coords
        self.num_positions = len(coords)
        self.scale = 1.0
        self.complete = True

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """``(N · N, d)``, of every key to every query; made when they are asked for."""
        return (self.coordinates - self.coordinates[:, None]).flatten(0, 1)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries * self.num_positions + keys

    def blocks(self, max_queries: int) -> Blocks:
        raise NotImplementedError("a cloud is for backends that do not work in blocks: dense, reference")
