"""Points as positions of an attention: one cloud, or several that lie end to end."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.geometry.at_once import all_at_once
from escnn_attention.geometry.cache import cached, kept
from escnn_attention.geometry.clouds import Chunk, Lists, Neighbourhood, Neighbours, WholeClouds
from escnn_attention.geometry.edges import pair_rows, ranks
from escnn_attention.geometry.positions import Blocks, Positions

__all__ = ["Cloud", "Points"]


class Cloud(Positions):
    r"""One cloud in which every point sees every other, for the backends of :mod:`escnn_attention.functional`.

    Args:
        coords: ``(N, d)``, in the units in which the encoding measures, of several clouds of one size end to end where
            encodings factorise. Gradients flow to them.
    """

    def __init__(self, coords: Tensor):
        self.coordinates = coords
        self.num_positions = coords.shape[0]
        self.scale = 1.0
        self.complete = True

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """The offsets ``(N · N, d)`` of every key from every query; made when they are asked for."""
        return (self.coordinates - self.coordinates[:, None]).flatten(0, 1)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries * self.num_positions + keys

    def blocks(self, max_queries: int) -> Blocks:
        raise NotImplementedError("a cloud is for backends that do not work in blocks: dense, reference")


class Points(Positions):
    """Points of clouds that lie end to end, and who sees whom.

    Args:
        coordinates: ``(N, ...)``, what a bias sees of every point, in the units in which the encoding measures.
        places: ``(N, d)``, where neighbours are searched.
        edge_index: ``(2, E)``, from keys to queries; None for those of the rule.
        batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
        rule: by which points are neighbours.
        edge_attr: features of the edges, ``(E, F)``, or of all pairs of points of each cloud, ``(B, n, n, F)``; None
            without.
    """

    def __init__(
        self,
        coordinates: Tensor,
        places: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        rule: Neighbourhood,
        edge_attr: Tensor | None = None,
    ):
        self.coordinates = coordinates
        self.num_positions = coordinates.shape[0]
        self.scale = 1.0
        self.complete = True  # What fills up keeps values that are not finite apart.
        self.batch = batch
        self.edge_index, self.edge_attr = edge_index, edge_attr
        self._places, self._rule = places, rule
        in_tables = edge_attr is not None and edge_index is None
        self._ranks = cached(ranks, batch, None, places) if in_tables else None

    @property
    def whole(self) -> bool:
        """Whether every point sees its whole cloud."""
        return self.edge_index is None and self._rule.is_global

    def neighbours(self) -> Neighbours:
        """Which points each point sees."""
        if self.edge_index is not None:
            return kept(Lists, self.edge_index, self.num_positions, self.edge_attr is not None)
        if self.whole:
            return self.clouds()
        # The rule of another layer may be equal.
        return cached(Neighbourhood.__call__, self._rule, self._places, self.batch)

    def clouds(self) -> WholeClouds:
        """The clouds of all points."""
        if self.batch is None:
            return cached(WholeClouds.single, self.num_positions, self._places.device)
        return kept(WholeClouds, self.batch)

    def at_once(self) -> Chunk:
        """Which points each point sees, in a single chunk: see :mod:`escnn_attention.geometry.at_once`."""
        numbered = self.edge_attr is not None
        return cached(all_at_once, self._places, self.edge_index, self.batch, self._rule, numbered)

    def edge_rows(self, some: Chunk) -> Tensor:
        """Which rows of the features of edges, of all tables one below the other, the pairs of a chunk have.

        Returns:
            ``(G, A, K)``; -1 where a query or a key fills up.
        """
        if some.edges is not None:
            return some.edges.unsqueeze(1)
        assert self.edge_attr is not None
        assert self._ranks is not None
        return pair_rows(some.queries, some.keys, self.batch, self._ranks, self.edge_attr.shape[1])

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        raise NotImplementedError("points of several clouds have no table of offsets")

    def blocks(self, max_queries: int) -> Blocks:
        raise NotImplementedError("points are taken in chunks of their neighbours")
