r"""Windows on the CPU: small tiles of queries against their halo, in pieces that stay in the cache.

Reading and writing scores is what costs, so the scores of a few tiles of one head are worked on at a time, in buffers
that are used over and over, and the backward pass makes them again from the logarithms of their sums. Every other trick
saves a pass over them:

- Scores are in units of log 2, because :math:`2^x` is the cheapest exponential, and where none can overflow the largest
  of a row is not subtracted.
- Constants in a few more channels let a product do more than one thing. Queries have 1 and :math:`-\log_2` of the sum;
  keys have a large negative number outside the grid, and 1; values have 1, which makes the sum, and meets minus
  :math:`\langle dO, O\rangle` in the gradient of the softmax.
- The function of the offset is a product of the queries at one place of a tile with the offsets to its halo; the scores
  of all key poses start from it, and the query poses of a place share it.
- With ``query="all"`` the probabilities are summed over the query poses before they meet the values, and the gradients
  of the scores over the output poses before they meet the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional import blocked
from escnn_attention.functional.terms import QueryMode, Terms, working_precision
from escnn_attention.functional.tiles import Piece, Tiles, tiles_of
from escnn_attention.positions import Grid, Positions, Window, WindowShape

__all__ = ["PIECE", "attention", "refuses"]

PIECE = 2**20
"""The number of scores that are worked on at once. 4 MB in float32, two to five times over."""

_LOG2E = math.log2(math.e)


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}"
    if not isinstance(positions, Grid) or not positions.shape:
        return "it needs a grid"
    if positions.window.kernel_size is None:
        return "it needs a window, and the attention is global"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    assert isinstance(positions, Grid)
    window = positions.window
    assert window.kernel_size is not None
    terms = terms.explicit(positions)
    if query == "all" and q.shape[2] == 1:
        # One query for all output poses: there is nothing to sum.
        q, query = q.expand(-1, -1, terms.num_poses, -1, -1), "own"
    dtype, exact = v.dtype, working_precision(v.dtype)
    q, k, v = (t.to(exact) for t in (q, k, v))
    spatial, pose = (None if t is None else t.to(exact) for t in (terms.spatial, terms.pose))
    seed = torch.randint(2**62, (1,)) if dropout else None
    shape = list(positions.shape)
    grid = (shape, window.kernel_size, window.shape, window.dilation)
    out, _ = _forward(q, k, v, spatial, pose, seed, terms.num_poses, *grid, query == "all", dropout)
    return out.to(dtype)


class _Pass:
    """One pass, forward or backward, over the pieces of a call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spatial: Tensor | None,
        pose: Tensor | None,
        seed: Tensor | None,
        num_poses: int,
        tiles: Tiles,
        summed: bool,
        dropout: float,
    ):
        self.q, self.k, self.v, self.spatial, self.pose = q, k, v, spatial, pose
        self.tiles, self.num_poses, self.summed, self.dropout = tiles, num_poses, summed, dropout
        self.num_images, self.num_heads, self.query_poses, _, self.channels = q.shape
        self.key_poses = k.shape[2]
        self.num_queries, self.num_places = tiles.rows.shape
        # The output poses are worked on one by one if each has all query poses, and else together with their own.
        self.num_frames = num_poses if summed else 1
        self.columns = self.key_poses * self.num_places
        self.width, self.value_width = _width(self.channels + 2), _width(self.channels + 1)
        self.masked = -1e30 if q.dtype == torch.float32 else -1e300
        self.seed = 0 if seed is None else int(seed)
        self.generator = torch.Generator()
        self.buffers: dict[str, Tensor] = {}
        self.embedded: dict[tuple[str, int], Tensor] = {}

    def pieces(self) -> tuple[list[slice], list[Piece]]:
        """Images, and tiles of an image, that are worked on together."""
        return self.tiles.pieces(self.num_images, self.query_poses * self.num_queries * self.columns, PIECE)

    def take(self, name: str, *shape: int) -> Tensor:
        """A buffer that is used over and over: fresh memory is filled many times more slowly than cached memory."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.q.new_empty(size)
        return self.buffers[name][:size].view(shape)

    def embed(self, name: str, x: Tensor, width: int, margin: int, inside: list[float], outside: list[float]) -> Tensor:
        """A buffer ``(b, P, *padded, width)`` with ``x`` ``(b, P, N, C)`` on the grid.

        The channels after C are the constants ``inside`` on the grid and ``outside`` around it; the rest is 0.
        """
        channels, key = x.shape[-1], (name, len(x))
        if key not in self.embedded:
            buffer = x.new_zeros(*x.shape[:2], *self.tiles.padded(margin), width)
            for i, (on_grid, off_grid) in enumerate(zip(inside, outside, strict=True), start=channels):
                buffer[..., i] = off_grid
                self.tiles.inner(buffer, margin)[..., i] = on_grid
            self.embedded[key] = buffer
        buffer = self.embedded[key]
        self.tiles.inner(buffer, margin)[..., :channels] = x.unflatten(2, self.tiles.shape)
        return buffer

    def queries(self, head: int, images: slice) -> Tensor:
        scaled = self.q[images, head] * (_LOG2E / math.sqrt(self.channels))
        return self.embed("q", scaled, self.width, 0, [1.0, 0.0], [0.0, 0.0])

    def keys(self, head: int, images: slice) -> Tensor:
        return self.embed("k", self.k[images, head], self.width, self.tiles.radius, [0.0, 1.0], [self.masked, 1.0])

    def values(self, head: int, images: slice) -> Tensor:
        return self.embed("v", self.v[images, head], self.value_width, self.tiles.radius, [1.0], [0.0])

    def gather(self, name: str, buffer: Tensor, piece: Piece, margin: int) -> Tensor:
        """The tiles of a piece in one stretch of memory, ``(t, P · places, width)``."""
        tiles = self.tiles.view(buffer, margin)[(slice(None), *piece)]
        gathered = self.take(name, *tiles.shape).copy_(tiles)
        places = self.num_places if margin else self.num_queries
        return gathered.view(-1, buffer.shape[1] * places, buffer.shape[-1])

    def drop(self, name: str, shape: torch.Size, place: tuple[int, ...]) -> Tensor:
        """What dropout multiplies probabilities with: the same in both passes."""
        self.generator.manual_seed(hash((self.seed, *place)) % 2**63)
        keep = 1 - self.dropout
        return self.take(name, *shape).bernoulli_(keep, generator=self.generator).div_(keep)


class _Scores:
    """The scores of one head: content, and what the function of the offset and the poses add to it.

    A tile has a row for each query pose and query, and a column for each key pose and place of the halo. What is added
    to a row is a product with its table, of the offsets to the halo and then of the key poses. The output poses are
    the frames in which a tile is seen; where they are worked on together, a row is seen in the frame of its own pose.
    """

    def __init__(self, call: _Pass, head: int):
        self.call = call
        rows, channels = call.tiles.rows, call.channels
        table = call.q.new_zeros(call.num_poses, *rows.shape, call.width)
        if call.spatial is not None:
            table[..., :channels] = _of_head(call.spatial, head)[:, rows.clamp(min=0)]
        table[..., channels] = call.masked * (rows < 0).to(table.dtype)
        if call.pose is not None:
            pose = _of_head(call.pose, head)[:, None].expand(-1, len(rows), -1, -1)
            table = torch.cat([table, F.pad(pose, (0, call.width - channels))], dim=2)
        self.table = table if call.summed else table.flatten(0, 1).unsqueeze(0)
        self.learned = call.spatial is not None or call.pose is not None
        self.grad = torch.zeros_like(self.table)

    def __call__(self, q: Tensor, k: Tensor, frame: int) -> Tensor:
        """``(t, R, P · S)`` in units of log 2, of queries ``(t, R, width)`` and keys ``(t, P · S, width)``."""
        call, table = self.call, self.table[frame]
        out = call.take("scores", len(q), q.shape[1], call.columns)
        start = out.view(-1, len(table), call.key_poses, call.num_places)
        added = call.take("added", len(table), len(start), table.shape[1])
        torch.bmm(self._by_table(q, table), table.transpose(1, 2), out=added)
        offset, pose = added.transpose(0, 1).split([call.num_places, table.shape[1] - call.num_places], dim=-1)
        if call.pose is None:
            start.copy_(offset.unsqueeze(2).expand_as(start))
        else:
            torch.add(offset.unsqueeze(2), pose.unsqueeze(3), out=start)
        return out.baddbmm_(q, k.transpose(1, 2))

    def backward(self, grad: Tensor, q: Tensor, grad_q: Tensor, frame: int) -> None:
        """Add what a gradient of the scores means for the table, and by it for the queries."""
        if not self.learned:
            return
        call, table = self.call, self.table[frame]
        by_pose = grad.view(-1, len(table), call.key_poses, call.num_places)
        added = call.take("added", len(by_pose), len(table), table.shape[1])
        if call.pose is not None:
            torch.sum(by_pose, -1, out=added[..., call.num_places :])
        # Slab by slab: a reduction of this axis takes several times longer.
        _add_up(by_pose.unbind(2), added[..., : call.num_places])
        added = added.transpose(0, 1)
        self._by_table(grad_q, table).add_(torch.bmm(added, table))
        self.grad[frame].add_(torch.bmm(self._by_table(q, table).transpose(1, 2), added).transpose(1, 2))

    def _by_table(self, rows: Tensor, table: Tensor) -> Tensor:
        """Rows ``(t, R, width)`` with those together that have one table: ``(tables, rows, width)``."""
        return rows.view(-1, len(table), rows.shape[-1]).transpose(0, 1)

    def add_gradients(self, spatial: Tensor | None, pose: Tensor | None) -> None:
        """Add the gradients of the terms, ``(H, L, C)`` and ``(H, P, C)``, once all pieces are done."""
        call = self.call
        rows = call.tiles.rows.flatten()
        grad = self.grad[..., : call.channels].reshape(call.num_poses, call.num_queries, -1, call.channels)
        if spatial is not None:
            of_rows = grad[:, :, : call.num_places].flatten(1, 2)
            spatial.index_add_(1, rows[rows >= 0], of_rows[:, rows >= 0], alpha=1 / _LOG2E)
        if pose is not None:
            pose.add_(grad[:, :, call.num_places :].sum(1), alpha=1 / _LOG2E)


def _forward_pass(call: _Pass) -> tuple[Tensor, Tensor]:
    """The output ``(B, M, H, N, C)``, and the logarithms of the sums ``(B, M, frames, J, *padded)``."""
    tiles, channels = call.tiles, call.channels
    batch, heads = call.num_images, call.num_heads
    out = call.q.new_empty(batch, heads, call.num_poses, call.q.shape[3], channels)
    sums = call.q.new_zeros(batch, heads, call.num_frames, call.query_poses, *tiles.padded(0))
    safe = _cannot_overflow(call)
    images, pieces = call.pieces()
    for head in range(heads):
        scores = _Scores(call, head)
        for some in images:
            q, k, v = call.queries(head, some), call.keys(head, some), call.values(head, some)
            result = call.take("result", len(q), call.num_poses, *tiles.padded(0), channels)
            for piece in pieces:
                q_i = call.gather("queries", q, piece, 0)
                k_i, v_i = call.gather("keys", k, piece, tiles.radius), call.gather("values", v, piece, tiles.radius)
                summed = call.take("summed", len(q_i), call.num_poses, call.num_queries, call.columns)
                for frame in range(call.num_frames):
                    p = scores(q_i, k_i, frame)
                    shift = None if safe else p.amax(-1, keepdim=True)
                    p = (p if shift is None else p.sub_(shift)).exp2_()
                    total = p.sum(-1, keepdim=True)
                    logarithm = total.log2() if shift is None else total.log2() + shift
                    _scatter(tiles, sums[some, head, frame].unsqueeze(-1), piece, logarithm)
                    if call.dropout:
                        p.mul_(call.drop("mask", p.shape, (head, some.start, *(s.start for s in piece), frame)))
                    if call.summed:
                        _sum_over_query_poses(p, total.reciprocal(), summed[:, frame])
                if call.summed:
                    p = summed.flatten(1, 2)
                o = torch.bmm(p, v_i, out=call.take("out", len(p), p.shape[1], call.value_width))
                if not call.summed:
                    o.div_(total)
                _scatter(tiles, result, piece, o[..., :channels])
            out[some, head] = tiles.inner(result, 0).flatten(2, -2)
    return out, sums


def _backward_pass(call: _Pass, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    """The gradients of queries, keys, values, offsets and poses."""
    tiles, channels = call.tiles, call.channels
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (call.q, call.k, call.v)]
    grad_spatial, grad_pose = (None if t is None else torch.zeros_like(t) for t in (call.spatial, call.pose))
    images, pieces = call.pieces()
    for head in range(call.num_heads):
        scores = _Scores(call, head)
        for some in images:
            q, k, v = call.queries(head, some), call.keys(head, some), call.values(head, some)
            g = call.embed("g", grad[some, head], call.value_width, 0, [0.0], [0.0])
            if not call.summed:
                # Queries times keys then is the logarithm of the probability, and gradients times values are dP − D.
                torch.neg(sums[some, head, 0], out=q[..., channels + 1])
                inner = (grad[some, head] * out[some, head]).sum(-1)
                torch.neg(inner.unflatten(2, tiles.shape), out=tiles.inner(g, 0)[..., channels])
            grad_q, grad_k, grad_v = (call.take(f"whole grad_{n}", *t.shape) for n, t in zip("qkv", (q, k, v)))
            grad_k.zero_()
            grad_v.zero_()
            for piece in pieces:
                q_i, g_i = call.gather("queries", q, piece, 0), call.gather("gradients", g, piece, 0)
                k_i, v_i = call.gather("keys", k, piece, tiles.radius), call.gather("values", v, piece, tiles.radius)
                grad_q_i = call.take("grad_q", *q_i.shape).zero_()
                backward = _backward_all if call.summed else _backward_own
                place = (head, some.start, *(s.start for s in piece))
                grad_s, p = backward(call, scores, q_i, k_i, v_i, g_i, grad_q_i, sums[some, head], piece, place)
                grad_q_i.baddbmm_(grad_s, k_i)
                _scatter(tiles, grad_q, piece, grad_q_i)
                for name, buffer, left, right in (("k", grad_k, grad_s, q_i), ("v", grad_v, p, g_i)):
                    tile = tiles.view(buffer, tiles.radius)[(slice(None), *piece)]
                    product = call.take("grad_" + name, len(left), left.shape[2], right.shape[2])
                    torch.bmm(left.transpose(1, 2), right, out=product)
                    tiles.add(buffer, product.view(tile.shape), piece, tiles.radius)
            for target, buffer, margin, scale in zip(
                grads,
                (grad_q, grad_k, grad_v),
                (0, tiles.radius, tiles.radius),
                (1 / math.sqrt(channels), 1 / _LOG2E, 1.0),
                strict=True,
            ):
                found = tiles.inner(buffer, margin)[..., :channels].flatten(2, -2)
                torch.mul(found, scale, out=target[some, head])
        scores.add_gradients(
            None if grad_spatial is None else _of_head(grad_spatial, head),
            None if grad_pose is None else _of_head(grad_pose, head),
        )
    return [*grads, grad_spatial, grad_pose]


def _backward_own(
    call: _Pass,
    scores: _Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    grad_q: Tensor,
    sums: Tensor,
    piece: Piece,
    place: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The gradient of the scores of a piece, and the probabilities that met the values."""
    grad = call.take("grad", len(q), q.shape[1], call.columns)
    if not call.dropout:
        torch.bmm(g, v.transpose(1, 2), out=grad)
        p = scores(q, k, 0).exp2_()
        kept = p
    else:
        inner = g[..., call.channels :][..., :1].clone()
        g[..., call.channels] = 0
        p = scores(q, k, 0).exp2_()
        mask = call.drop("mask", p.shape, (*place, 0))
        torch.bmm(g, v.transpose(1, 2), out=grad).mul_(mask).add_(inner)
        kept = mask.mul_(p)
    grad.mul_(p)
    scores.backward(grad, q, grad_q, 0)
    return grad, kept


