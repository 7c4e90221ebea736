"""Windows on the CPU, and global attention there with terms that factorise, by tiles.

Small tiles of queries meet their halo, or stretches of queries everything (:mod:`~escnn_attention.functional.pieces`
says how). This is what calls it: the arguments, the operators that compilers see, and derivatives of the second order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from escnn_attention.functional import blocked
from escnn_attention.functional.memory import pieces_of
from escnn_attention.functional.pieces import (
    LOG2E,
    Arguments,
    backward_pass,
    empty_gradients,
    empty_results,
    forward_pass,
)
from escnn_attention.functional.terms import QueryMode, Terms, working_precision
from escnn_attention.positions import Grid, Positions, Window, trimmed

__all__ = ["PIECE", "attention", "refuses"]

PIECE = 2**20
"""The number of scores that are worked on at once. 4 MB in float32, two to seven times over."""


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}"
    if not isinstance(positions, Grid):
        return "it needs a grid"
    if len(q) == 0:
        return "there are no images"
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
        # Tiles would have halos of places that are not there.
        window, rows = trimmed(positions.shape, window)
        if rows is not None and terms.spatial is not None:
            terms = replace(terms, spatial=terms.spatial[:, :, rows])
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


# Operators, so that compilers take each pass as one node and do not follow its loops. Theirs are the arguments of
# `Arguments`, in this order.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? spatial, Tensor? pose, Tensor? cos, Tensor? sin, Tensor? readout, "
    "Tensor? seed, int num_poses, int[] shape, int kernel_size, str window, int dilation, bool summed, float dropout, "
    "int piece"
)


def _forward_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*arguments)
    if not call.kernel_size or torch.isfinite(call.k.sum() + call.v.sum()):
        return forward_pass(call)
    # A value that is not finite spoils the queries that see it, and no others of its tile: whom an attention of equal
    # weights brings something from it.
    finite = torch.isfinite(call.k).all(-1, keepdim=True) & torch.isfinite(call.v).all(-1, keepdim=True)
    spoilt = 1 - finite.all(2, keepdim=True).to(call.q.dtype)
    nothing = torch.zeros_like(spoilt)
    even = call._replace(q=nothing, k=nothing, v=spoilt, spatial=None, pose=None, num_poses=1, summed=False, dropout=0)
    reached = forward_pass(even)[0] > 0
    k, v = (torch.where(finite, t, 0.0) for t in (call.k, call.v))
    out, sums = forward_pass(call._replace(k=k, v=v))
    return out.masked_fill(reached, torch.nan), sums


def _backward_operator(grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> list[Tensor]:
    return [t for t in backward_pass(Arguments(*arguments), grad, out, sums) if t is not None]


_forward = torch.library.custom_op(
    "escnn_attention::tiled",
    _forward_operator,
    mutates_args=(),
    device_types="cpu",
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)",
)
_backward = torch.library.custom_op(
    "escnn_attention::tiled_backward",
    _backward_operator,
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor grad, Tensor out, Tensor sums, {_ARGUMENTS}) -> Tensor[]",
)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return empty_results(Arguments(*arguments))


@_backward.register_fake
def _(grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> list[Tensor]:
    return [t for t in empty_gradients(Arguments(*arguments)) if t is not None]


_TENSORS = 9  # How many of the arguments are tensors.


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, sums, *tensors = ctx.saved_tensors
    arguments = Arguments(*tensors, *ctx.options)
    leaves = arguments.leaves
    found: Iterator[Tensor | None] = iter(())
    if grad is not None and torch.is_grad_enabled():
        found = iter(_differentiate_twice(grad, arguments))
    elif grad is not None:
        found = iter(_backward(grad, out, sums, *arguments))
    grads = (None if t is None else next(found, None) for t in leaves)
    return (*grads, *[None] * (len(arguments) - len(leaves)))


def _differentiate_twice(grad: Tensor, call: Arguments) -> list[Tensor | None]:
    """Gradients that have gradients of their own, by operations that autograd looks through."""
    if call.dropout:
        raise RuntimeError("backend 'tiled' has no second derivatives with dropout; needed backend='blocked'")
    query: QueryMode = "all" if call.summed else "own"
    natural = call.q * (math.sqrt(call.q.shape[-1]) / LOG2E)
    if call.kernel_size:
        grid = Grid(tuple(call.shape), Window(call.kernel_size, call.window, call.dilation))
        terms = Terms(call.num_poses, call.spatial, call.pose)
        out = blocked.attention(natural, call.k, call.v, grid, terms, query=query)
    else:
        out = _everything_at_once(natural, call, query)
    needed = [t for t in call.leaves if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(out, needed, grad, create_graph=True, allow_unused=True))
    return [next(grads) if t.requires_grad else None for t in call.leaves if t is not None]


def _everything_at_once(q: Tensor, call: Arguments, query: QueryMode) -> Tensor:
    """Global attention with all scores held, of queries that are not scaled."""
    pose, cos, sin, readout = call.pose, call.cos, call.sin, call.readout
    q = (q.unsqueeze(3) if query == "own" else q.unsqueeze(2)).expand(-1, -1, call.num_poses, -1, -1, -1)
    score = torch.einsum("bmhjnc,bmpkc->bmhjnpk", q, call.k)
    if pose is not None:
        score = score + torch.einsum("bmhjnc,mhpc->bmhjnp", q, pose).unsqueeze(-1)
    if cos is not None and sin is not None and readout is not None:
        a, b = (q @ readout[:, None, None]).chunk(2, dim=-1)
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        wide, waves = torch.cat([a * c - b * s, a * s + b * c], dim=-1), torch.cat([cos, sin], dim=-1)
        score = score + torch.einsum("bmhjnf,mhkf->bmhjnk", wide, waves).unsqueeze(-2)
    p = (score / math.sqrt(q.shape[-1])).flatten(-2).softmax(-1).unflatten(-1, score.shape[-2:])
    return torch.einsum("bmhjnpk,bmpkc->bmhnc", p, call.v)


_forward.register_autograd(_differentiate, setup_context=_save)
