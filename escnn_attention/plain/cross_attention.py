"""Attention of one set of features to another, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from escnn_attention.encodings import Encoding
from escnn_attention.encodings.bias import positional_bias
from escnn_attention.functional import ON_GRIDS, GridCall, KeyMode, QueryMode
from escnn_attention.geometry.grid import Grid, kept_grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window
from escnn_attention.plain.projections import FromPoses, Scalars, ScoredHeads, ToPoses
from escnn_attention.plain.self_attention import (
    AttentionMode,
    GroupTables,
    fields_of,
    hidden,
    maps_of,
    register_tables,
    rows_of,
)

__all__ = ["MOST_STEPS", "CrossAttention", "Places", "Projections", "spacing_between"]

MOST_STEPS = 16
"""The largest spacing of two grids, in the unit that both have."""


@dataclass(frozen=True)
class Projections:
    """The projections of a cross-attention.

    Attributes:
        queries, keys, values: from features to C fields for each of M heads.
        out: from M · C regular fields to the output.
    """

    queries: ToPoses | Scalars
    keys: ToPoses | Scalars
    values: ToPoses | Scalars
    out: FromPoses


@dataclass(frozen=True)
class Places:
    """Where queries and keys are.

    Attributes:
        one_space: whether queries and keys lie in the same space. In another space queries have no place among the
            keys; they stand at the centre of the keys.
        window: which keys a query sees.
        spacing: of the grids of queries and keys, in a unit that both have; None for grids of the same extent.
    """

    one_space: bool
    window: Window
    spacing: tuple[int, int] | None = None


class CrossAttention(ScoredHeads):
    """Projections to heads, attention of the poses of one set to those of another, projection to the output.

    Maps ``(B, query size, *space)`` and ``(B, key size, *other space)`` to ``(B, out, *space)``. It knows the group by
    tables only and needs no escnn.

    Args:
        projections: from features to heads, and back. From
            :class:`~escnn_attention.plain.projections.Scalars` what is projected has no poses.
        encoding: a bound encoding that reads queries and keys.
        tables: of the group.
        places: of queries and keys.
        mode: which poses, and how.
        query_weight: by which the output of the heads is multiplied: the measure of a query pose, with
            ``query="all"``.
    """

    inverse_action: Tensor
    quotient: Tensor | None
    relative: Tensor | None
    log_measure: Tensor | None

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
        self.places, self.window = places, places.window
        self.dropout, self.backend = mode.dropout, mode.backend
        # One query without a pose contributes to every output pose, whichever of its poses would.
        self.query: QueryMode = "all" if isinstance(projections.queries, Scalars) else mode.query
        self.keys: KeyMode = "all" if isinstance(projections.keys, Scalars) else mode.keys
        self.query_weight = query_weight
        register_tables(self, tables)

    @property
    def channels(self) -> int:
        return len(self.project_queries.weight) // self.num_heads

    @property
    def sees_places(self) -> bool:
        """Whether it matters where queries and keys are."""
        encoding = self.encoding
        sees = encoding.dim > 0 and (encoding.form is not None or encoding.rotates)
        return sees or self.window.kernel_size is not None

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Features ``(B, out, *space)``: see :meth:`escnn_attention.GroupCrossAttention.forward`."""
        call = self.call(queries, keys, values, self.grids(queries, keys), key_padding_mask)
        return self.output(ON_GRIDS.compute(call, self.backend), queries.shape[2:])

    def attention_maps(
        self,
        sets: tuple[Tensor, Tensor, Tensor | None],
        positions: Tensor,
        poses: Sequence[int] | None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The probabilities of :meth:`escnn_attention.GroupCrossAttention.attention_maps`, at flat positions.

        ``sets`` are queries, keys and values.
        """
        queries, keys, values = sets
        chosen = None if poses is None else torch.tensor(poses, device=queries.device)
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
            bias = hidden(bias, ~key_padding_mask.reshape(k.shape[1], -1))
        dropout = self.dropout if self.training else 0.0
        return GridCall(q, k, v, bias, *grids, query=self.query, keys=self.keys, dropout=dropout)

    def to_heads(self, queries: Tensor, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(M, B, N, P, C)`` of features ``(B, *space, size)``.

        Without ``values`` they are made of the features that keys are made of.
        """
        sources = (queries, keys, keys if values is None else values)
        projections = (self.project_queries, self.project_keys, self.project_values)
        q, k, v = (_heads_of(project, x) for project, x in zip(projections, sources, strict=True))
        return self.complete(q, k, v)

    def output(self, y: Tensor, space: Sequence[int]) -> Tensor:
        """Features ``(B, out, *space)`` of what heads give, ``(M, B, N, |H|, C)``."""
        if self.query_weight != 1:
            y = self.query_weight * y
        return fields_of(self.project_out(y), space)


def _heads_of(project: ToPoses | Scalars, x: Tensor) -> Tensor:
    """What a projection makes of features ``(B, *space, size)``, for each of M heads: ``(M, B, N, P, C)``."""
    made: Tensor = project(x)
    return made.reshape(len(made), x.shape[0], math.prod(x.shape[1:-1]), *made.shape[-2:])


def spacing_between(space: Sequence[int], key_space: Sequence[int]) -> tuple[int, int]:
    """The spacings of two grids of the same extent, whose cells fill it: whole numbers, as small as possible.

    Raises:
        ValueError: along some axes there are others, or no small ones.

    Example:
        >>> from escnn_attention.plain.cross_attention import spacing_between
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