def _backward_all(
    call: _Pass,
    scores: _Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    grad_q: Tensor,
    sums: Tensor,
    piece: Piece,
    place: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The same for all query poses of every output pose: both are summed over the output or the query poses."""
    tiles, by_pose = call.tiles, (len(q), call.query_poses, call.num_queries, call.columns)
    grad_p = torch.bmm(g, v.transpose(1, 2), out=call.take("grad_p", len(q), g.shape[1], call.columns))
    grad_p = grad_p.view(len(q), call.num_poses, 1, call.num_queries, call.columns)
    summed = call.take("summed", len(q), call.num_poses, call.num_queries, call.columns)
    total = call.take("total_grad", *by_pose)
    for frame in range(call.num_frames):
        logarithm = tiles.view(sums[:, frame].unsqueeze(-1), 0)[(slice(None), *piece)].squeeze(-1)
        torch.neg(logarithm, out=q[..., call.channels + 1].view(logarithm.shape))
        p = scores(q, k, frame).exp2_().view(by_pose)
        grad = torch.mul(p, grad_p[:, frame], out=call.take("grad", *by_pose) if frame else total)
        mask = call.drop("mask", p.shape, (*place, frame)) if call.dropout else None
        if mask is not None:
            grad.mul_(mask)
        grad.addcmul_(p, grad.sum(-1, keepdim=True), value=-1)
        _sum_over_query_poses(p if mask is None else mask.mul_(p), None, summed[:, frame])
        scores.backward(grad.flatten(1, 2), q, grad_q, frame)
        if frame:
            total.add_(grad)
    return total.flatten(1, 2), summed.flatten(1, 2)


def _sum_over_query_poses(p: Tensor, weight: Tensor | None, out: Tensor) -> None:
    """``(t, J · Q, columns)``, times weights ``(t, J · Q, 1)``, summed to ``out`` ``(t, Q, columns)``."""
    by_pose = p.view(len(p), -1, *out.shape[1:]).unbind(1)
    if weight is None:
        _add_up(by_pose, out)
        return
    weights = weight.view(len(p), len(by_pose), -1, 1).unbind(1)
    torch.mul(by_pose[0], weights[0], out=out)
    for slab, w in zip(by_pose[1:], weights[1:], strict=True):
        out.addcmul_(slab, w)


def _add_up(slabs: Sequence[Tensor], out: Tensor) -> None:
    if len(slabs) == 1:
        out.copy_(slabs[0])
        return
    torch.add(slabs[0], slabs[1], out=out)
    for slab in slabs[2:]:
        out.add_(slab)


def _scatter(tiles: Tiles, buffer: Tensor, piece: Piece, values: Tensor) -> None:
    """Write the rows of a piece, ``(t, P · Q, width)``, to their places in a buffer without a margin."""
    where = tiles.view(buffer, 0)[(slice(None), *piece)]
    where.copy_(values.view(where.shape))


def _of_head(table: Tensor, head: int) -> Tensor:
    """The table of a head, among those of all or one that all share."""
    return table[head if len(table) > 1 else 0]


def _width(channels: int) -> int:
    """Channels are padded to a multiple of 8: products of other widths are several times slower."""
    return -(-channels // 8) * 8


def _cannot_overflow(call: _Pass) -> bool:
    """Whether no score can come near the exponent of the largest number or that of the smallest."""

    def longest(x: Tensor | None) -> float:
        return 0.0 if x is None or not x.numel() else float(torch.linalg.vector_norm(x, dim=-1).max())

    keys = longest(call.k) + longest(call.spatial) + longest(call.pose)
    bound = longest(call.q) * keys * _LOG2E / math.sqrt(call.channels)
    return bound < (80 if call.q.dtype == torch.float32 else 800)


def _tiles_for(shape: list[int], kernel_size: int, window: str, dilation: int) -> Tiles:
    # Neighbouring queries share most of their keys. Larger tiles read fewer of them and compute more scores in vain.
    return tiles_of(tuple(shape), kernel_size, window, dilation, 1 if kernel_size == 1 else 2)


# Operators, so that compilers take each pass as one node and do not follow its loops.


@torch.library.custom_op("escnn_attention::tiled", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    tiles = _tiles_for(shape, kernel_size, window, dilation)
    reached = None
    if not torch.isfinite(k.sum() + v.sum()):
        # A value that is not finite spoils the queries that see it, and no others of its tile: whom an attention of
        # equal weights brings something from it.
        finite = torch.isfinite(k).all(-1, keepdim=True) & torch.isfinite(v).all(-1, keepdim=True)
        spoilt = 1 - finite.all(2, keepdim=True).to(q.dtype)
        nothing = torch.zeros_like(spoilt)
        even = _Pass(nothing, nothing, spoilt, None, None, None, 1, tiles, False, 0.0)
        reached = _forward_pass(even)[0] > 0
        k, v = (torch.where(finite, t, 0.0) for t in (k, v))
    out, sums = _forward_pass(_Pass(q, k, v, spatial, pose, seed, num_poses, tiles, summed, dropout))
    return out if reached is None else out.masked_fill(reached, torch.nan), sums


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, query_poses, positions, channels = q.shape
    padded = _tiles_for(shape, kernel_size, window, dilation).padded(0)
    return (
        q.new_empty(batch, heads, num_poses, positions, channels),
        q.new_empty(batch, heads, num_poses if summed else 1, query_poses, *padded),
    )


@torch.library.custom_op("escnn_attention::tiled_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
) -> list[Tensor]:
    tiles = _tiles_for(shape, kernel_size, window, dilation)
    call = _Pass(q, k, v, spatial, pose, seed, num_poses, tiles, summed, dropout)
    return [t for t in _backward_pass(call, grad, out, sums) if t is not None]


@_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    *_: object,
) -> list[Tensor]:
    leaves = (q, k, v, spatial, pose)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in leaves if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, sums, *tensors = ctx.saved_tensors
    if grad is None:
        return (None,) * 13
    if torch.is_grad_enabled():
        return (*_differentiate_twice(grad, *tensors, *ctx.options), *[None] * 8)
    found = iter(_backward(grad, out, sums, *tensors, *ctx.options))
    return (*(None if t is None else next(found) for t in tensors[:5]), *[None] * 8)


def _differentiate_twice(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: WindowShape,
    dilation: int,
    summed: bool,
    dropout: float,
) -> list[Tensor | None]:
    """Gradients that have gradients of their own, by a backend that autograd looks through."""
    if dropout:
        raise RuntimeError("backend 'tiled' has no second derivatives with dropout; needed backend='blocked'")
    grid = Grid(tuple(shape), Window(kernel_size, window, dilation))
    query: QueryMode = "all" if summed else "own"
    leaves = [t for t in (q, k, v, spatial, pose) if t is not None and t.requires_grad]
    out = blocked.attention(q, k, v, grid, Terms(num_poses, spatial, pose), query=query)
    grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=True, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in (q, k, v, spatial, pose)]


_forward.register_autograd(_differentiate, setup_context=_save)
