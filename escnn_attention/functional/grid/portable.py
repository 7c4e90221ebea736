r"""Attention in bounded chunks: the portable backend, for every device, precision, encoding and window.

The queries are taken in blocks that share their keys (tiles against their halo for windows, stretches of queries
against everything for global attention), and the scores of a few blocks at a time are made, used and dropped; the
backward pass makes them again. What is held at once is at most :data:`SCORES_PER_CHUNK` scores, or those of a single
query.

Within a chunk the offset enters as a product of the queries with the table of offsets, which is then read at the row of
each pair, and ``query="all"`` sums the probabilities over the query poses before the product with the values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import recompute
from escnn_attention.functional.call import QueryMode
from escnn_attention.functional.grid.call import GridCall, PositionalBias
from escnn_attention.functional.memory import chunk_size
from escnn_attention.geometry.windows import Blocks

__all__ = ["SCORES_PER_CHUNK", "attention"]

SCORES_PER_CHUNK = 2**22
"""The number of scores that are held at once. 16 MB in float32."""


def attention(call: GridCall) -> Tensor:
    """Attention in bounded chunks: see :func:`escnn_attention.functional.attention`."""
    bias = call.bias.explicit(call.query_grid)
    num_heads, num_images, num_positions, query_poses, _ = call.q.shape
    key_poses = call.k.shape[3]
    limit = chunk_size(SCORES_PER_CHUNK, call.q.element_size(), copies=4)
    # At one position there are so many pairs of an output pose and a query pose, and for each of them either the scores
    # of all keys, or the products with all rows of the table of offsets, are held.
    pairs = bias.num_poses * (1 if call.query == "own" else query_poses)
    rows = 0 if bias.spatial is None else len(call.query_grid.offsets)
    blocks = call.query_grid.blocks(max(1, limit // (pairs * max(num_positions * key_poses, rows))))
    num_blocks, block_size = blocks.queries.shape
    scores = block_size * pairs * max(blocks.keys.shape[1] * key_poses, rows)
    images = max(1, limit // (scores * num_blocks))
    stretch = min(num_blocks, max(1, limit // scores))
    again = torch.is_grad_enabled() and (num_heads > 1 or images < num_images or stretch < num_blocks)

    def chunk(head: PositionalBias, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        arguments = (q, k, v, head, blocks, start, call.query, call.dropout)
        return recompute(_chunk, *arguments, draws=call.dropout > 0) if again else _chunk(*arguments)

    # Queries in the order of the blocks.
    q = call.q.index_select(2, blocks.queries.flatten().clamp(min=0)).unflatten(2, (num_blocks, block_size))
    heads = []
    for i in range(num_heads):
        head = bias.of_head(i)
        batches = []
        for first in range(0, max(1, num_images), images):
            # By an index: compilers can save no operation that gives several tensors.
            q_i, k_i, v_i = (t[i, first : first + images] for t in (q, call.k, call.v))
            stretches = enumerate(q_i.split(stretch, dim=1))
            batches.append(torch.cat([chunk(head, q_s, k_i, v_i, s * stretch) for s, q_s in stretches], dim=1))
        heads.append(torch.cat(batches))
    out = torch.stack(heads).flatten(2, 3)  # M, B, T·Q, H, C
    return out.index_select(2, blocks.place)


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: PositionalBias,
    blocks: Blocks,
    start: int,
    query: QueryMode,
    dropout: float,
) -> Tensor:
    """One head of a few images and blocks: q ``(b, T, Q, P, C)`` and k, v ``(b, N, P', C)`` to ``(b, T, Q, H, C)``.

    The axes of the scores are image, block, output pose h, query, query pose h̃, key and key pose ĥ. In the own mode
    h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry.
    """
    stop = start + q.shape[1]
    keys = blocks.keys if len(blocks.keys) == 1 else blocks.keys[start:stop]
    k = k[:, keys.clamp(min=0)].expand(-1, q.shape[1], -1, -1, -1)
    v = v[:, keys.clamp(min=0)].expand(-1, q.shape[1], -1, -1, -1)
    rows = blocks.rows(start, stop)
    q = q / math.sqrt(q.shape[-1])
    q = q.permute(0, 1, 3, 2, 4).unsqueeze(4) if query == "own" else q.unsqueeze(2)  # b, T, H or 1, Q, J, C
    k = k.unsqueeze(2)  # b, T, 1, S, P, C

    # Queries of all poses are rows of one product with the keys.
    score = (q.flatten(2, 4) @ k.flatten(2, 4).transpose(-1, -2)).view(*q.shape[:5], *k.shape[3:5])
    by_pose = q.expand(-1, -1, bias.num_poses, -1, -1, -1)
    if bias.spatial is not None:
        table = torch.einsum("bthqjc,hlc->bthqjl", by_pose, bias.spatial)
        index = rows.clamp(min=0)[None, :, None, :, None].expand(*table.shape[:5], -1)
        score = score + table.gather(-1, index).unsqueeze(-1)
    if bias.pose is not None:
        score = score + torch.einsum("bthqjc,hpc->bthqjp", by_pose, bias.pose).unsqueeze(-2)

    unseen = (rows < 0) | (keys < 0).unsqueeze(1)
    # A number, and not minus infinity: a query that only fills up a block sees nothing, and must not become NaN.
    score = score.masked_fill_(unseen[:, None, :, None, :, None], torch.finfo(score.dtype).min)
    exact = working_precision(score.dtype)
    p = score.flatten(-2).softmax(-1, dtype=exact)
    p = (F.dropout(p, dropout) if dropout else p).sum(4).to(v.dtype)  # b, T, H or 1, Q, S·P
    out = (p.flatten(2, 3) @ v.flatten(2, 3)).unflatten(2, p.shape[2:4])
    # Without any positional term all output poses see the same: they were computed as one.
    return out.expand(-1, -1, bias.num_poses, -1, -1).transpose(2, 3)
