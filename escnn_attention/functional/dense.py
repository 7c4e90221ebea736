r"""Attention through :func:`torch.nn.functional.scaled_dot_product_attention`: for terms that factorise.

The terms of the score become channels of the queries and keys (:mod:`~escnn_attention.functional.widen`); what is left
is the attention for which PyTorch has fused kernels. They never hold the scores, so that memory grows with the number
of positions and not with its square. Global attention takes one product of everything with everything for a few output
poses at a time; windows take tiles of queries with their halos, as many small attentions with a mask.

Only the outputs are kept for the backward pass; it widens queries and keys again.

There are no second derivatives: the fused kernels have none and raise an error. Under
``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` there are, with memory for every score.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from escnn_attention.functional.terms import QueryMode, Terms
from escnn_attention.functional.widen import MAX_CLASSES, differ, num_classes, of_poses, widen, width
from escnn_attention.positions import Positions

__all__ = ["PIECE", "attention", "refuses"]

PIECE = 2**24
"""The number of entries of widened queries and keys that are held at once. 64 MB in float32."""


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if q.device.type not in ("cpu", "cuda"):
        return f"it needs CPU or CUDA, got {q.device.type}"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "on CUDA there is no fused kernel for float64"
    if q.device.type == "cpu" and dropout > 0:
        return "on CPU there is no fused kernel with dropout"
    if terms.spatial is None:
        return None
    classes = num_classes(positions)
    if classes is None:
        return "without a window it needs an encoding that factorises: Fourier, rotary, absolute, none"
    if classes > MAX_CLASSES:
        return f"it needs a window of at most {MAX_CLASSES} offsets, or an encoding that factorises, got {classes}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    num_poses = terms.num_poses
    mode: QueryMode = query
    if not differ(terms, k.shape[2]):
        # Output poses that see the same are one, with the queries of all poses side by side.
        terms, mode = Terms(1), "all"
    tiles = None if num_classes(positions) is None else _Tiles.of(positions)
    reached = None
    if tiles is not None:
        k, reached = tiles.contain(k)

    def piece(images: slice, poses: slice) -> Tensor:
        own = q[images, :, poses] if mode == "own" else q[images]
        wide = widen(own, k[images], positions, of_poses(terms, poses), mode)
        return _attend(*wide, v[images], tiles, 1 / math.sqrt(q.shape[-1]), dropout)

    # What one output pose of one image takes, of queries and of keys.
    places = (q.shape[3], k.shape[3]) if tiles is None else (tiles.queries.numel(), tiles.keys.numel())
    tokens = (q.shape[2] if mode == "all" else 1) * places[0] + k.shape[2] * places[1]
    fit = max(1, PIECE // (tokens * q.shape[1] * width(q.shape[-1], positions, terms)))
    poses = min(fit, terms.num_poses)
    images = min(max(1, fit // terms.num_poses), len(q))
    if torch.is_grad_enabled() and (poses < terms.num_poses or images < len(q)):
        piece = functools.partial(
            checkpoint, piece, use_reentrant=False, preserve_rng_state=dropout > 0, context_fn=_keep_outputs
        )
    out = torch.cat(
        [
            torch.cat([piece(i, p) for p in _slices(terms.num_poses, poses)], dim=2)
            for i in _slices(len(q), images)
        ]
    )
    # B, M, H or 1, J or 1, N, C.
    out = out.squeeze(2) if mode != query else out.sum(3).expand(-1, -1, num_poses, -1, -1)
    return out if reached is None else out.masked_fill(reached[:, :, None, :, None], torch.nan)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _keep_outputs() -> tuple[AbstractContextManager, AbstractContextManager]:
    """What is computed again in the backward pass: everything but the attention itself."""
    return create_selective_checkpoint_contexts(_KERNELS)


_KERNELS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
]


def _attend(q: Tensor, k: Tensor, v: Tensor, tiles: _Tiles | None, scale: float, dropout: float) -> Tensor:
    """Attention of ``q`` (B, M, H or 1, J, N, E), ``k`` (B, M, H or 1, P, N, E), ``v`` (B, M, P, N, C).

    It gives ``(B, M, H, J, N, C)``.
    """
    batch, num_heads = q.shape[:2]
    num_poses = max(q.shape[2], k.shape[2])
    query_poses, channels = q.shape[3], v.shape[-1]
    of_keys, of_values = _widths(q, channels)

    def arrange(x: Tensor, index: Tensor | None, width: int) -> Tensor:
        """(B, M, H or 1, P, N, C) as (B·M, H·T, P·n, width): the n positions of all poses in each of T tiles."""
        x = F.pad(x, (0, width - x.shape[-1]))
        x = x.unsqueeze(4) if index is None else x.index_select(4, index.clamp(min=0).flatten()).unflatten(4, index.shape)
        x = x.transpose(3, 4).flatten(4, 5)
        return x.expand(-1, -1, num_poses, -1, -1, -1).flatten(2, 3).flatten(0, 1)

    queries, keys, mask = (None, None, None) if tiles is None else (tiles.queries, tiles.keys, tiles.seen)
    if mask is not None:
        mask = mask.repeat(num_poses, query_poses, k.shape[3])[None]
    out = F.scaled_dot_product_attention(
        arrange(q, queries, of_keys),
        arrange(k, keys, of_keys),
        arrange(v.unsqueeze(2), keys, of_values),
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
    )
    out = out[..., :channels].unflatten(0, (batch, num_heads)).unflatten(2, (num_poses, -1))
    out = out.unflatten(4, (query_poses, -1)).transpose(3, 4)  # B, M, H, J, T, n, C
    out = out.flatten(4, 5)
    return out if tiles is None else out.index_select(4, tiles.place)


def _widths(q: Tensor, channels: int) -> tuple[int, int]:
    """The numbers of channels of queries and of values for which the device has fast kernels.

    On CPU they have to agree, and multiples of 16 are up to twice as fast as others. On CUDA multiples of 8 are
    aligned for all kernels. Those for half precision want them to agree; that for float32 does not.
    """
    step = 16 if q.device.type == "cpu" else 8
    of_keys, of_values = (-(-n // step) * step for n in (q.shape[-1], channels))
    return of_keys, of_values if q.device.type == "cuda" and q.dtype == torch.float32 else of_keys


@dataclass(frozen=True, eq=False)
class _Tiles:
    """A windowed grid in tiles of queries with their halos of keys.

    Attributes:
        queries: ``(T, Q)``; the positions of the queries of each tile, -1 fills up.
        keys: ``(T, S)``; the positions of its keys, -1 fills up.
        seen: ``(T, Q, S)``; which query sees which key. What fills up sees everything, so that it has a softmax.
        place: ``(N,)``; where among the queries of all tiles each position stands.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    place: Tensor

    @classmethod
    def of(cls, positions: Positions) -> _Tiles:
        blocks = positions.blocks(1)
        seen = (blocks.rows(0, len(blocks.queries)) >= 0) & (blocks.keys >= 0)[:, None]
        return cls(blocks.queries, blocks.keys, seen | (blocks.queries < 0)[:, :, None], blocks.place)

    def contain(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Keys with zeros for those that are not finite, and ``(B, M, N)``, which queries see one of these.

        The mask is added to the scores, and what is not finite would get through to all queries of the tile.
        """
        finite = torch.isfinite(k)
        bad = ~finite.all(-1).all(2)
        reached = (bad[:, :, self.keys.clamp(min=0)].unsqueeze(3) & self.seen).any(-1)
        return torch.where(finite, k, 0.0), reached.flatten(2)[:, :, self.place]
