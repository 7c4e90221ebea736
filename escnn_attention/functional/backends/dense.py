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

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from escnn_attention.functional.bias import QueryMode, Terms, Waves
from escnn_attention.functional.memory import pieces_of
from escnn_attention.functional.widen import MAX_CLASSES, join, merge, num_classes, widen, width
from escnn_attention.geometry.grid import Positions

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
    num_poses, channels = terms.num_poses, q.shape[-1]
    terms, mode = merge(terms, query, k.shape[2])
    tiles, reached = None, None
    if num_classes(positions) is not None:
        tiles = _Tiles.of(positions)
        k, reached = tiles.contain(k)

    def piece(images: slice, poses: slice) -> Tensor:
        own = q[images, :, poses] if mode == "own" else q[images]
        wide = widen(own, k[images], positions, _of_poses(terms, poses), mode)
        return _attend(*wide, v[images], tiles, 1 / math.sqrt(channels), dropout)

    # The vectors that one output pose of one image takes: of queries and of keys.
    places = (q.shape[3], k.shape[3]) if tiles is None else (tiles.queries.numel(), tiles.keys.numel())
    vectors = q.shape[1] * ((q.shape[2] if mode == "all" else 1) * places[0] + k.shape[2] * places[1])
    fit = pieces_of(PIECE, q, copies=1) // (vectors * width(channels, positions, terms))
    out = join(_in_pieces(piece, len(q), terms.num_poses, fit, dropout), query, mode, num_poses)
    return out if reached is None else out.masked_fill(reached[:, :, None, :, None], torch.nan)


def _of_poses(terms: Terms, poses: slice) -> Terms:
    """The terms of some of the output poses."""

    def pick(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[:, poses]

    waves = terms.waves and Waves(terms.waves.frequencies[:, poses], terms.waves.readout)
    num_poses = len(range(terms.num_poses)[poses])
    return replace(terms, num_poses=num_poses, spatial=pick(terms.spatial), pose=pick(terms.pose), waves=waves)


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


def _keep_outputs() -> tuple[AbstractContextManager, AbstractContextManager]:
    """What is not computed again in the backward pass: the attention itself."""
    return create_selective_checkpoint_contexts(_KERNELS)


def _in_pieces(function: Callable[[slice, slice], Tensor], images: int, poses: int, fit: int, dropout: float) -> Tensor:
    """``function`` of some images and some output poses, the axes 0 and 2 of its result, for all of them.

    A piece is at most ``fit`` pairs of an image and a pose. If there are several, queries and keys are widened again in
    the backward pass.
    """
    poses_at_once = max(1, min(fit, poses))
    images_at_once = max(1, min(fit // poses, images))
    if torch.is_grad_enabled() and (images_at_once < images or poses_at_once < poses):
        function = partial(
            checkpoint, function, use_reentrant=False, preserve_rng_state=dropout > 0, context_fn=_keep_outputs
        )
    rows = []
    for some in _slices(images, images_at_once):
        rows.append(torch.cat([function(some, these) for these in _slices(poses, poses_at_once)], dim=2))
    return torch.cat(rows)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, max(1, total), size)]


def _attend(q: Tensor, k: Tensor, v: Tensor, tiles: _Tiles | None, scale: float, dropout: float) -> Tensor:
    """From q ``(B, M, H or 1, J, N, E)``, k ``(B, M, H or 1, P, N, E)``, v ``(B, M, P, N, C)`` to one of every J."""
    poses, query_poses, channels = max(q.shape[2], k.shape[2]), q.shape[3], v.shape[-1]
    of_keys, of_values = _widths(q, channels)
    queries, keys, mask = None, None, None
    if tiles is not None:
        queries, keys, mask = tiles.queries, tiles.keys, tiles.seen.repeat(poses, query_poses, k.shape[3])[None]
    out = F.scaled_dot_product_attention(
        _arrange(q, queries, poses, of_keys),
        _arrange(k, keys, poses, of_keys),
        _arrange(v.unsqueeze(2), keys, poses, of_values),
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
    )
    out = out[..., :channels].unflatten(0, q.shape[:2]).unflatten(2, (poses, -1)).unflatten(4, (query_poses, -1))
    out = out.transpose(3, 4).flatten(4, 5)  # B, M, H, J, T·Q, C
    return out if tiles is None else out.index_select(4, tiles.place)


def _arrange(x: Tensor, index: Tensor | None, poses: int, width: int) -> Tensor:
    """From ``(B, M, H or 1, P, N, C)`` to ``(B·M, H·T, P·n, width)``, the n positions of T tiles in all P poses."""
    x = F.pad(x, (0, width - x.shape[-1]))
    x = x.unsqueeze(4) if index is None else x.index_select(4, index.flatten()).unflatten(4, index.shape)
    x = x.transpose(3, 4).flatten(4, 5)
    return x.expand(-1, -1, poses, -1, -1, -1).flatten(2, 3).flatten(0, 1)


def _widths(q: Tensor, channels: int) -> tuple[int, int]:
    """To how many channels queries and values are padded with zeros, for the kernels of the device.

    On CPU both must have the same number, and multiples of 16 are up to twice as fast as others. On CUDA multiples of
    8 are aligned; the kernels for half precision want the same number of both, that for float32 does not.
    """
    step = 16 if q.device.type == "cpu" else 8
    of_keys, of_values = (-(-n // step) * step for n in (q.shape[-1], channels))
    return of_keys, of_values if q.device.type == "cuda" and q.dtype == torch.float32 else of_keys


@dataclass(frozen=True, eq=False)
class _Tiles:
    """A windowed grid in tiles of queries with their halos of keys.

    Attributes:
        queries: ``(T, Q)``; the positions of the queries of each tile, filled up with any.
        keys: ``(T, S)``; the positions of its keys, likewise.
        seen: ``(T, Q, S)``; which query sees which key. What fills up is not seen, and sees everything: without any key
            there is no softmax.
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
        seen = seen | (blocks.queries < 0)[:, :, None]
        return cls(blocks.queries.clamp(min=0), blocks.keys.clamp(min=0), seen, blocks.place)

    def contain(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Keys with zeros for those that are not finite, and ``(B, M, N)``, which queries see one of these.

        The mask is added to the scores, and what is not finite would get through to all queries of the tile.
        """
        finite = torch.isfinite(k)
        bad = ~finite.all(-1).all(2)
        reached = (bad[:, :, self.keys].unsqueeze(3) & self.seen).any(-1)
        return torch.where(finite, k, 0.0), reached.flatten(2)[:, :, self.place]
