r"""Attention through :func:`torch.nn.functional.scaled_dot_product_attention`: for terms that factorise.

The terms of the score become channels of the queries and keys (:mod:`~escnn_attention.functional.grid.widen`); what is
left is the attention for which PyTorch has fused kernels. They never hold the scores, so that memory grows with the
number of positions and not with its square. Global attention takes one product of everything with everything for a few
output poses at a time; windows take tiles of queries with their halos, as many small attentions with a mask.

Only the outputs are kept for the backward pass; it widens queries and keys again.

The fused kernels have derivatives in reverse mode, of the first order. A backward pass that is to be differentiated,
derivatives in forward mode and transforms of ``torch.func`` take PyTorch's formula, with memory for every score.

Gradients need scores of moderate size. The fused kernels keep the logarithm of the sum of each query's exponentials and
make probabilities from it again, with its rounding error. Errors of gradients, relative to the largest of them, are
about the rounding error of one number times the largest score: in single precision 1 % for scores of 1e5, as of
features of 150, and a third for scores of 5e6, as of features of 1000. Beyond they overflow. With all other
backends they are finite for features up to 1e12, and errors stay small where scores are so large that one key has all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from escnn_attention.functional.autograd import is_transformed, recompute
from escnn_attention.functional.call import QueryMode
from escnn_attention.functional.grid.call import GridCall, Heads, PositionalBias, Waves
from escnn_attention.functional.grid.portable import isolate_nonfinite, slices
from escnn_attention.functional.grid.widen import MAX_CLASSES, num_channels, num_classes, widen
from escnn_attention.functional.registry import chunk_size
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import Grid

ENTRIES_PER_CHUNK = 2**24
"""The number of entries of widened queries and keys that are held at once. 64 MB in float32."""


def why_unsupported(call: GridCall) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if reason := why_no_kernel(call.q, call.dropout):
        return reason
    window = call.query_grid.window
    if window.kernel_size is not None and not call.one_set:
        return "it has no windows of keys on another grid"
    if window.causal and window.kernel_size is None:
        return "it has no mask of later times for global attention"
    if window.circular and window.kernel_size is not None:
        return "it has no windows across the edges of a torus"
    if call.bias.spatial is None:
        return None
    classes = num_classes(call.query_grid)
    if classes is None:
        return "without a window it needs an encoding that factorises: Fourier, rotary, absolute, none"
    if classes > MAX_CLASSES:
        return f"it needs a window of at most {MAX_CLASSES} offsets, or an encoding that factorises, got {classes}"
    return None


def why_no_kernel(q: Tensor, dropout: float) -> str | None:
    """Why there is no fused kernel for these queries, if there is none."""
    if q.device.type not in ("cpu", "cuda"):
        return f"it needs CPU or CUDA, got {q.device.type}"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "on CUDA there is no fused kernel for float64"
    if q.device.type == "cpu" and dropout > 0:
        return "on CPU there is no fused kernel with dropout"
    return None


def attention(call: GridCall) -> Tensor:
    """Attention by PyTorch's fused kernels: see :func:`escnn_attention.functional.attention`."""
    positions = call.offsets
    grid = call.query_grid if call.one_set else None
    return fused(call, positions.places, grid, positions.key_places)


def fused(call: Heads, points: Tensor, grid: Grid | None = None, key_points: Tensor | None = None) -> Tensor:
    """Fused attention of one set of positions, or of one set to another.

    Args:
        call: after folding.
        points: ``(N, d)``, or ``(B · N, d)`` where images differ; the positions.
        grid: where the positions are one, which may have a window.
        key_points: the positions of the keys, where these are others.
    """
    q, k, v = call.q, call.k, call.v
    num_poses, channels = call.bias.num_poses, q.shape[-1]
    bias, mode = _merged(call.bias, call.query, k.shape[3])
    tiles, reached = None, None
    width = _widths(q, num_channels(channels, grid, bias), channels)[0]
    if grid is not None and num_classes(grid) is not None:
        tiles = _Tiles.of(grid)
        k, v, reached = isolate_nonfinite(k, v, grid)

    def chunk(images: slice, poses: slice) -> Tensor:
        own = q[:, images, :, poses] if mode == "own" else q[:, images]
        wide = widen(own, k[:, images], _of_poses(bias, poses), mode, points, grid, key_points, width)
        return _attend(*wide, v[:, images], tiles, 1 / math.sqrt(channels), call.dropout)

    # The vectors that one output pose of one image takes: of queries and of keys.
    places = (q.shape[2], k.shape[2]) if tiles is None else (tiles.queries.numel(), tiles.keys.numel())
    vectors = len(q) * ((q.shape[3] if mode == "all" else 1) * places[0] + k.shape[3] * places[1])
    fit = chunk_size(ENTRIES_PER_CHUNK, q.element_size(), copies=1) // (vectors * width)
    out = _in_chunks(chunk, q.shape[1], bias.num_poses, fit, call.dropout)
    if mode != call.query:
        out = out.squeeze(3)
    else:
        out = (out.squeeze(4) if out.shape[4] == 1 else out.sum(4)).expand(-1, -1, -1, num_poses, -1)
    return out if reached is None else out.masked_fill(reached[:, :, :, None, None], torch.nan)


def _merged(bias: PositionalBias, query: QueryMode, key_poses: int) -> tuple[PositionalBias, QueryMode]:
    """The bias and the mode to compute: where all output poses see the same, they are one.

    It takes the queries of all poses side by side, as in the mode ``"all"``.
    """
    # With a single key pose all keys of a query have the same pose term, which drops out of the softmax.
    if bias.spatial is None and bias.waves is None and (bias.pose is None or key_poses == 1):
        return PositionalBias(1), "all"
    return bias, query


