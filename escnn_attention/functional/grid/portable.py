r"""Attention on grids by PyTorch's operators in bounded chunks: for every device, precision, encoding and window.

Queries are taken in tiles against their halo in windows, and in stretches against everything in global attention. What
lies apart by the same steps in one tile has the same place in all of them, so that in a window the function of the
offset is a product of the queries of a tile with a table over its pairs, without a look-up for each score. Together
with the mask it is what is added to the scores.

The scores of a few images, heads and tiles are there at once, and the backward pass makes them again. A program has no
loop, and takes any number of images: the operators of a few heads and tiles stand in it once for each of them, for all
images at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.exporting.mode import in_programs
from escnn_attention.functional.autograd import PRECISE, is_transformed, recompute
from escnn_attention.functional.call import QueryMode
from escnn_attention.functional.grid.call import Arguments, GridCall, PositionalBias
from escnn_attention.functional.grid.widen import join, widen
from escnn_attention.functional.registry import chunk_size
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Blocks, Window

SCORES_PER_CHUNK = 2**22
"""The scores of all images that are held at once. 16 MB in float32."""

SCORES_PER_IMAGE = 2**19
"""The scores of an image that are held at once, or those of a single query: in programs, of any number of images."""

_CHANNELS = 16
"""Fused attention on the CPU wants as many channels of values as of keys, and is fast for multiples of these."""


def attention(call: GridCall) -> Tensor:
    """Attention of terms that are added to the keys: see :func:`escnn_attention.functional.attention`."""
    positions, exact = call.offsets, PRECISE[call.v.dtype]
    in_windows = positions.window.kernel_size is not None
    bias = call.bias.explicit(positions) if in_windows else call.bias
    q, k, v = (t.to(exact) for t in (call.q, call.k, call.v))
    reached = None
    if not positions.complete:
        k, v, reached = isolate_nonfinite(k, v, positions)
    scaled = q / math.sqrt(q.shape[-1])
    if bias.waves is not None:
        # M, B, N, H, J or 1, E and M, B, N, H or 1, P, E
        q, k = widen(scaled, k, bias, call.query, positions.places, key_points=positions.key_places)
        bias = PositionalBias(bias.num_poses)
    else:
        q, k = scaled.unsqueeze(4 if call.query == "own" else 3), k.unsqueeze(3)
    out = _in_chunks(q, k, v, call, positions, bias)  # of few output poses where all of them see the same
    out = out if reached is None else out.masked_fill(reached[:, :, :, None, None], torch.nan)
    return out.expand(-1, -1, -1, call.bias.num_poses, -1).to(call.v.dtype)


def isolate_nonfinite(k: Tensor, v: Tensor, positions: Grid | GridPair) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with zeros for what is not finite, and ``(M, B, N)``, which queries see any of that.

    The mask is added to the scores, and what is not finite would get through to all queries of the tile.
    """
    spoilt = (0 * k).sum((3, 4)) + (0 * v).sum((3, 4))  # NaN where anything is not finite
    if isinstance(positions, Grid) and positions.window.kernel_size is None:
        # All up to now. Integers are counted, as PyTorch has no deterministic sums of others on CUDA.
        k, v = (t.nan_to_num(0.0, 0.0, 0.0) for t in (k, v))
        times = spoilt.unflatten(2, (positions.shape[0], -1)).sum(3, keepdim=True).isnan().long().cumsum(2) > 0
        each = positions.num_positions // positions.shape[0]
        return k, v, times.expand(-1, -1, -1, each).flatten(2)
    blocks = positions.blocks(1)
    seen = (blocks.rows(0, len(blocks.queries)) >= 0) & (blocks.keys >= 0).unsqueeze(1)
    reached = (_take(spoilt.isnan(), blocks.keys).unsqueeze(3) & seen).any(-1).flatten(2)
    k, v = (t.nan_to_num(0.0, 0.0, 0.0) for t in (k, v))
    return k, v, reached.index_select(2, blocks.place)


