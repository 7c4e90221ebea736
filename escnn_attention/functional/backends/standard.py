r"""Attention on grids by operators that PyTorch and ONNX have, without a decision by the number of images: for exports.

Queries are taken in tiles against their halo in windows, and in stretches against everything in global attention. What
lies apart by the same steps in one tile has the same place in all of them, so that in a window the function of the
offset is a product of the queries of a tile with a table over its pairs, without a look-up for each score.

A graph has no loop: what is done for a few heads and tiles stands in it once for each of them. As many scores of an
image as :data:`SCORES_PER_IMAGE` are there at once: memory grows with the number of images, as features do, and scores
do not grow with their size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.bias import PositionalBias
from escnn_attention.functional.call import Call
from escnn_attention.functional.memory import chunk_size
from escnn_attention.functional.widen import widen
from escnn_attention.geometry.positions import Blocks

__all__ = ["SCORES_PER_IMAGE", "attention"]

SCORES_PER_IMAGE = 2**19
"""The scores of an image that are held at once, or those of a single query. 2 MB in float32."""


def attention(call: Call) -> Tensor:
    """Attention of terms that are added to the keys: see :func:`escnn_attention.functional.attention`.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, attention
        >>> from escnn_attention.functional.backends import standard
        >>> from escnn_attention.functional.call import Call
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.positions import Window
        >>> q, k, v = torch.randn(3, 2, 1, 25, 4, 8).unbind()
        >>> grid, bias = Grid((5, 5), Window(3)), PositionalBias(4, spatial=torch.randn(2, 4, 9, 8))
        >>> found = standard.attention(Call(q, k, v, grid, bias))
        >>> torch.allclose(found, attention(q, k, v, grid, bias, backend="reference"), atol=1e-5)
        True
    """
    positions, exact = call.positions, working_precision(call.v.dtype)
    bias = call.bias if positions.complete else call.bias.explicit(positions)
    q, k, v = (t.to(exact) for t in (call.q, call.k, call.v))
    scaled = q / math.sqrt(q.shape[-1])
    if bias.waves is not None:
        q, k = widen(scaled, k, positions, bias, call.query)  # M, B, N, H, J or 1, E and M, B, N, H or 1, P, E
        bias = PositionalBias(bias.num_poses)
    else:
        q, k = scaled.unsqueeze(4 if call.query == "own" else 3), k.unsqueeze(3)
    out = _in_chunks(q, k, v, call, bias)  # of few output poses where all of them see the same
    return out.expand(-1, -1, -1, call.bias.num_poses, -1).to(call.v.dtype)


class _Terms(NamedTuple):
    """What poses and offsets add to the scores of some heads.

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


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, call: Call, bias: PositionalBias) -> Tensor:
    """The output ``(M, B, N, H or 1, C)``, a few heads and tiles at a time.

    Args:
        q: ``(M, B, N, H or 1, J, E)``, scaled.
        k: ``(M, B, N, H or 1, P, E)``.
        v: ``(M, B, N, P, C)``.
        call: where they are, and which poses contribute.
        bias: what is not in the products of queries and keys.
    """
    positions, key_poses = call.positions, k.shape[4]
    limit = chunk_size(SCORES_PER_IMAGE, v.element_size(), copies=4)
    in_windows = not positions.complete
    has_terms = bias.spatial is not None or bias.pose is not None
    pairs = (max(bias.num_poses, q.shape[3]) if has_terms else q.shape[3]) * q.shape[4]
    # Of a query without a window either the scores, or the products with the table of all offsets.
    each = max(positions.num_positions * key_poses, 0 if bias.spatial is None else len(positions.offsets))
    blocks = positions.blocks(max(1, limit // (len(q) * pairs * each)))
    number, size = blocks.queries.shape
    scores = pairs * size * (blocks.keys.shape[1] * key_poses if in_windows else each)
    heads = max(1, min(len(q), limit // (scores * (number if in_windows else 1))))
    tiles = max(1, min(number, limit // (scores * heads))) if in_windows else 1
    near = None
    if in_windows and bias.spatial is not None:
        near = bias.spatial[:, :, blocks.rows(0, 1)[0].clamp(min=0)]
    terms = _Terms(near, None if in_windows else bias.spatial, bias.pose)

    parts = []
    for first in range(0, len(q), heads):
        some = slice(first, first + heads)
        of_heads = [
            _attend(q[some], k[some], v[some], call, terms.of_heads(some), _Stretch(blocks, start, start + tiles))
            for start in range(0, number, tiles)
        ]
        parts.append(torch.cat(of_heads, dim=2))
    return torch.cat(parts).index_select(2, blocks.place)


class _Stretch(NamedTuple):
    """Some of the blocks of a grid, from ``start`` to ``stop``."""

    blocks: Blocks
    start: int
    stop: int

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


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call, terms: _Terms, stretch: _Stretch) -> Tensor:
    """The output ``(m, B, t · Q, H or 1, C)`` of some heads and blocks: see :func:`_in_chunks`."""
    # m, B, t, H or 1, J, Q, E and m, B, t or 1, H or 1, S, P, E
    q = _take(q, stretch.queries).permute(0, 1, 2, 4, 5, 3, 6)
    k = _take(k, stretch.keys).permute(0, 1, 2, 4, 3, 5, 6)
    v = _take(v, stretch.keys).flatten(3, 4)
    poses = k.shape[3]
    products = (q.unflatten(3, (poses, -1)).flatten(4, 6) @ k.flatten(4, 5).mT).unflatten(4, (-1, *q.shape[4:6]))
    score = products.flatten(3, 4).unflatten(-1, k.shape[4:6])  # m, B, t, H or 1, J, Q, S, P
    score = _add_terms(score, q, terms, stretch)
    unseen = (stretch.rows < 0) | (stretch.keys < 0).unsqueeze(1)
    # A number, and not minus infinity: a query that only fills up a block sees nothing, and must not become NaN.
    score = score.masked_fill(unseen[:, None, None, :, :, None], torch.finfo(score.dtype).min)
    p = score.flatten(-2).softmax(-1)
    p = F.dropout(p, call.dropout) if call.dropout else p
    p = p.sum(4) if call.query == "all" else p.squeeze(4)  # m, B, t, H or 1, Q, S · P
    out = (p.flatten(3, 4) @ v).unflatten(3, p.shape[3:5])
    return out.transpose(3, 4).flatten(2, 3)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The positions of blocks, ``(t, n)``, of ``(m, B, N, ...)``; any where one only fills up."""
    if x.shape[2] == places.numel() and len(places) == 1:
        return x.unsqueeze(2)
    return x.index_select(2, places.clamp(min=0).flatten()).unflatten(2, places.shape)


def _add_terms(score: Tensor, q: Tensor, terms: _Terms, stretch: _Stretch) -> Tensor:
    """The scores ``(m, B, t, H, J, Q, S, P)`` with what the queries ``(m, B, t, H or 1, J, Q, C)`` see of terms."""
    near, far, pose = terms

    def seen(table: Tensor) -> Tensor:
        """What queries are multiplied with, a table for each head."""
        return table.to(q.dtype).expand(len(q), *table.shape[1:])

    if near is not None:
        score = score + torch.einsum("mbthjqc,mhqsc->mbthjqs", _of_poses(q, near), seen(near)).unsqueeze(-1)
    if far is not None:
        table = torch.einsum("mbthjqc,mhlc->mbthjql", _of_poses(q, far), seen(far))
        index = stretch.rows.clamp(min=0)[:, None, None].expand(*table.shape[:6], -1)
        score = score + table.gather(-1, index).unsqueeze(-1)
    if pose is not None:
        score = score + torch.einsum("mbthjqc,mhpc->mbthjqp", _of_poses(q, pose), seen(pose)).unsqueeze(-2)
    return score


def _of_poses(q: Tensor, table: Tensor) -> Tensor:
    """Queries as every output pose of a table has them."""
    return q.expand(-1, -1, -1, table.shape[1], -1, -1, -1)
