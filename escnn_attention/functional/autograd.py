"""Attention by loops of its own, as operators: the arguments, what compilers see, derivatives of the second order.

A backend that computes its passes itself has to tell autograd its gradients, and compilers that there is one node whose
loops are not to be followed. It gives :class:`Operators` its passes, which take :class:`Arguments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from escnn_attention._precision import working_precision
from escnn_attention.functional.backends import blocked
from escnn_attention.functional.bias import PositionalBias, QueryMode
from escnn_attention.functional.call import Call
from escnn_attention.geometry.grid import Grid, trimmed
from escnn_attention.geometry.positions import Window, WindowShape

__all__ = [
    "LOG2E",
    "Arguments",
    "Operators",
    "empty_gradients",
    "empty_output",
    "isolating_nonfinite",
    "recompute",
    "steps_of",
    "why_not_a_table",
    "why_not_on_the_cpu",
    "why_unsupported_grid",
]

LOG2E = math.log2(math.e)


class Arguments(NamedTuple):
    """What there is to compute, in numbers and tensors that an operator takes.

    Attributes:
        q: ``(M, B, N, J, C)``, contiguous, scaled, so that scores are in units of log 2.
        k, v: ``(M, B, N, P, C)``, contiguous.
        spatial, pose: as in :class:`~escnn_attention.functional.bias.PositionalBias`.
        cos, sin, readout: of waves; None in a window.
        seed: ``(1,)``; for dropout.
        num_poses: :math:`|H|`.
        shape: the grid.
        kernel_size, window, dilation: the window; a size of 0 is everything.
        summed: whether every output pose has all query poses.
        dropout: the probability.
        chunk: how many numbers are worked on at once.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spatial: Tensor | None
    pose: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    readout: Tensor | None
    seed: Tensor | None
    num_poses: int
    shape: list[int]
    kernel_size: int
    window: WindowShape
    dilation: int
    summed: bool
    dropout: float
    chunk: int

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that there are gradients for: the first of the arguments."""
        return (self.q, self.k, self.v, self.spatial, self.pose, self.cos, self.sin, self.readout)


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? spatial, Tensor? pose, Tensor? cos, Tensor? sin, Tensor? readout, "
    "Tensor? seed, int num_poses, int[] shape, int kernel_size, str window, int dilation, bool summed, float dropout, "
    "int chunk"
)
_TENSORS = 9  # How many of the arguments are tensors.


def why_unsupported_grid(call: Call) -> str | None:
    """Why no loop over a grid can serve a call."""
    if not isinstance(call.positions, Grid):
        return "it needs a grid"
    if call.q.shape[1] == 0:
        return "there are no images"
    if not call.positions.complete and not call.positions.shape:
        return "there is no base space for a window"
    return None


def why_not_on_the_cpu(call: Call) -> str | None:
    """Why a backend that runs there cannot serve a call."""
    device = call.q.device
    return None if device.type == "cpu" else f"it runs on the CPU, and the tensors are on {device}"


def why_not_a_table(call: Call) -> str | None:
    """Why a backend that goes over a window, or over a table of all offsets, cannot serve a call."""
    if reason := why_unsupported_grid(call):
        return reason
    assert isinstance(call.positions, Grid)
    if not call.positions.shape:
        return "there is no base space for a window"
    if call.positions.complete and call.bias.spatial is None:
        return "without a window it needs an encoding that does not factorise: MLP, separable"
    return None


class Operators:
    """The passes of a backend as operators of PyTorch.

    Args:
        name: of the backend.
        forward_pass: gives the output ``(M, B, N, H, C)``, contiguous, and numbers that the backward pass needs.
        backward_pass: from the arguments, the gradient of the output, the output and those numbers to the gradients of
            the leaves, None for those that there are not.
        empty_sums: room for those numbers.
    """

    def __init__(
        self,
        name: str,
        forward_pass: Callable[[Arguments], tuple[Tensor, Tensor]],
        backward_pass: Callable[[Arguments, Tensor, Tensor, Tensor], list[Tensor | None]],
        empty_sums: Callable[[Arguments], Tensor],
    ):
        self.name = name
        self.forward_pass, self.backward_pass = forward_pass, backward_pass

        def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
            return forward_pass(Arguments(*arguments))

        def backward(grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> list[Tensor]:
            return self._passed_back(grad, out, sums, *arguments)

        def empty_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
            call = Arguments(*arguments)
            return empty_output(call), empty_sums(call)

        def empty_backward(grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> list[Tensor]:
            return [t for t in empty_gradients(Arguments(*arguments)) if t is not None]

        self._forward = torch.library.custom_op(
            f"escnn_attention::{name}",
            forward,
            mutates_args=(),
            schema=f"({_SCHEMA}) -> (Tensor, Tensor)",
        )
        self._backward = torch.library.custom_op(
            f"escnn_attention::{name}_backward",
            backward,
            mutates_args=(),
            schema=f"(Tensor grad, Tensor out, Tensor sums, {_SCHEMA}) -> Tensor[]",
        )
        self._forward.register_fake(empty_forward)
        self._backward.register_fake(empty_backward)
        self._forward.register_autograd(self._differentiate_traced, setup_context=_save)

    def __call__(self, call: Call, chunk: int) -> Tensor:
        """The output of a call on a grid; ``chunk`` is how many numbers are worked on at once."""
        positions, bias = call.positions, call.bias
        assert isinstance(positions, Grid)
        window = positions.window
        cos = sin = readout = None
        if not positions.complete:
            bias = bias.explicit(positions)
            # What is beyond the grid would be places that are not there.
            window, rows = trimmed(positions.shape, window)
            if rows is not None and bias.spatial is not None:
                bias = replace(bias, spatial=bias.spatial[:, :, rows])
        elif bias.waves is not None:
            readout = bias.waves.readout
            cos, sin = bias.waves.phases(positions.coordinates * positions.scale)
        q, dtype, exact = call.q, call.v.dtype, working_precision(call.v.dtype)
        q = q.to(exact) * (LOG2E / math.sqrt(q.shape[-1]))
        vectors = (t.to(exact).contiguous() for t in (q, call.k, call.v))
        others = (None if t is None else t.to(exact) for t in (bias.spatial, bias.pose, cos, sin, readout))
        seed = torch.randint(2**62, (1,), device=q.device) if call.dropout else None
        options = (bias.num_poses, list(positions.shape), window.kernel_size or 0, window.shape, window.dilation)
        arguments = (*vectors, *others, seed, *options, call.query == "all", call.dropout, chunk)
        # What PyTorch does for an operator takes as long as a small layer: it is for those who follow it.
        followed = torch.compiler.is_compiling() or type(q) is not Tensor or is_in_torch_dispatch_mode()
        out, _ = self._forward(*arguments) if followed else _Passes.apply(self, *arguments)
        return out.to(dtype)

    def _passed_back(self, grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> list[Tensor]:
        return [t for t in self.backward_pass(Arguments(*arguments), grad, out, sums) if t is not None]

    def _differentiate_traced(self, ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return self.differentiate(ctx, grad, self._backward)

    def differentiate(
        self, ctx: Any, grad: Tensor | None, backward: Callable[..., list[Tensor]] | None = None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments, by the backward pass or an operator of it."""
        backward = backward or self._passed_back
        out, sums, *tensors = ctx.saved_tensors
        arguments = Arguments(*tensors, *ctx.options)
        leaves = arguments.leaves
        found: Iterator[Tensor | None] = iter(())
        if grad is not None and torch.is_grad_enabled():
            found = iter(self._differentiate_twice(grad, arguments))
        elif grad is not None:
            found = iter(backward(grad, out, sums, *arguments))
        grads = (None if t is None else next(found, None) for t in leaves)
        return (*grads, *[None] * (len(arguments) - len(leaves)))

    def _differentiate_twice(self, grad: Tensor, call: Arguments) -> list[Tensor | None]:
        """Gradients that have gradients of their own, by operations that autograd looks through."""
        if call.dropout:
            raise RuntimeError(
                f"backend {self.name!r} has no second derivatives with dropout; needed backend='blocked'"
            )
        query: QueryMode = "all" if call.summed else "own"
        natural = call.q * (math.sqrt(call.q.shape[-1]) / LOG2E)
        if call.kernel_size or call.spatial is not None:
            window = Window(call.kernel_size or None, call.window, call.dilation)
            grid = Grid(tuple(call.shape), window, device=call.q.device)
            bias = PositionalBias(call.num_poses, call.spatial, call.pose)
            out = blocked.attention(Call(natural, call.k, call.v, grid, bias, query))
        else:
            out = _everything_at_once(natural, call, query)
        needed = [t for t in call.leaves if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(out, needed, grad, create_graph=True, allow_unused=True))
        return [next(grads) if t.requires_grad else None for t in call.leaves if t is not None]


