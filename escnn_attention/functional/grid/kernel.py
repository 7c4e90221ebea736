"""Code that backends with their own loops over a grid share: their arguments, and calls that none of them serves.

Such a backend gives :class:`GridLoop` its passes, which take :class:`Arguments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE, Operator, Passes
from escnn_attention.functional.call import QueryMode
from escnn_attention.functional.grid import portable
from escnn_attention.functional.grid.call import GridCall, PositionalBias
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import Grid, steps_within
from escnn_attention.geometry.windows import Window, WindowShape

LOG2E = math.log2(math.e)


class Arguments(NamedTuple):
    """Arguments of one call, as numbers and tensors that an operator takes.

    Attributes:
        q: ``(M, B, N, J, C)``.
        k, v: ``(M, B, N, P, C)``.
        spatial, pose: as in :class:`~escnn_attention.functional.grid.call.PositionalBias`.
        cos, sin, readout: of waves, at the positions of queries, and behind them those of keys elsewhere; None in a
            window.
        seed: ``(1,)``; for dropout.
        num_poses: :math:`|H|`.
        shape: the grid of the queries.
        key_shape: that of the keys.
        spacings: of both, where they are two grids; none where they are one.
        kernel_size, window, dilation: the window; a size of 0 is everything, or all up to now in a causal one.
        sum_query_poses: whether every output pose has all query poses.
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
    key_shape: list[int]
    spacings: list[int]
    kernel_size: int
    window: WindowShape
    dilation: int
    sum_query_poses: bool
    dropout: float
    chunk: int

    @property
    def scale(self) -> float:
        """The factor by which queries are multiplied, so that scores are in units of log 2."""
        return LOG2E / math.sqrt(self.q.shape[-1])

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that there are gradients for: the first of the arguments."""
        return (self.q, self.k, self.v, self.spatial, self.pose, self.cos, self.sin, self.readout)


_LEAVES = 8  # How many of the arguments have gradients.


def why_unsupported_grid(call: GridCall) -> str | None:
    """Why no loop over a grid can serve a call."""
    if not call.query_grid.complete and not call.query_grid.shape:
        return "there is no base space for a window"
    return None


def why_not_on_the_cpu(call: GridCall) -> str | None:
    """Why a backend that runs there cannot serve a call."""
    device = call.q.device
    return None if device.type == "cpu" else f"it runs on the CPU, and the tensors are on {device}"


def why_not_a_table(call: GridCall) -> str | None:
    """Why a backend that goes over a window, or over a table of all offsets, cannot serve a call."""
    if reason := why_unsupported_grid(call):
        return reason
    if not call.query_grid.shape:
        return "there is no base space for a window"
    if call.query_grid.complete and call.bias.spatial is None:
        return "without a window it needs an encoding that does not factorise: MLP, separable"
    return None


class GridLoop:
    """A loop over a grid as an operator of PyTorch.

    Args:
        backend: its name.
        forward_pass: gives the output ``(M, B, N, |H|, C)``, and numbers that the backward pass needs.
        backward_pass: from the arguments, the gradient of the output, the output and those numbers to the gradients of
            the leaves, None for those that there are not.
        empty: room for the output and those numbers.
        packaged: the output as an operator in a package, where there is one.
        laid_out: queries, keys or values as the passes need them in memory; None where they lie so.
        keeps_half: whether the passes take half precision; else they get single precision in its place.
    """

    def __init__(
        self,
        backend: str,
        forward_pass: Callable[[Arguments], tuple[Tensor, Tensor]],
        backward_pass: Callable[[Arguments, Tensor, Tensor, Tensor], list[Tensor | None]],
        empty: Callable[[Arguments], tuple[Tensor, Tensor]],
        packaged: Callable[[Arguments], Tensor] | None = None,
        laid_out: Callable[[Tensor], Tensor] | None = None,
        keeps_half: bool = False,
    ):
        def backward(
            arguments: Arguments, grad: Tensor, out: Tensor | None, sums: Tensor, _: list[bool]
        ) -> list[Tensor | None]:
            assert out is not None
            return backward_pass(arguments, grad, out, sums)

        passes = Passes(
            *(forward_pass, backward, empty, _plainly, packaged), keeps_output=True, backend=backend, instead="blocked"
        )
        self.laid_out, self.keeps_half = laid_out, keeps_half
        self.operator = Operator(backend, Arguments, _LEAVES, passes)

    def __call__(self, call: GridCall, chunk: int) -> Tensor:
        """The output of a call on a grid; ``chunk`` is how many numbers are worked on at once."""
        positions, bias = call.query_grid, call.bias
        window = positions.window
        cos = sin = readout = None
        if not positions.complete:
            bias = bias if bias.waves is None else bias.explicit(call.offsets)
            # What is beyond the grid would be places that are not there.
            window, rows = positions.trimmed if call.one_set else (window, None)
            if rows is not None and bias.spatial is not None:
                bias = replace(bias, spatial=bias.spatial[:, :, rows])
        elif bias.waves is not None:
            readout = bias.waves.readout
            cos, sin = bias.waves.phases(_points(call))
        dtype, exact = call.v.dtype, PRECISE[call.v.dtype]
        own = dtype if self.keeps_half else exact
        q, k, v = call.q.to(own), call.k.to(own), call.v.to(own)
        if self.laid_out is not None:
            q, k, v = map(self.laid_out, (q, k, v))
        others = [None if t is None else t.to(exact) for t in (bias.spatial, bias.pose, cos, sin, readout)]
        spatial, pose, cos, sin, readout = others
        arguments = Arguments(
            *(q, k, v, spatial, pose, cos, sin, readout),
            seed=torch.randint(2**62, (1,), device=call.q.device) if call.dropout else None,
            num_poses=bias.num_poses,
            shape=list(positions.shape),
            key_shape=list(call.key_grid.shape),
            spacings=[] if call.one_set else [positions.spacing, call.key_grid.spacing],
            kernel_size=window.kernel_size or 0,
            window=window.shape,
            dilation=window.dilation,
            sum_query_poses=call.query == "all",
            dropout=call.dropout,
            chunk=chunk,
        )
        run = self.operator if arguments.q.shape[1] else _plainly  # The loop has no images to go over.
        return run(arguments).to(dtype)


def _points(call: GridCall) -> Tensor:
    """The positions of queries, and behind them those of keys elsewhere, in units of the offsets."""
    positions = call.offsets
    return positions.places if positions.key_places is None else torch.cat([positions.places, positions.key_places])


def _plainly(call: Arguments) -> Tensor:
    """The output by operations that autograd looks through."""
    dtype, exact = call.q.dtype, PRECISE[call.q.dtype]
    if exact != dtype:
        return _plainly(call._replace(q=call.q.to(exact), k=call.k.to(exact), v=call.v.to(exact))).to(dtype)
    query: QueryMode = "all" if call.sum_query_poses else "own"
    window = Window(call.kernel_size or None, call.window, call.dilation)
    if window.looks_everywhere and call.spatial is None:
        return _everything_at_once(call, query)
    of_queries, of_keys = call.spacings or (1, 1)
    grid = keys = Grid(tuple(call.shape), window, device=call.q.device, spacing=of_queries)
    if call.spacings:
        keys = Grid(tuple(call.key_shape), Window(), device=call.q.device, spacing=of_keys)
    bias = PositionalBias(call.num_poses, call.spatial, call.pose)
    return portable.attention(GridCall(call.q, call.k, call.v, bias, grid, keys, query=query, dropout=call.dropout))


def _everything_at_once(call: Arguments, query: QueryMode) -> Tensor:
    """Global attention with all scores held."""
    q, pose, cos, sin, readout = call.q, call.pose, call.cos, call.sin, call.readout
    q = (q.unsqueeze(4) if query == "own" else q.unsqueeze(3)).expand(-1, -1, -1, call.num_poses, -1, -1)
    score = torch.einsum("mbnhjc,mbkpc->mbnhjkp", q, call.k)
    if pose is not None:
        score = score + torch.einsum("mbnhjc,mhpc->mbnhjp", q, pose.expand(len(q), -1, -1, -1)).unsqueeze(-2)
    if cos is not None and sin is not None and readout is not None:
        a, b = torch.einsum("mbnhjc,mcf->mbnhjf", q, readout.expand(len(q), -1, -1)).chunk(2, dim=-1)
        c, s = (t[:, :, : q.shape[2]].transpose(1, 2)[:, None, :, :, None] for t in (cos, sin))
        wide = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
        waves = torch.cat([cos, sin], dim=-1)[:, :, -call.k.shape[2] :]
        score = score + torch.einsum("mbnhjf,mhkf->mbnhjk", wide, waves.expand(len(q), -1, -1, -1)).unsqueeze(-1)
    p = (score / math.sqrt(q.shape[-1])).flatten(-2).softmax(-1).unflatten(-1, score.shape[-2:])
    return torch.einsum("mbnhjkp,mbkpc->mbnhc", p, call.v)


@constant_tables
def steps_of(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int) -> Tensor:
    """The offsets of a window in positions along each axis, ``(L, dim)``."""
    if not shape:
        return torch.zeros(1, 0, dtype=torch.long)
    return ((dilation if kernel_size else 1) * steps_within(shape, kernel_size or None, window)).contiguous()