def _of_poses(bias: PositionalBias, poses: slice) -> PositionalBias:
    """The terms of some of the output poses."""
    waves = bias.waves and Waves(bias.waves.frequencies[:, poses], bias.waves.readout)
    bias = replace(bias, num_poses=len(range(bias.num_poses)[poses]), waves=waves)
    return bias.map_tables(lambda table: table[:, poses], "spatial", "pose")


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


def _in_chunks(function: Callable[[slice, slice], Tensor], images: int, poses: int, fit: int, dropout: float) -> Tensor:
    """``function`` of some images and some output poses, the axes 1 and 3 of its result, for all of them.

    A chunk is at most ``fit`` pairs of an image and a pose. If there are several, queries and keys are widened again in
    the backward pass.
    """
    poses_at_once = max(1, min(fit, poses))
    images_at_once = max(1, min(fit // poses, images))
    if torch.is_grad_enabled() and (images_at_once < images or poses_at_once < poses):
        # But not the attention itself.
        function = partial(recompute, function, draws=dropout > 0, keep=_KERNELS)
    rows = []
    for some in slices(images, images_at_once):
        rows.append(_joined([function(some, these) for these in slices(poses, poses_at_once)], dim=3))
    return _joined(rows, dim=1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, tiles: _Tiles | None, scale: float, dropout: float) -> Tensor:
    """Fused attention of widened vectors, for every query pose by itself: ``(M, B, N, H, J, C)``.

    Args:
        q, k: ``(M, B, N, H or 1, J, E)`` and ``(M, B, N, H or 1, P, E)``.
        v: ``(M, B, N, P, C)``.
        tiles: of a window; None for everything.
        scale: of the scores.
        dropout: the probability.
    """
    poses, query_poses, channels = max(q.shape[3], k.shape[3]), q.shape[4], v.shape[-1]
    of_keys, of_values = _widths(q, q.shape[-1], channels)
    queries, keys, mask = None, None, None
    if tiles is not None:
        queries, keys = tiles.queries, tiles.keys
        seen = tiles.seen.repeat_interleave(query_poses, 1).repeat_interleave(k.shape[4], 2)
        mask = seen.repeat(poses, 1, 1)[None]
    transformed = is_transformed(q, k, v)
    q_rows, k_rows = _arrange(q, queries, poses, of_keys), _arrange(k, keys, poses, of_keys)
    vectors = (q_rows, k_rows, _arrange(v.unsqueeze(3), keys, poses, of_values))
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "scale": scale}
    with sdpa_kernel(SDPBackend.MATH) if transformed else nullcontext():
        out = F.scaled_dot_product_attention(*vectors, **options)
    if out.requires_grad and not transformed and not torch.compiler.is_compiling():
        out = _TwiceDifferentiable.apply(out, *vectors, options)
    out = out if out.shape[-1] == channels else out[..., :channels]
    out = out.unflatten(0, q.shape[:2]).unflatten(2, (poses, -1)).unflatten(4, (-1, query_poses))
    out = out.permute(0, 1, 3, 4, 2, 5, 6).flatten(2, 3)  # M, B, T·Q, H, J, C
    return out if tiles is None else out.index_select(2, tiles.place)


class _TwiceDifferentiable(torch.autograd.Function):
    """The output of a fused kernel, of queries, keys and values; a gradient of it with derivatives is the formula's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, None, None, None, None
        if ctx.options["dropout_p"]:
            raise RuntimeError(
                "backend 'dense' has no second derivatives with dropout; needed 'neighbours' between points, 'blocked' "
                "on grids"
            )
        # Views, since one may have been computed from another, whose gradient would count this way too.
        leaves = [t.view_as(t) for t in ctx.saved_tensors]
        wanted = [t for t in leaves if t.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(*leaves, **ctx.options)
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return (None, *(next(found) if t.requires_grad else None for t in leaves), None)


def _arrange(x: Tensor, index: Tensor | None, poses: int, width: int) -> Tensor:
    """From ``(M, B, N, H or 1, P, C)`` to ``(M·B, H·T, n·P, width)``, the n positions of T tiles in all P poses."""
    if x.shape[-1] != width:  # the derivative of padding copies, that of a concatenation does not
        x = torch.cat([x, _zero(x.dtype, x.device).expand(*x.shape[:-1], width - x.shape[-1])], dim=-1)
    x = x.unsqueeze(2) if index is None else x.index_select(2, index.flatten()).unflatten(2, index.shape)
    x = x.permute(0, 1, 4, 2, 3, 5, 6).flatten(4, 5)  # M, B, H or 1, T, n·P, C
    return x.expand(-1, -1, poses, -1, -1, -1).flatten(2, 3).flatten(0, 1)


@constant_tables
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


def _widths(q: Tensor, of_keys: int, of_values: int) -> tuple[int, int]:
    """The number of channels to which keys and values are padded with zeros, for the kernels of the device.

    On CPU both must have the same number, and multiples of 16 are up to twice as fast as others. On CUDA multiples of
    8 are aligned; the kernels for half precision want the same number of both, that for float32 does not.
    """
    step = 16 if q.device.type == "cpu" else 8
    of_keys, of_values = (-(-n // step) * step for n in (of_keys, of_values))
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
    def of(cls, grid: Grid) -> _Tiles:
        blocks = grid.blocks(1)
        seen = (blocks.rows(0, len(blocks.queries)) >= 0) & (blocks.keys >= 0)[:, None]
        seen = seen | (blocks.queries < 0)[:, :, None]
        return cls(blocks.queries.clamp(min=0), blocks.keys.clamp(min=0), seen, blocks.place)
