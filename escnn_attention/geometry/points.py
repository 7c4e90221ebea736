"""Points of clouds, features of their edges, and layers on the points that a mask shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.exporting.mode import in_programs
from escnn_attention.geometry.at_once import all_at_once, clouds_at_once, pairs_at_once
from escnn_attention.geometry.cache import cached, kept
from escnn_attention.geometry.neighbours import Chunk, Lists, Neighbourhood, Neighbours, WholeClouds, stretches, where


class Points:
    """Points of clouds that lie end to end, and which keys each of them sees.

    Args:
        coordinates: ``(N, ...)``, the coordinates of each point as a bias takes them, in the units of the encoding.
        places: ``(N, d)``, where neighbours are searched, by this ``rule``.
        edge_index: ``(2, E)``, from keys to queries; None for those of the rule.
        batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
        edge_attr: features of edges ``(E, F)``, or of all pairs of points of clouds, ``(B, n, n, F)``; None without.

    Attributes:
        repeats: how many points are known to have the same relations to their neighbours.
    """

    repeats = 1

    def __init__(
        self,
        coordinates: Tensor,
        places: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        rule: Neighbourhood,
        edge_attr: Tensor | None = None,
    ):
        self.coordinates, self.number = coordinates, coordinates.shape[0]
        self.batch, self.edge_index, self.edge_attr = batch, edge_index, edge_attr
        self.whole = edge_index is None and rule.radius is rule.num_neighbours is None
        self._places, self._rule = places, rule
        in_tables = edge_attr is not None and edge_index is None
        self._ranks = kept(ranks, batch, None, self.number, places.device) if in_tables else None

    @property
    def mean_size(self) -> float:
        """The points of a cloud, on average; where every point sees its whole cloud, and 0 elsewhere."""
        if not self.whole or self.batch is None:
            return self.number if self.whole else 0
        return self.number / max(1, len(self.clouds().sizes))

    def neighbours(self, keys: Points) -> Neighbours:
        """The keys that each point sees, among these points or others."""
        if self.edge_index is not None:
            return kept(Lists, self.edge_index, self.number, keys.number, self.edge_attr is not None)
        if keys is not self:
            return kept(Neighbourhood.between, self._rule, self._places, self.batch, keys._places, keys.batch)
        if self.whole:
            return self.clouds()
        # The rule of another layer may be equal.
        return kept(Neighbourhood.__call__, self._rule, self._places, self.batch)

    def shared(self, keys: Points) -> Neighbours:
        """The same, in chunks of points with the same relations to their neighbours where those are known."""
        return self.neighbours(keys)

    def clouds(self) -> WholeClouds:
        """The clouds of all points."""
        if self.batch is None:
            return WholeClouds.single(self.number, self._places.device)
        return kept(WholeClouds, self.batch)

    def clouds_at_once(self) -> Chunk:
        """All clouds in a single chunk: see :mod:`escnn_attention.geometry.at_once`."""
        return cached(clouds_at_once, self._places, self.batch)

    def at_once(self, keys: Points) -> Chunk:
        """Which of the keys each point sees, in a single chunk: see :mod:`escnn_attention.geometry.at_once`."""
        numbered = self.edge_attr is not None
        if keys is not self and self.edge_index is None:
            return cached(pairs_at_once, self._places, self.batch, keys._places, keys.batch, self._rule)
        return cached(all_at_once, self._places, self.edge_index, self.batch, self._rule, numbered)

    def places_of(self, keys: Points, some: Chunk) -> tuple[Tensor, Tensor]:
        """Where the queries ``(G, A, 1, d)`` and the keys ``(G, 1, K, d)`` of a chunk are; anywhere for those of -1."""
        pairs = ((self._places, some.queries), (keys._places, some.keys))
        query, key = (x.index_select(0, index.clamp(min=0).flatten()).unflatten(0, index.shape) for x, index in pairs)
        return query.unsqueeze(2), key.unsqueeze(1)

    def edge_rows(self, some: Chunk) -> Tensor:
        """The rows ``(G, A, K)`` of features of edges that pairs of a chunk have; -1 where either fills up."""
        if some.edges is not None:
            return some.edges.unsqueeze(1)
        assert self.edge_attr is not None
        assert self._ranks is not None
        return pair_rows(some.queries, some.keys, self.batch, self._ranks, self.edge_attr.shape[1])


def ranks(batch: Tensor | None, mask: Tensor | None, number: int, device: torch.device) -> Tensor:
    """``(N,)``, how many points of its own cloud, those that a mask hides left out, are before each of N points."""
    places = torch.arange(number, device=device)
    if batch is None and mask is None:
        return places
    cloud = torch.zeros_like(places) if batch is None else batch
    if mask is not None:
        cloud = torch.where(mask, cloud, cloud.max() + 1)
    # All different, as ONNX has no stable sort.
    order = (cloud * number + places).argsort()
    among, first = stretches(cloud.index_select(0, order))
    return torch.empty_like(places).index_copy(0, order, places - first.index_select(0, among))


def pair_rows(queries: Tensor, keys: Tensor, batch: Tensor | None, rank: Tensor, size: int) -> Tensor:
    """The rows ``(G, A, K)`` of pairs in a table ``(B, n, n, ...)`` of clouds; -1 where either fills up.

    >>> batch, keys = torch.tensor([0, 1, 1]), torch.tensor([[1, 2, -1]])
    >>> pair_rows(keys[:, :2], keys, batch, ranks(batch, None, 3, batch.device), 2).tolist()
    [[[4, 5, -1], [6, 7, -1]]]
    """
    row = rank if batch is None else batch * size + rank
    rows = row[queries.clamp(min=0)].unsqueeze(2) * size + rank[keys.clamp(min=0)].unsqueeze(1)
    return rows.masked_fill((queries < 0).unsqueeze(2) | (keys < 0).unsqueeze(1), -1)


def features_of_shown(edge_attr: Tensor, mask: Tensor, edge_index: Tensor | None, batch: Tensor | None) -> Tensor:
    """The features of edges that a mask ``(N,)`` shows; or tables that begin with the points that are there."""
    if edge_index is not None:
        return edge_attr.index_select(0, kept(_edges_shown, edge_index, mask))
    clouds, size = edge_attr.shape[:2]
    cloud = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    # One place more is for the points that are hidden.
    target = torch.where(mask, cloud * size + kept(ranks, batch, mask, *mask.shape, mask.device), clouds * size)
    source = kept(ranks, batch, None, *mask.shape, mask.device)
    place = source.new_zeros(clouds * size + 1).scatter(0, target, source)[:-1].view(clouds, size)
    there = mask.new_zeros(clouds * size + 1).scatter(0, target, mask)[:-1].view(clouds, size)
    first = torch.arange(clouds, device=mask.device).view(-1, 1, 1) * size
    rows = (first + place[:, :, None]) * size + place[:, None]
    moved = edge_attr.flatten(0, 2).index_select(0, rows.flatten()).view(clouds, size, size, -1)
    return torch.where((there[:, :, None] & there[:, None]).unsqueeze(-1), moved, 0.0)


class Cloud(NamedTuple):
    """Points, and what else a layer knows of them: see :meth:`escnn_attention.PointSelfAttention.forward`.

    The condition is ``(N, n)``, ``(clouds, n)``, or ``(1, n)`` for a single cloud.
    """

    coords: Tensor
    edge_index: Tensor | None = None
    batch: Tensor | None = None
    measure: Tensor | None = None
    edge_attr: Tensor | None = None
    condition: Tensor | None = None


PointLayer = Callable[[Tensor, Cloud], Tensor]


def among(there: Tensor, mask: Tensor, edges: Tensor | None) -> Tensor | None:
    """The edges ``(2, E)`` between the points ``there``, which are those of ``mask``, numbered among themselves."""
    if edges is None:
        return None
    place = edges.new_zeros(mask.shape[0]).index_copy(0, there, torch.arange(there.shape[0], device=there.device))
    return place[edges.index_select(1, _edges_shown(edges, mask))]


def _edges_shown(edges: Tensor, mask: Tensor) -> Tensor:
    """The edges ``(2, E)`` between points that a mask shows."""
    return where(mask[edges].all(0))


def _only_shown(layer: PointLayer, x: Tensor, cloud: Cloud, mask: Tensor) -> Tensor:
    """:func:`_of_those_there` in programs, where no size depends on the mask: hidden points are of no cloud."""
    coords, edges, batch, measure, edge_attr, condition = cloud
    x, coords = (torch.where(mask[:, None], t, 0.0) for t in (x, coords))
    condition = None if condition is None else torch.where(mask[:, None], condition, 0.0)
    edge_attr = None if edge_attr is None else features_of_shown(edge_attr, mask, edges, batch)
    if edges is not None:
        edges = edges.index_select(1, _edges_shown(edges, mask))
    batch = torch.where(mask, 0 if batch is None else batch, -1)
    measure = None if measure is None else torch.where(mask, measure, 1.0)
    y = layer(x, Cloud(coords, edges, batch, measure, edge_attr, condition))
    return torch.where(mask[:, None], y, 0.0)


def those_there(x: Tensor, cloud: Cloud, mask: Tensor) -> tuple[Tensor, Tensor, Cloud]:
    """The numbers ``(M,)`` of the points that a mask shows, their features, and the cloud of them alone."""
    # What a mask makes of numbers of points is the same in all layers.
    there = kept(where, mask)
    edges, edge_attr = kept(among, there, mask, cloud.edge_index), cloud.edge_attr
    edge_attr = None if edge_attr is None else features_of_shown(edge_attr, mask, cloud.edge_index, cloud.batch)
    batch = None if cloud.batch is None else kept(torch.index_select, cloud.batch, 0, there)
    measure, condition = (None if t is None else t[there] for t in (cloud.measure, cloud.condition))
    return there, x[there], Cloud(cloud.coords[there], edges, batch, measure, edge_attr, condition)


def in_places(y: Tensor, there: Tensor, mask: Tensor) -> Tensor:
    """Rows ``(M, ...)`` where these points are, and zeros at the others that a mask ``(N,)`` hides."""
    return y.new_zeros(mask.shape[0], *y.shape[1:]).index_copy(0, there, y)


@in_programs(_only_shown)
def _of_those_there(layer: PointLayer, x: Tensor, cloud: Cloud, mask: Tensor) -> Tensor:
    there, x, cloud = those_there(x, cloud, mask)
    return in_places(layer(x, cloud), there, mask)


def where_present(layer: PointLayer, x: Tensor, cloud: Cloud, mask: Tensor | None) -> Tensor:
    """A layer on the points that a mask shows, and zeros at the others, which reach nothing, gradients included."""
    if mask is None:
        return layer(x, cloud)
    condition, batch = cloud.condition, cloud.batch
    if condition is not None and condition.shape[0] != x.shape[0]:
        condition = condition.expand(x.shape[0], -1) if batch is None else condition.index_select(0, batch)
    return _of_those_there(layer, x, cloud._replace(condition=condition), mask)