class _Terms(NamedTuple):
    """Terms that poses and offsets add to the scores of some heads.

    Attributes:
        near: ``(m or 1, H, Q, S, C)``, the function of the offset for the pairs of a tile, or None.
        far: ``(m or 1, H, L, C)``, its table, which is read for each pair, or None.
        pose: ``(m or 1, H, P, C)``, or None.
    """

    near: Tensor | None
    far: Tensor | None
    pose: Tensor | None

    def of_heads(self, some: slice) -> _Terms:
        """The terms of some of the heads."""
        return _Terms(*(t if t is None or len(t) == 1 else t[some] for t in self))


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, call: GridCall, positions: Grid | GridPair, bias: PositionalBias
) -> Tensor:
    """The output ``(M, B, N, H or 1, C)``, a few heads and tiles at a time.

    Args:
        q: ``(M, B, N, H or 1, J, E)``, scaled.
        k: ``(M, B, N', H or 1, P, E)``.
        v: ``(M, B, N', P, C)``.
        call: which poses contribute.
        positions: where they are.
        bias: what is not in the products of queries and keys.
    """
    key_poses = k.shape[4]
    limit = _scores_of_image(v.element_size())
    in_windows, masked = positions.window.kernel_size is not None, not positions.complete
    has_terms = bias.spatial is not None or bias.pose is not None
    pairs = (max(bias.num_poses, q.shape[3]) if has_terms else q.shape[3]) * q.shape[4]
    # Of a query without a window either the scores, or the products with the table of all offsets.
    each = max(k.shape[2] * key_poses, 0 if bias.spatial is None else len(positions.offsets))
    blocks = positions.blocks(max(1, limit // (len(q) * pairs * each)))
    number, size = blocks.queries.shape
    scores = pairs * size * (blocks.keys.shape[1] * key_poses if in_windows else each)
    heads = max(1, min(len(q), limit // (scores * (number if in_windows else 1))))
    tiles = max(1, min(number, limit // (scores * heads))) if in_windows else 1
    near = None
    if in_windows and bias.spatial is not None:
        near = bias.spatial[:, :, blocks.rows(0, 1)[0].clamp(min=0)]
    terms = _Terms(near, None if in_windows else bias.spatial, bias.pose)

    stretches = [_Stretch(blocks, start, start + tiles, in_windows, masked) for start in range(0, number, tiles)]
    images, groups = _images(q.shape[1], heads * tiles * scores, v.element_size()), slices(len(q), heads)
    attend = _attend_again if len(images) * len(groups) * len(stretches) > 1 else _attend

    def attend_heads(some: slice, i: slice) -> Tensor:
        of_heads = terms.of_heads(some)
        return torch.cat(
            [attend(q[some, i], k[some, i], v[some, i], call, of_heads, stretch) for stretch in stretches], dim=2
        )

    parts = [torch.cat([attend_heads(some, i) for some in groups]) for i in images]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.index_select(2, blocks.place)


def slices(number: int, size: int) -> list[slice]:
    """Stretches of this size, of which there is at least one."""
    return [slice(first, first + size) for first in range(0, max(1, number), size)]


def holds_scores(heads: int, positions: int, element_size: int) -> bool:
    """Whether a program may hold all scores of an image: not where the number of positions varies."""
    return isinstance(positions, int) and heads * positions**2 <= _scores_of_image(element_size)


@in_programs(lambda element_size: chunk_size(SCORES_PER_IMAGE, element_size, copies=4))
def _scores_of_image(element_size: int) -> int:
    """How many scores of an image are held at once."""
    return chunk_size(min(SCORES_PER_IMAGE, SCORES_PER_CHUNK), element_size, copies=4)


@in_programs(lambda number, scores, element_size: [slice(None)])
def _images(number: int, scores: int, element_size: int) -> list[slice]:
    """Which images are taken at a time, where each has so many scores."""
    return slices(number, max(1, chunk_size(SCORES_PER_CHUNK, element_size, copies=4) // scores))


@dataclass(frozen=True)
class _Stretch:
    """Some of the blocks of a grid, from ``start`` to ``stop``, of positions that see a window or everything.

    Attributes:
        blocks: all of them.
        start, stop: which of them.
        in_windows: whether each has its own keys.
        masked: whether there are keys that a query does not see.
    """

    blocks: Blocks
    start: int
    stop: int
    in_windows: bool
    masked: bool

    @property
    def queries(self) -> Tensor:
        """The positions of the queries, ``(t, Q)``."""
        return self.blocks.queries[self.start : self.stop]

    @property
    def keys(self) -> Tensor:
        """The positions of the keys, ``(t or 1, S)``."""
        keys = self.blocks.keys
        return keys if len(keys) == 1 else keys[self.start : self.stop]

    @property
    def rows(self) -> Tensor:
        """The rows of all pairs in the table of offsets, ``(t or 1, Q, S)``."""
        return self.blocks.rows(self.start, self.stop)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: GridCall, terms: _Terms, stretch: _Stretch) -> Tensor:
    """The output ``(m, B, t · Q, H or 1, C)`` of some heads and blocks: see :func:`_in_chunks`."""
    q = _take(q, stretch.queries).permute(0, 1, 2, 4, 5, 3, 6)  # m, B, t, H or 1, J, Q, E
    added = _added(q[..., : v.shape[-1]], terms, stretch)
    frames, rows, mask = k.shape[3], q.shape[3:6], None
    if added is not None:
        rows = torch.broadcast_shapes(rows, added.shape[3:6])
        added = added.expand(-1, -1, -1, *rows, k.shape[4], stretch.keys.shape[1])
        mask = added.unflatten(3, (frames, -1)).flatten(4, 6).flatten(5).flatten(2, 3).flatten(0, 1)
    width = -(-k.shape[-1] // _CHANNELS) * _CHANNELS
    found = _softmax(
        _padded(q.unflatten(3, (frames, -1)).flatten(4, 6).flatten(2, 3).flatten(0, 1), width),
        _of_keys(_padded(k, width), stretch, frames),
        _of_keys(_padded(v.unsqueeze(3), width), stretch, frames),
        mask,
        call.dropout,
    )
    out = found[..., : v.shape[-1]].unflatten(0, (q.shape[0], q.shape[1])).unflatten(2, (-1, frames))
    out = out.flatten(3, 4).unflatten(3, rows)  # m, B, t, H or 1, J, Q, C
    out = out.sum(4) if call.query == "all" else out.squeeze(4)
    return out.transpose(3, 4).flatten(2, 3)


@in_programs(_attend)
def _attend_again(q: Tensor, k: Tensor, v: Tensor, call: GridCall, terms: _Terms, stretch: _Stretch) -> Tensor:
    """:func:`_attend`, whose scores the backward pass makes again."""
    if not torch.is_grad_enabled():
        return _attend(q, k, v, call, terms, stretch)
    return recompute(_attend, q, k, v, call, terms, stretch, draws=call.dropout > 0)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    if mask is not None:
        q = q.unsqueeze(2).expand(-1, -1, mask.shape[2] // q.shape[2], -1, -1).flatten(2, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=1.0)


@in_programs(_fused)
def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention with what is added to the scores, for each query as often as there are rows of it, pose by pose.

    Fused attention has derivatives of the first order only.
    """
    if not (torch.is_grad_enabled() or is_transformed(q, k, v)):
        return _fused(q, k, v, mask, dropout)
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores = (scores.unsqueeze(2) + mask.unflatten(2, (-1, q.shape[2]))).flatten(2, 3)
    p = scores.softmax(-1)
    return (F.dropout(p, dropout) if dropout else p) @ v


def _padded(x: Tensor, width: int) -> Tensor:
    """Vectors with as many channels as that, the rest of them zeros."""
    return F.pad(x, (0, width - x.shape[-1]))


def _of_keys(x: Tensor, stretch: _Stretch, frames: int) -> Tensor:
    """Rows of keys ``(m, B, N, H or 1, P, E)``, gathered for each block: ``(m · B, t · H, P · S, E)``, pose by pose."""
    blocks, poses = stretch.keys, x.shape[4]
    if not stretch.in_windows:
        return x.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).expand(-1, -1, frames, -1, -1).flatten(0, 1)
    seen = blocks.clamp(min=0).unsqueeze(1) * poses + torch.arange(poses, device=x.device).unsqueeze(1)
    # One after the other, from memory in one piece: several times as fast as for all images at once.
    images = torch.arange(x.shape[0] * x.shape[1], device=x.device) * (x.shape[2] * poses)
    rows = (images.unsqueeze(1) + seen.flatten()).flatten()
    return x.flatten(0, 4).index_select(0, rows).unflatten(0, (-1, len(blocks), poses * blocks.shape[1]))


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The positions of blocks, ``(t, n)``, of ``(m, B, N, ...)``; any where one only fills up."""
    return x.index_select(2, places.clamp(min=0).flatten()).unflatten(2, places.shape)


def _added(q: Tensor, terms: _Terms, stretch: _Stretch) -> Tensor | None:
    """Terms added to the scores, ``(m or 1, B or 1, t, H or 1, J or 1, Q, P or 1, S or 1)``; None for nothing.

    Args:
        q: ``(m, B, t, H or 1, J, Q, C)``, the queries.
        terms: what they see of poses and offsets.
        stretch: where they are.
    """
    near, far, pose = terms

    def seen(table: Tensor) -> Tensor:
        """The table of each head by which queries are multiplied."""
        return table.to(q.dtype).expand(len(q), *table.shape[1:])

    added: Tensor | None = None
    if near is not None:
        added = torch.einsum("mbthjqc,mhqsc->mbthjqs", _of_poses(q, near), seen(near))
    elif far is not None:
        table = torch.einsum("mbthjqc,mhlc->mbthjql", _of_poses(q, far), seen(far))
        index = stretch.rows.clamp(min=0)[:, None, None].expand(*table.shape[:6], -1)
        added = table.gather(-1, index)
    if stretch.masked:
        # Numbers, and not minus infinity: a query that only fills up a block sees nothing, and must not become NaN.
        unseen = ((stretch.rows < 0) | (stretch.keys < 0).unsqueeze(1))[:, None, None]
        added = q.new_zeros(()).expand(1, 1, *unseen.shape) if added is None else added
        added = added.masked_fill(unseen, torch.finfo(q.dtype).min / 2)
    added = added if added is None else added.unsqueeze(-2)
    if pose is not None:
        of_poses = torch.einsum("mbthjqc,mhpc->mbthjqp", _of_poses(q, pose), seen(pose)).unsqueeze(-1)
        added = of_poses if added is None else added + of_poses
    return added


def _of_poses(q: Tensor, table: Tensor) -> Tensor:
    """Queries as every output pose of a table has them."""
    return q.expand(-1, -1, -1, table.shape[1], -1, -1, -1)


def plainly(call: Arguments) -> Tensor:
    """The output of a loop over a grid by operations that autograd looks through."""
    dtype, exact = call.q.dtype, PRECISE[call.q.dtype]
    if exact != dtype:
        return plainly(call._replace(q=call.q.to(exact), k=call.k.to(exact), v=call.v.to(exact))).to(dtype)
    query: QueryMode = "all" if call.sum_query_poses else "own"
    window = Window(call.kernel_size or None, call.window, call.dilation)
    of_queries, of_keys = call.spacings or (1, 1)
    grid = keys = Grid(tuple(call.shape), window, device=call.q.device, spacing=of_queries)
    if call.spacings:
        keys = Grid(tuple(call.key_shape), Window(), device=call.q.device, spacing=of_keys)
    bias = PositionalBias(call.num_poses, call.spatial, call.pose)
    made = GridCall(call.q, call.k, call.v, bias, grid, keys, query=query, dropout=call.dropout)
    if call.cos is None or call.sin is None or call.readout is None:
        return attention(made)
    q, k = call.q / math.sqrt(call.q.shape[-1]), call.k.unsqueeze(3)
    q = q.unsqueeze(4 if query == "own" else 3)
    cos, sin = (t.transpose(1, 2)[:, None, :, :, None] for t in (call.cos, call.sin))  # M or 1, 1, positions, H, 1, F
    a, b = (q @ call.readout[:, None, None, None]).chunk(2, dim=-1)
    c, s = cos[:, :, : q.shape[2]], sin[:, :, : q.shape[2]]
    q = join(dtype, q, a * c - b * s, a * s + b * c)
    k = join(dtype, k, cos[:, :, -k.shape[2] :], sin[:, :, -k.shape[2] :])
    return _in_chunks(q, k, call.v, made, made.offsets, bias).expand(-1, -1, -1, call.num_poses, -1)