class _Passes(torch.autograd.Function):
    """The passes without the operators around them."""

    @staticmethod
    def forward(operators: Operators, *arguments: Any) -> tuple[Tensor, Tensor]:
        return operators.forward_pass(Arguments(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operators, *arguments = inputs
        _save(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.operators.differentiate(ctx, grad))


def recompute(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of a function that autograd looks through, with gradients of their own where these are wanted.

    Args:
        function: of the tensors.
        tensors: its arguments, as they were saved.
        needed: for which of them there are gradients.
        grad: of the result.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = list(tensors)
        if not again:
            inputs = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=again))
    return [next(found) if need else None for need in needed]


def isolating_nonfinite(
    forward_pass: Callable[[Arguments], tuple[Tensor, Tensor]],
) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    """The pass, where a value that is not finite spoils the queries that see it and no others.

    A masked key has the probability 0, and 0 · NaN is NaN. Whom a value reaches is what an attention of equal weights
    brings something of it.
    """

    def guarded(call: Arguments) -> tuple[Tensor, Tensor]:
        if not call.kernel_size or torch.isfinite(call.k.sum() + call.v.sum()):
            return forward_pass(call)
        finite = torch.isfinite(call.k).all(-1, keepdim=True) & torch.isfinite(call.v).all(-1, keepdim=True)
        spoilt = 1 - finite.all(3, keepdim=True).to(call.q.dtype)
        zero = torch.zeros_like(spoilt)
        even = call._replace(q=zero, k=zero, v=spoilt, spatial=None, pose=None, num_poses=1, summed=False, dropout=0)
        reached = forward_pass(even)[0] > 0
        k, v = (torch.where(finite, t, 0.0) for t in (call.k, call.v))
        out, sums = forward_pass(call._replace(k=k, v=v))
        return out.masked_fill(reached, torch.nan), sums

    return guarded


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _everything_at_once(q: Tensor, call: Arguments, query: QueryMode) -> Tensor:
    """Global attention with all scores held, of queries that are not scaled."""
    pose, cos, sin, readout = call.pose, call.cos, call.sin, call.readout
    q = (q.unsqueeze(4) if query == "own" else q.unsqueeze(3)).expand(-1, -1, -1, call.num_poses, -1, -1)
    score = torch.einsum("mbnhjc,mbkpc->mbnhjkp", q, call.k)
    if pose is not None:
        score = score + torch.einsum("mbnhjc,mhpc->mbnhjp", q, pose.expand(len(q), -1, -1, -1)).unsqueeze(-2)
    if cos is not None and sin is not None and readout is not None:
        a, b = torch.einsum("mbnhjc,mcf->mbnhjf", q, readout.expand(len(q), -1, -1)).chunk(2, dim=-1)
        c, s = (t.transpose(1, 2)[:, None, :, :, None] for t in (cos, sin))
        wide, waves = torch.cat([a * c - b * s, a * s + b * c], dim=-1), torch.cat([cos, sin], dim=-1)
        score = score + torch.einsum("mbnhjf,mhkf->mbnhjk", wide, waves.expand(len(q), -1, -1, -1)).unsqueeze(-1)
    p = (score / math.sqrt(q.shape[-1])).flatten(-2).softmax(-1).unflatten(-1, score.shape[-2:])
    return torch.einsum("mbnhjkp,mbkpc->mbnhc", p, call.v)


def empty_output(call: Arguments) -> Tensor:
    """Room for the output."""
    heads, batch, positions, _, channels = call.q.shape
    return call.q.new_empty(heads, batch, positions, call.num_poses, channels)


def empty_gradients(call: Arguments) -> list[Tensor | None]:
    """Room for the gradients of the leaves."""
    return [None if t is None else torch.empty_like(t) for t in call.leaves]


@lru_cache(maxsize=64)
def steps_of(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int) -> tuple[Tensor, int]:
    """The offsets of a window in positions along each axis, ``(L, dim)``, and the longest along any."""
    if not shape:
        return torch.zeros(1, 0, dtype=torch.long), 0
    # A grid as wide as the window, or as everything, has all of them around the position in its middle.
    sides = (kernel_size,) * len(shape) if kernel_size else tuple(2 * n - 1 for n in shape)
    grid = Grid(sides, Window(max(sides), window))
    positions = torch.arange(grid.num_positions)
    seen = positions[grid.rows(positions[len(positions) // 2], positions) >= 0]
    steps = torch.stack(torch.unravel_index(seen, sides), dim=-1) - torch.tensor(sides) // 2
    return (dilation * steps).contiguous(), dilation * (max(sides) // 2)
