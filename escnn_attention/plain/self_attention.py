"""Group self-attention on plain tensors: what the equivariant layers wrap and what their ``export()`` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.encodings import Encoding
from escnn_attention.encodings.base import Needs
from escnn_attention.encodings.bias import FromAllPoses, positional_bias
from escnn_attention.exporting.mode import exporting, packaging
from escnn_attention.functional import ON_GRIDS, GridCall, KeyMode, PositionalBias, QueryMode, probabilities
from escnn_attention.functional.autograd import PRECISE, needs_operators
from escnn_attention.functional.grid import native, portable
from escnn_attention.functional.grid.triton import tiled
from escnn_attention.geometry.grid import Grid, kept_grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.random_transformation import LieElement, RandomTransformation
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.projections import (
    AttentionMode,
    FromPoses,
    GroupTables,
    HeadModule,
    Scalars,
    ToPoses,
    in_irreps,
    in_one_pose,
)

_KEPT = 3
"""Without gradients expanded weights are kept: irreps take less time from so many times as many positions.

Measured: at most 2 on one core, 3 on two."""


@dataclass(frozen=True)
class Resampling:
    """The grid of the queries beside that of the keys, and the queries there; at most one number is not 1.

    Attributes:
        stride: queries are at every so many positions, from the first to the last, or on a torus in their middle.
        scale_factor: so many queries along each axis in place of one, all with its content.
    """

    stride: int = 1
    scale_factor: int = 1
    circular: bool = False

    @property
    def resizes(self) -> bool:
        """Whether queries have another grid than keys."""
        return not self.stride == self.scale_factor == 1

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the grid of the queries; a ValueError where the stride does not fit."""
        if self.circular and any(n % self.stride for n in shape):
            raise ValueError(
                f"stride: got {self.stride} on a torus of {'×'.join(map(str, shape))} positions, needed sides that it "
                "divides"
            )
        if not self.circular and any((n - 1) % self.stride for n in shape):
            raise ValueError(
                f"stride: got {self.stride} on a grid of {'×'.join(map(str, shape))} positions, whose last ones it "
                f"misses, so that the group would not map the output onto itself; needed sizes of {self.stride}n + 1"
            )
        return tuple(-(-n // self.stride) * self.scale_factor for n in shape)

    def __call__(self, x: Tensor, first: int) -> Tensor:
        """Of a tensor, whose axes from the first on are those of the grid of keys, one on the grid of queries."""
        for axis in range(first, x.dim()):
            if self.stride > 1:
                first_query = self.stride // 2 if self.circular else 0
                x = x.index_select(axis, torch.arange(first_query, x.shape[axis], self.stride, device=x.device))
            if self.scale_factor > 1:
                x = x.repeat_interleave(self.scale_factor, axis)
        return x

    def grids(self, keys: Grid) -> tuple[Grid, Grid]:
        """The grids of queries and keys, of that of the keys among themselves."""
        if not self.resizes:
            return keys, keys
        like: dict[str, Any] = {"dtype": keys.offsets.dtype, "device": keys.offsets.device, "frame": keys.frame}
        queries = Grid(self.shape(keys.shape), keys.window, spacing=self.stride, **like)
        return queries, Grid(keys.shape, Window(), spacing=self.scale_factor, **like)


class FieldConvolution(ExactBuffers):
    """Convolutions of some channels each, ``(B, in, *space)``, whose outputs ``(B, out, *space)`` follow each other."""

    def __init__(self, parts: Sequence[torch.nn.Module], channels: Sequence[Sequence[int]]):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        for i, some in enumerate(channels if len(parts) > 1 else ()):
            self.register_exact(f"channels_{i}", np.array(some))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            y: Tensor = self.parts[0](x)
            return y
        made = [part(x.index_select(1, getattr(self, f"channels_{i}"))) for i, part in enumerate(self.parts)]
        return torch.cat(made, dim=1)


class SelfAttention(HeadModule):
    """Projections to heads, attention between poses on a grid, projection to the output.

    Maps ``(B, in, *space)`` to ``(B, out, *space)``, or to the grid of a ``resampling``. From
    :class:`~escnn_attention.plain.projections.Scalars` queries, keys and values have no poses, and all output poses
    share the scores of the content. Features pass through a ``convolution`` before they are projected, if there is one.
    """

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding,
        tables: GroupTables,
        window: Window,
        mode: AttentionMode,
        needs: Needs,
        *,
        query_weight: float = 1.0,
        transformation: RandomTransformation | None = None,
        resampling: Resampling = Resampling(),
        convolution: torch.nn.Module | None = None,
    ):
        parts = (project_in, project_out, encoding, needs, tables, mode)
        super().__init__(*parts, query_weight=query_weight, transformation=transformation)
        self.window, self.resampling, self.resizes = window, resampling, resampling.resizes
        self.convolution = convolution
        # Some kernels of Triton read positions side by side; others, and PyTorch's fused attention, read channels so.
        of_offsets = encoding.form in ("offsets", "features") and not encoding.absolute
        self.has_table = window.kernel_size is not None or of_offsets
        self.lifts = isinstance(project_in, Scalars)  # queries and keys have no poses, the same ones for all outputs
        # Scores are products of the channels of all poses, every position sees every other, and rows of channels can be
        # mapped to heads and back by one product each.
        self.by_content = self.shared_scores and encoding.form is None and not encoding.rotates
        self.by_content &= mode.normalization == "softmax" and needs.queries and needs.keys and query_weight == 1
        self.by_content &= window.looks_everywhere and not self.resizes
        self.by_content &= isinstance(project_in, ToPoses) and project_in.frames is not None and project_out.groups > 1
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Have the encoding set how queries and keys begin."""
        of_heads = self.project_in.weight.unflatten(0, (len(self.needs.fields), self.num_heads, -1))
        made = dict(zip(self.needs.fields, of_heads, strict=True))
        queries, bias = made.get("queries"), None
        if queries is not None and self.project_in.bias is not None:
            bias = self.project_in.bias[: queries[..., 0].numel()].view(queries.shape[:2])
        self.encoding.start(queries, bias, made.get("keys"))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The layer on features ``(B, in, *space)``; positions that a mask ``(B, *space)`` hides are not there."""
        # Drawn in training only: what a trained layer gives is no matter of chance.
        element = self.transformation.draw() if self.transformation is not None and self.training else None
        if mask is None:
            return self.attend(x, self.positions(x), element)
        # Whatever they hold, it reaches nothing, gradients included.
        x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        y = self.attend(x, self.positions(x), element, by_position(mask))
        return y.masked_fill(~self.resampling(mask, 1).unsqueeze(1), 0.0)

    def positions(self, x: Tensor) -> Grid:
        """The grid of a tensor of features."""
        return kept_grid(x.shape[2:], self.window, self.action_columns.dtype, x.device)

    def attend(
        self, x: Tensor, positions: Grid, element: LieElement | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The layer on features ``(B, in, *space)`` at the given positions, its samples transformed by an element.

        Those that a mask ``(B, N)`` hides are not attended to.
        """
        if self.convolution is not None:
            x = self.convolution(x)
        if self.transformation is not None and element is not None:
            x = self.transformation.inputs(x, element, inverse=True)
        if mask is None and self.by_content and self._fuses(x):
            y = fields_of(self._attend_by_content(x.unsqueeze(-1).flatten(2).transpose(1, 2)), x.shape[2:])
        else:
            call = self.call(x, positions, element)
            y = ON_GRIDS.compute(call if mask is None else replace(call, bias=hidden(call.bias, mask)), self.backend)
            y = fields_of(self.project(y), self.resampling.shape(x.shape[2:]) if self.resizes else x.shape[2:])
        if self.transformation is not None and element is not None:
            y = self.transformation.outputs(y, element)
        return y

    def _fuses(self, x: Tensor) -> bool:
        """Whether expanded weights and PyTorch's fused attention do the work: in programs, or without gradients."""
        if self.backend != "auto" or x.device.type != "cpu" or x.dtype != self.project_in.weight.dtype:
            return False
        if x.dtype != PRECISE[x.dtype] or torch.is_autocast_enabled("cpu") or (self.training and self.dropout):
            return False
        if self.qk_norm is not None or self.registers is not None:
            return False
        if exporting():
            return not packaging() and portable.holds_scores(self.num_heads, math.prod(x.shape[2:]), x.element_size())
        return native.fuses(self.channels * self.action_columns.shape[1]) and not needs_operators(x)

    def _attend_by_content(self, rows: Tensor) -> Tensor:
        """The attention of rows of channels ``(B, N, in)``, in rows ``(B, N, out)``."""
        project_in = self.project_in
        assert isinstance(project_in, ToPoses)
        irreps, number = project_in.irreps, math.prod(rows.shape[:2])
        if irreps is not None and in_irreps(irreps, rows, project_in.weight, number // _KEPT):
            # Poses lie inside the channels of a head.
            made = (t.permute(1, 0, 2, 4, 3) for t in project_in.in_parts(rows, 3))
            queries, values, keys = (t.flatten(3) for t in made)
            y = F.scaled_dot_product_attention(queries, keys, values)
            return self.project_out(y.unflatten(3, (self.channels, -1)).permute(1, 0, 2, 4, 3))
        fields = project_in.of_rows(rows).unflatten(-1, (3, self.num_heads, -1))
        queries, values, keys = fields.permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(queries, keys, values)
        return self.project_out.of_rows(y.transpose(1, 2).flatten(2))

    def attention_maps(
        self, x: Tensor, queries: Tensor, poses: Sequence[int] | None, mask: Tensor | None = None
    ) -> Tensor:
        """The probabilities that :meth:`escnn_attention.GroupSelfAttention.attention_maps` gives, at flat positions."""
        if self.shared_scores and poses is not None:
            poses = [0] * len(poses)  # all alike
        chosen = None if poses is None else torch.tensor(poses, device=x.device)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(1), 0.0)
        if self.convolution is not None:
            x = self.convolution(x)
        call = self.call(x, self.positions(x))
        if mask is None:
            return maps_of(call, queries, chosen, x.shape[2:])
        maps = maps_of(replace(call, bias=hidden(call.bias, by_position(mask))), queries, chosen, x.shape[2:])
        seen = by_position(self.resampling(mask, 1))[:, queries.to(x.device)]
        return maps.masked_fill(~seen.view(len(x), 1, 1, -1, *[1] * (maps.dim() - 4)), 0.0)

    def call(self, x: Tensor, positions: Grid, element: LieElement | None = None) -> GridCall:
        """The attention to compute, of features ``(B, in, *space)`` at the given positions."""
        backend = self.backend if self.backend != "auto" or x.device.type != "cuda" else "triton"
        # So PyTorch's convolutions have them, and the compiled loop reads them.
        side_by_side = self.has_table
        if side_by_side and backend == "triton":
            half = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
            dtype = torch.get_autocast_dtype(x.device.type) if half else x.dtype
            side_by_side = not tiled(positions.complete, self.channels, dtype)
        rows = (x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)).transpose(1, 2)
        by_loop = not self.has_table and self.backend in ("auto", "native")
        if by_loop and native.reads_channels(x, self.channels):
            # As one image: of all positions there is one product.
            heads = self.to_heads(rows.flatten(0, 1).unsqueeze(0), side_by_side=True)
            q, k, v = (t.unflatten(2, rows.shape[:2]).squeeze(1) for t in heads)
        else:
            q, k, v = self.to_heads(rows, side_by_side=side_by_side)
        # One query without a pose contributes to every output pose, whichever of its poses would.
        query: QueryMode = "all" if self.lifts else self.query
        keys: KeyMode = "all" if self.lifts else self.keys
        places: Grid | GridPair
        grids, places = (positions, positions), positions
        if self.resizes:
            grids = self.resampling.grids(positions)
            places = GridPair(*grids)
            q = self.resampling(q.movedim(2, -1).unflatten(-1, positions.shape), 4).flatten(4).movedim(-1, 2)
        if self.shared_scores:
            q, k, v = in_one_pose(q, k, v)
            query, keys = "own", "all"
        dropout, bias = self.dropout if self.training else 0.0, self.bias(places, element)
        how: dict[str, Any] = {"query": query, "keys": keys, "dropout": dropout, "normalization": self.normalization}
        return GridCall(q, k, v, bias, *grids, **how)

    def bias(self, positions: Grid | GridPair, element: LieElement | None = None) -> PositionalBias:
        """Terms that the positional encoding adds to the scores at the given positions."""
        inverse = self.action_columns.permute(1, 2, 0)
        if self.shared_scores:
            seen = FromAllPoses(self.seen_encoding, inverse)
            return positional_bias(seen, positions, seen.identity, None)
        if self.transformation is not None and element is not None:
            inverse = inverse @ self.transformation.space(element, inverse=True).to(inverse)
        seen = self.encoding if self.stabilizer is None else self.seen_encoding
        return positional_bias(seen, positions, inverse, self.quotient, self.relative, self.log_measure)


def hidden(bias: PositionalBias, mask: Tensor) -> PositionalBias:
    """The bias with a measure of zero for the positions that a mask ``(B, N)`` hides, for each image its own."""
    measure = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf).unsqueeze(1)
    return replace(bias, log_measure=measure if bias.log_measure is None else bias.log_measure + measure)


def by_position(mask: Tensor) -> Tensor:
    """A mask ``(B, *space)`` as ``(B, N)``, of one position without a space."""
    return mask.flatten(1) if mask.dim() > 1 else mask.unsqueeze(1)


def maps_of(call: GridCall, queries: Tensor, poses: Tensor | None, space: Sequence[int]) -> Tensor:
    """The probabilities of queries and poses, ``(B, M, poses, queries, query poses, key poses, *space)``."""
    p = probabilities(call, queries.to(call.q.device), poses)
    p = p.permute(1, 0, 3, 2, 4, 6, 5)  # From heads, images, queries, output and query poses, keys, key poses.
    return p.reshape(*p.shape[:6], *space)


def rows_of(x: Tensor) -> Tensor:
    """Features ``(B, in, *space)`` as rows of channels, one a position: ``(B, *space, in)``, of one without a space."""
    return x.movedim(1, -1) if x.dim() > 2 else x.unsqueeze(1)


def fields_of(y: Tensor, space: Sequence[int]) -> Tensor:
    """Rows of channels ``(B, N, out)`` as features ``(B, out, *space)``, the inverse of :func:`rows_of`."""
    return y.transpose(1, 2).unflatten(2, tuple(space)) if len(space) else y.squeeze(1)
