"""Attention of one set of features to another, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.encodings import Encoding
from escnn_attention.encodings.bias import positional_bias
from escnn_attention.exporting.mode import in_programs
from escnn_attention.functional import BETWEEN_POINTS, ON_GRIDS, GridCall, KeyMode, PointCall, QueryMode
from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.points.call import PairTables
from escnn_attention.geometry.cache import constant_tables, kept
from escnn_attention.geometry.grid import Grid, kept_grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.neighbours import Neighbourhood, numbers_of, where
from escnn_attention.geometry.points import Points
from escnn_attention.geometry.relations import Offset
from escnn_attention.geometry.windows import Window
from escnn_attention.plain.cutoff import Cutoff
from escnn_attention.plain.point_attention import SeenFromPoses, maps_of_points
from escnn_attention.plain.projections import AttentionMode, FromPoses, GroupTables, Scalars, ScoredHeads, ToPoses
from escnn_attention.plain.self_attention import fields_of, hidden, maps_of, rows_of

MOST_STEPS = 16
"""The largest spacing of two grids, in the unit that both have."""


@dataclass(frozen=True)
class Projections:
    """The projections of a cross-attention: to C fields for each of M heads, and ``out`` to the output."""

    queries: ToPoses | Scalars
    keys: ToPoses | Scalars
    values: ToPoses | Scalars
    out: FromPoses


@dataclass(frozen=True)
class Places:
    """Where queries and keys are.

    Attributes:
        one_space: whether they lie in the same space; otherwise queries stand at the centre of the keys.
        window, rule: which keys a query sees: on grids, and where either are points.
        relation, length_scale: of points, and the unit of length between them.
        spacing: of the grids of queries and keys, in a unit that both have; None for grids of the same extent.
        cutoff: the factor of the measure of a key for each query, between points.
    """

    one_space: bool
    window: Window
    rule: Neighbourhood
    relation: Offset
    length_scale: float
    spacing: tuple[int, int] | None = None
    cutoff: Cutoff | None = None


class Scattered(NamedTuple):
    """Features ``(N, size)`` at points ``(N, d)``; ``batch`` ``(N,)`` is the number of the cloud of each."""

    x: Tensor
    coords: Tensor
    batch: Tensor | None


class CrossAttention(ScoredHeads):
    """Projections to heads, attention of the poses of one set to those of another, projection to the output.

    Maps ``(B, query size, *space)`` and ``(B, key size, *other space)`` to ``(B, out, *space)``. What a projection of
    :class:`~escnn_attention.plain.projections.Scalars` makes has no poses.
    """

    quotient: Tensor | None

    def __init__(
        self,
        projections: Projections,
        encoding: Encoding,
        tables: GroupTables,
        places: Places,
        mode: AttentionMode,
        *,
        query_weight: float = 1.0,
    ):
        super().__init__()
        self.project_queries, self.project_keys = projections.queries, projections.keys
        self.project_values, self.project_out = projections.values, projections.out
        self.encoding = encoding
        self.num_heads = projections.queries.groups
        self.qk_norm = self.registers = None
        self.places, self.window, self.cutoff = places, places.window, places.cutoff
        self.dropout, self.backend = mode.dropout, mode.backend
        # One query without a pose contributes to every output pose, whichever of its poses would.
        self.query: QueryMode = "all" if isinstance(projections.queries, Scalars) else mode.query
        self.keys: KeyMode = "all" if isinstance(projections.keys, Scalars) else mode.keys
        self.query_weight = query_weight
        self.register_tables(tables)

    @property
    def channels(self) -> int:
        return len(self.project_queries.weight) // self.num_heads

    @property
    def reads_places(self) -> bool:
        """Whether the encoding reads where queries and keys are."""
        encoding = self.encoding
        return encoding.dim > 0 and (encoding.form is not None or encoding.rotates)

    @property
    def sees_places(self) -> bool:
        """Whether it matters where queries and keys are."""
        return self.reads_places or not (self.window.looks_everywhere and self.places.rule.is_global)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        query_coords: Tensor | None = None,
        key_coords: Tensor | None = None,
        query_batch: Tensor | None = None,
        key_batch: Tensor | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Features of the queries: see :meth:`escnn_attention.GroupCrossAttention.forward`."""
        if query_coords is not None or key_coords is not None:
            sets = (queries, query_coords, query_batch), (keys, key_coords, key_batch)
            call = self.point_call(*sets, values, key_padding_mask, edge_index)
            y = self.project(BETWEEN_POINTS.compute(call, self.backend)).squeeze(0)
            if query_coords is not None:
                return y
            return fields_of(y.unflatten(0, (queries.shape[0], -1)), queries.shape[2:])
        on_grids = self.call(queries, keys, values, self.grids(queries, keys), key_padding_mask)
        return fields_of(self.project(ON_GRIDS.compute(on_grids, self.backend)), queries.shape[2:])

    def attention_maps(
        self,
        sets: tuple[Tensor, Tensor, Tensor | None],
        positions: Tensor,
        poses: Sequence[int] | None,
        key_padding_mask: Tensor | None = None,
        coords: tuple[Tensor | None, Tensor | None] = (None, None),
        batches: tuple[Tensor | None, Tensor | None] = (None, None),
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """The maps of :meth:`escnn_attention.GroupCrossAttention.attention_maps` at flat positions."""
        queries, keys, values = sets
        chosen = None if poses is None else torch.tensor(poses, device=queries.device)
        if coords != (None, None):
            of_queries, of_keys = zip((queries, keys), coords, batches, strict=True)
            of_points = self.point_call(of_queries, of_keys, values, key_padding_mask, edge_index)
            if coords[0] is not None:
                positions = positions.unsqueeze(0)
            else:  # of every image
                positions = positions + math.prod(queries.shape[2:]) * torch.arange(len(queries)).unsqueeze(1)
            maps = maps_of_points(of_points, positions, chosen)
            # A query sees keys of one image at most.
            return maps if coords[1] is not None else maps.unflatten(-1, (len(keys), *keys.shape[2:])).sum(6)
        call = self.call(queries, keys, values, self.grids(queries, keys), key_padding_mask)
        return maps_of(call, positions, chosen, keys.shape[2:])

    def grids(self, queries: Tensor, keys: Tensor) -> tuple[Grid, Grid]:
        """The grids of features of queries and keys: one and the same where their positions are."""
        space, key_space = queries.shape[2:], keys.shape[2:]
        like = (self.inverse_action.dtype, queries.device)
        if not self.sees_places:
            numbers = math.prod(space), math.prod(key_space)
            apart = kept_grid(numbers[:1], Window(), *like, spacing=0)
            return apart, apart if numbers[0] == numbers[1] else kept_grid(numbers[1:], Window(), *like, spacing=0)
        if not self.places.one_space:
            centre = (math.prod(space), *[1] * (len(key_space) - 1))
            return kept_grid(centre, Window(), *like, spacing=0), kept_grid(key_space, Window(), *like)
        spacing = self.places.spacing or spacing_between(space, key_space)
        if space == key_space and spacing[0] == spacing[1]:
            grid = kept_grid(space, self.window, *like)
            return grid, grid
        return kept_grid(space, self.window, *like, spacing[0]), kept_grid(key_space, Window(), *like, spacing[1])

    def call(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        grids: tuple[Grid, Grid],
        key_padding_mask: Tensor | None = None,
    ) -> GridCall:
        """The attention to compute, of features ``(B, size, *space)`` at the positions of two grids."""
        if key_padding_mask is not None:
            # Whatever they hold, it reaches nothing, gradients included.
            keys = keys.masked_fill(key_padding_mask.unsqueeze(1), 0.0)
            values = None if values is None else values.masked_fill(key_padding_mask.unsqueeze(1), 0.0)
        q, k, v = self.to_heads(rows_of(queries), rows_of(keys), None if values is None else rows_of(values))
        positions = None
        if self.sees_places:
            positions = grids[0] if grids[1] is grids[0] else GridPair(*grids)
        tables = (self.inverse_action, self.quotient, self.relative, self.log_measure)
        bias = positional_bias(self.encoding, positions, *tables)
        if key_padding_mask is not None:
            bias = hidden(bias, ~key_padding_mask.reshape(k.shape[1], k.shape[2]))
        dropout = self.dropout if self.training else 0.0
        return GridCall(q, k, v, bias, *grids, query=self.query, keys=self.keys, dropout=dropout)

    def scattered(self, x: Tensor, coords: Tensor | None, batch: Tensor | None) -> Scattered:
        """Features at points, or those on a grid, ``(B, size, *space)``, at its positions, with their centre at 0."""
        if coords is not None:
            return Scattered(x, coords.to(PRECISE[self.inverse_action.dtype]), batch)
        space, images = x.shape[2:], x.shape[0]
        grid = kept_grid(space, Window(), PRECISE[self.inverse_action.dtype], x.device)
        places = grid.coordinates * ((max((1, *space)) - 1) / 2 or 1.0)
        cloud = _images_of(images, grid.num_positions, x.device)
        return Scattered(rows_of(x).flatten(0, -2), places.repeat(images, 1), cloud)

    def point_call(
        self,
        of_queries: tuple[Tensor, Tensor | None, Tensor | None],
        of_keys: tuple[Tensor, Tensor | None, Tensor | None],
        values: Tensor | None,
        hidden: Tensor | None,
        edge_index: Tensor | None,
    ) -> PointCall:
        """The attention to compute where either are points, of arguments of :meth:`scattered`."""
        queries, keys = self.scattered(*of_queries), self.scattered(*of_keys)
        values = None if values is None else self.scattered(values, *of_keys[1:]).x
        batch, features, coords = keys.batch, keys.x, keys.coords
        if hidden is not None:
            # Of no cloud, and whatever they hold, it reaches nothing, gradients included.
            rows = hidden.flatten().unsqueeze(1)
            features, coords = features.masked_fill(rows, 0.0), coords.masked_fill(rows, 0.0)
            values = None if values is None else values.masked_fill(rows, 0.0)
            batch = kept(_visible, hidden, batch)
            edge_index = None if edge_index is None else kept(_edges_of_visible, hidden, edge_index)
        places = queries.coords
        if not (self.sees_places and self.places.one_space):
            places = coords.new_zeros(queries.x.shape[0], coords.shape[1])
        if self.sees_places and not self.places.one_space:
            coords = coords - _centres(coords, batch)
        rule, length = self.places.rule, self.places.length_scale
        asking, asked = (
            Points(x if length == 1 else x / length, x, edge_index, of, rule)
            for x, of in ((places, queries.batch), (coords, batch))
        )
        q, k, v = self.to_heads(queries.x[None], features[None], None if values is None else values[None])
        dropout = self.dropout if self.training else 0.0
        bias = self.encoding.pair_bias(self.encoding, self._pair_tables())
        modes: dict[str, Any] = {"query": self.query, "keys": self.keys, "dropout": dropout, "envelope": self.cutoff}
        return PointCall(q, k, v, bias, asking, asked, **modes)

    def _pair_tables(self) -> PairTables:
        quotient, measure = self.quotient, self.log_measure
        relation = self.places.relation.in_units(self.places.length_scale)
        return PairTables(
            relate=SeenFromPoses(relation, self.inverse_action) if self.reads_places else nothing_seen,
            inverse_action=self.inverse_action,
            quotient=torch.zeros(0, dtype=torch.long) if quotient is None else quotient,
            relative=self.relative,
            query=self.query,
            keys=self.keys,
            log_measure=None if measure is None else measure.unsqueeze(0),
            offsets=relation.period is None,
        )

    def to_heads(self, queries: Tensor, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(M, B, N, P, C)`` of ``(B, *space, size)``; None for the values of keys."""
        sources = (queries, keys, keys if values is None else values)
        projections = (self.project_queries, self.project_keys, self.project_values)
        q, k, v = (project(x.flatten(1, -2)) for project, x in zip(projections, sources, strict=True))
        return self.complete(q, k, v)


@in_programs(lambda images, positions, device: torch.arange(images, device=device).repeat_interleave(positions))
@constant_tables
def _images_of(images: int, positions: int, device: torch.device) -> Tensor:
    """The number of the image of each position of so many."""
    return torch.arange(images).repeat_interleave(positions).to(device)


def nothing_seen(query: Tensor, key: Tensor) -> Tensor:
    """The relation of points for an encoding without offsets: no numbers, ``(G, 1, A, 1, K, 0)``."""
    return query.new_zeros(query.shape[0], 1, query.shape[1], 1, key.shape[2], 0)


def _centres_in_programs(coords: Tensor, batch: Tensor | None) -> Tensor:
    if batch is None:
        return coords.mean(0, keepdim=True)
    cloud = batch.clamp(min=-1)
    same = (cloud.unsqueeze(1) == cloud).unsqueeze(2)
    return torch.where(same, coords, 0.0).sum(1) / same.sum(1)  # no product: 0 times infinity is no number


@in_programs(_centres_in_programs)
def _centres(coords: Tensor, batch: Tensor | None) -> Tensor:
    """For each point the mean of its cloud, ``(N, d)``; points with a number below zero are one more cloud."""
    if batch is None:
        return coords.mean(0, keepdim=True)
    number = kept(number_of_clouds, batch)
    place = torch.where(batch < 0, number, batch)
    sums = coords.new_zeros(number + 1, coords.shape[1]).index_add(0, place, coords)
    counts = coords.new_zeros(number + 1).index_add(0, place, coords.new_ones(coords.shape[0]))
    return (sums / counts.clamp(min=1).unsqueeze(1)).index_select(0, place)


def _visible(hidden: Tensor, batch: Tensor | None) -> Tensor:
    """The numbers of the clouds of points, -1 for those that are hidden."""
    return torch.where(hidden.flatten(), -1, 0 if batch is None else batch)


def _edges_of_visible(hidden: Tensor, edge_index: Tensor) -> Tensor:
    """The edges from points that are not hidden."""
    return edge_index.index_select(1, where(~hidden.flatten()[edge_index[0]]))


def number_of_clouds(*batches: Tensor | None) -> int:
    """How many clouds there are, by the highest number."""
    return 1 + max(int(numbers_of("batch", batch).max()) for batch in batches if batch is not None)


def spacing_between(space: Sequence[int], key_space: Sequence[int]) -> tuple[int, int]:
    """The least whole spacings of two grids of one extent; a ValueError where axes differ or none are small.

    >>> spacing_between((16, 12), (8, 6)), spacing_between((4, 4), (6, 6))
    ((1, 2), (3, 2))
    """
    sides = [(n, m) for n, m in zip(space, key_space, strict=True) if not n == m == 1]
    ratios = {Fraction(n, m) for n, m in sides} or {Fraction(1)}
    ratio = next(iter(ratios))
    if len(ratios) > 1 or max(ratio.numerator, ratio.denominator) > MOST_STEPS:
        shapes = " and ".join("×".join(map(str, shape)) for shape in (space, key_space))
        raise ValueError(
            f"keys: got grids of {shapes} positions for queries and keys, needed the same ratio along all axes, of "
            f'whole numbers up to {MOST_STEPS}; set spacing, or encoding="none" with kernel_size=None, which see no '
            "places"
        )
    return ratio.denominator, ratio.numerator
