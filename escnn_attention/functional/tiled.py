"""Windows on the CPU, and global attention there with terms that factorise, by tiles.

Small tiles of queries meet their halo, or stretches of queries everything (:mod:`~escnn_attention.functional.pieces`
says how). This is what calls it: the arguments, the operators that compilers see, and derivatives of the second order.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from escnn_attention.functional import blocked
from escnn_attention.functional.memory import pieces_of
from escnn_attention.functional.pieces import LOG2E, Call, as_projected, backward_pass, forward_pass, tile_size
from escnn_attention.functional.terms import QueryMode, Terms, working_precision
from escnn_attention.functional.tiles import chunks_of, tile_counts
from escnn_attention.positions import Grid, Positions, Window, WindowShape

__all__ = ["PIECE", "attention", "refuses"]

PIECE = 2**20
"""The number of scores that are worked on at once. 4 MB in float32, two to seven times over."""


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}"
    if not isinstance(positions, Grid):
        return "it needs a grid"
    if not positions.complete and not positions.shape:
        return "there is no base space for a window"
    if positions.complete and terms.spatial is not None:
        return "without a window it needs an encoding that factorises: Fourier, rotary, absolute, none"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    assert isinstance(positions, Grid)
    window = positions.window
    cos = sin = readout = None
    if not positions.complete:
        terms = terms.explicit(positions)
    elif terms.waves is not None:
        readout = terms.waves.readout
        cos, sin = terms.waves.phases(positions.coordinates * positions.scale)
    if query == "all" and q.shape[2] == 1:
        # One query for all output poses: there is nothing to sum.
        q, query = q.expand(-1, -1, terms.num_poses, -1, -1), "own"
    dtype, exact = v.dtype, working_precision(v.dtype)
    q = q.to(exact) * (LOG2E / math.sqrt(q.shape[-1]))
    others = (None if t is None else t.to(exact) for t in (k, v, terms.spatial, terms.pose, cos, sin, readout))
    seed = torch.randint(2**62, (1,)) if dropout else None
    options = (terms.num_poses, list(positions.shape), window.kernel_size or 0, window.shape, window.dilation)
    piece = pieces_of(PIECE, q, copies=7)
    out, _ = _forward(q, *others, seed, *options, query == "all", dropout, piece)
    return out.to(dtype)


# Operators, so that compilers take each pass as one node and do not follow its loops.


@torch.library.custom_op("escnn_attention::tiled", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
    piece: int,
) -> tuple[Tensor, Tensor]:
    terms = (spatial, pose, cos, sin, readout)
    grid = (shape, kernel_size, cast(WindowShape, window), dilation)
    reached = None
    if kernel_size and not torch.isfinite(k.sum() + v.sum()):
        # A value that is not finite spoils the queries that see it, and no others of its tile: whom an attention of
        # equal weights brings something from it.
        finite = torch.isfinite(k).all(-1, keepdim=True) & torch.isfinite(v).all(-1, keepdim=True)
        spoilt = 1 - finite.all(2, keepdim=True).to(q.dtype)
        nothing = torch.zeros_like(spoilt)
        even = Call(nothing, nothing, spoilt, None, None, None, None, None, None, 1, *grid, False, 0.0, piece)
        reached = forward_pass(even)[0] > 0
        k, v = (torch.where(finite, t, 0.0) for t in (k, v))
    out, sums = forward_pass(Call(q, k, v, *terms, seed, num_poses, *grid, summed, dropout, piece))
    return out if reached is None else out.masked_fill(reached, torch.nan), sums


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
    piece: int,
) -> tuple[Tensor, Tensor]:
    batch, heads, query_poses, positions, channels = q.shape
    if kernel_size:
        size = tile_size(kernel_size)
        padded = [dilation * size * n for n in tile_counts(shape, dilation, size)]
    else:
        padded = chunks_of(positions, query_poses * k.shape[2] * positions, piece).padded(0)
    return (
        as_projected(q, batch, heads, num_poses, positions, channels),
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
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: str,
    dilation: int,
    summed: bool,
    dropout: float,
    piece: int,
) -> list[Tensor]:
    terms = (spatial, pose, cos, sin, readout)
    grid = (shape, kernel_size, cast(WindowShape, window), dilation)
    call = Call(q, k, v, *terms, seed, num_poses, *grid, summed, dropout, piece)
    return [t for t in backward_pass(call, grad, out, sums) if t is not None]


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
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    *_: object,
) -> list[Tensor]:
    return [
        *(as_projected(t, *t.shape) for t in (q, k, v)),
        *(torch.empty_like(t) for t in (spatial, pose, cos, sin, readout) if t is not None),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:9], inputs[9:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, sums, *tensors = ctx.saved_tensors
    if grad is None:
        return (None,) * 17
    if torch.is_grad_enabled():
        return (*_differentiate_twice(grad, *tensors, *ctx.options), *[None] * 9)
    found = iter(_backward(grad, out, sums, *tensors, *ctx.options))
    return (*(None if t is None else next(found) for t in tensors[:8]), *[None] * 9)


def _differentiate_twice(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial: Tensor | None,
    pose: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    seed: Tensor | None,
    num_poses: int,
    shape: list[int],
    kernel_size: int,
    window: WindowShape,
    dilation: int,
    summed: bool,
    dropout: float,
    piece: int,
) -> list[Tensor | None]:
    """Gradients that have gradients of their own, by operations that autograd looks through."""
    if dropout:
        raise RuntimeError("backend 'tiled' has no second derivatives with dropout; needed backend='blocked'")
    query: QueryMode = "all" if summed else "own"
    natural = q * (math.sqrt(q.shape[-1]) / LOG2E)
    inputs = (q, k, v, spatial, pose, cos, sin, readout)
    if kernel_size:
        grid = Grid(tuple(shape), Window(kernel_size, window, dilation))
        out = blocked.attention(natural, k, v, grid, Terms(num_poses, spatial, pose), query=query)
    else:
        out = _everything_at_once(natural, k, v, pose, cos, sin, readout, num_poses, query)
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=True, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in inputs]


def _everything_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pose: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    readout: Tensor | None,
    num_poses: int,
    query: QueryMode,
) -> Tensor:
    """Global attention with all scores held."""
    q = (q.unsqueeze(3) if query == "own" else q.unsqueeze(2)).expand(-1, -1, num_poses, -1, -1, -1)
    score = torch.einsum("bmhjnc,bmpkc->bmhjnpk", q, k)
    if pose is not None:
        score = score + torch.einsum("bmhjnc,mhpc->bmhjnp", q, pose).unsqueeze(-1)
    if cos is not None and sin is not None and readout is not None:
        a, b = (q @ readout[:, None, None]).chunk(2, dim=-1)
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        wide, waves = torch.cat([a * c - b * s, a * s + b * c], dim=-1), torch.cat([cos, sin], dim=-1)
        score = score + torch.einsum("bmhjnf,mhkf->bmhjnk", wide, waves).unsqueeze(-2)
    p = (score / math.sqrt(q.shape[-1])).flatten(-2).softmax(-1).unflatten(-1, score.shape[-2:])
    return torch.einsum("bmhjnpk,bmpkc->bmhnc", p, v)


_forward.register_autograd(_differentiate, setup_context=_save)
