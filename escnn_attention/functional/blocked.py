r"""Attention in bounded pieces: the portable backend, for every device, precision, encoding and window.

The queries are taken in blocks that share their keys (tiles against their halo for windows, stretches of queries
against everything for global attention), and the scores of a few blocks at a time are made, used and dropped; the
backward pass makes them again. What is held at once is at most :data:`PIECE` scores, or those of a single query.

Within a piece the offset enters as a product of the queries with the table of offsets, which is then read at the row of
each pair, and ``query="all"`` sums the probabilities over the query poses before the product with the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from escnn_attention.functional.terms import QueryMode, Terms
from escnn_attention.positions import Blocks, Positions

__all__ = ["PIECE", "attention"]

PIECE = 2**22
"""The number of scores that are held at once. 16 MB in float32."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    num_heads, num_positions = q.shape[1], q.shape[3]
    # The scores that one query position has with one key position.
    depth = terms.num_poses * k.shape[2] * (1 if query == "own" else q.shape[2])
    blocks = positions.blocks(max(1, PIECE // (depth * num_positions)))
    num_blocks, block_size = blocks.queries.shape
    scores = block_size * blocks.keys.shape[1] * depth
    images = max(1, PIECE // (scores * num_blocks))
    stretch = min(num_blocks, max(1, PIECE // scores))

    # Channels last and heads first, so that a piece is a contiguous stretch; queries in the order of the blocks.
    order = blocks.queries.flatten()
    q = q.permute(1, 0, 3, 2, 4).index_select(2, order.clamp(min=0)).unflatten(2, (num_blocks, block_size))
    k, v = k.permute(1, 0, 3, 2, 4), v.permute(1, 0, 3, 2, 4)
    save = torch.is_grad_enabled() and (num_heads > 1 or images < q.shape[1] or stretch < num_blocks)

    heads = []
    for head, (q_head, k_head, v_head) in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
        tables = terms.of_head(head)
        batches = []
        for q_, k_, v_ in zip(q_head.split(images), k_head.split(images), v_head.split(images), strict=True):
            done = []
            for q_piece, start in _stretches(q_, stretch):
                arguments = (q_piece, k_, v_, tables.spatial, tables.pose, terms, blocks, start, query, dropout)
                if save:
                    done.append(checkpoint(_piece, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0))
                else:
                    done.append(_piece(*arguments))
            batches.append(torch.cat(done, dim=1) if len(done) > 1 else done[0])
        heads.append(torch.cat(batches) if len(batches) > 1 else batches[0])
    out = torch.stack(heads).flatten(2, 3)  # M, B, T·Q, H, C
    place = torch.empty(num_positions, dtype=torch.long, device=q.device)
    real = order >= 0
    place[order[real]] = torch.arange(len(order), device=q.device)[real]
    return out.index_select(2, place).permute(1, 0, 3, 2, 4)


def _stretches(q: Tensor, stretch: int) -> Iterator[tuple[Tensor, int]]:
    """The blocks of queries in stretches, each with the number of its first block."""
    start = 0
    for piece in q.split(stretch, dim=1):
        yield piece, start
        start += stretch


def _piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    terms: Terms,
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
    q = q.permute(0, 1, 3, 2, 4).unsqueeze(4) if query == "own" else q.unsqueeze(2)  # b, T, H or 1, Q, J, C
    k = k.unsqueeze(2)  # b, T, 1, S, P, C

    if terms.absolute:
        q, k = _add_absolute(q, k, spatial, pose, blocks.queries[start:stop], keys, query)
    # Queries of all poses are rows of one product with the keys, unless the keys depend on the output pose.
    q_rows, k_rows = (q.flatten(3, 4), k.flatten(3, 4)) if k.shape[2] > 1 else (q.flatten(2, 4), k.flatten(2, 4))
    score = (q_rows @ k_rows.transpose(-1, -2)).view(*q.shape[:5], *k.shape[3:5])
    if not terms.absolute:
        if spatial is not None:
            table = torch.einsum("bthqjc,hlc->bthqjl", q.expand(-1, -1, terms.num_poses, -1, -1, -1), spatial)
            index = rows.clamp(min=0)[None, :, None, :, None].expand(*table.shape[:5], -1)
            score = score + table.gather(-1, index).unsqueeze(-1)
        if pose is not None:
            score = score + torch.einsum(
                "bthqjc,hpc->bthqjp", q.expand(-1, -1, terms.num_poses, -1, -1, -1), pose
            ).unsqueeze(-2)

    unseen = (rows < 0) | (keys < 0).unsqueeze(1)
    # A number, and not minus infinity: a query that only fills up a block sees nothing, and must not become NaN.
    score = score.masked_fill(unseen[:, None, :, None, :, None], torch.finfo(score.dtype).min)
    score = score / math.sqrt(q.shape[-1])
    exact = torch.float32 if score.dtype in (torch.float16, torch.bfloat16) else score.dtype
    p = F.dropout(score.flatten(-2).softmax(-1, dtype=exact), dropout).sum(4).to(v.dtype)  # b, T, H or 1, Q, S·P
    out = (p.flatten(2, 3) @ v.flatten(2, 3)).unflatten(2, p.shape[2:4])
    # Without any positional term all output poses see the same: they were computed as one.
    return out.expand(-1, -1, terms.num_poses, -1, -1).transpose(2, 3)


def _add_absolute(
    q: Tensor,
    k: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    query: QueryMode,
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the encoding of their own positions and poses, one for every output pose."""
    if spatial is not None:
        q = q + spatial[:, queries.clamp(min=0)].transpose(0, 1).unsqueeze(3)  # T, H, Q, 1, C
        k = k + spatial[:, keys.clamp(min=0)].transpose(0, 1).unsqueeze(3)  # T, H, S, 1, C
    if pose is not None:
        # In the own mode h̃ = h: the identity, seen from every pose.
        seen = pose.diagonal(dim1=0, dim2=1).T.unsqueeze(1) if query == "own" else pose
        q = q + seen.unsqueeze(1)  # H, 1, J, C
        k = k + pose.unsqueeze(1)  # H, 1, P, C
    return q, k
