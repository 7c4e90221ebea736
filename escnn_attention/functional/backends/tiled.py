"""Windows on the CPU, and global attention there with terms that factorise, by tiles.

Small tiles of queries meet their halo, or stretches of queries everything;
:mod:`~escnn_attention.functional.backends.pieces` says how.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from escnn_attention.functional.backends import pieces
from escnn_attention.functional.backends.grid_loop import (
    Arguments,
    GridLoop,
    isolating_nonfinite,
    why_not_on_the_cpu,
    why_unsupported_grid,
)
from escnn_attention.functional.call import Call
from escnn_attention.functional.memory import chunk_size

__all__ = ["SCORES_PER_CHUNK", "attention", "why_unsupported"]

SCORES_PER_CHUNK = 2**20
"""The number of scores that are worked on at once. 4 MB in float32, two to seven times over."""


def _by_image(t: Tensor) -> Tensor:
    return t.permute(1, 0, 3, 2, 4)


def _seen(call: Arguments) -> Arguments:
    return call._replace(q=_by_image(call.q), k=_by_image(call.k), v=_by_image(call.v))


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = pieces.forward_pass(_seen(call))
    return _by_image(out).contiguous(), sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    q, k, v, *others = pieces.backward_pass(_seen(call), _by_image(grad), _by_image(out), sums)
    return [*(_by_image(t).contiguous() for t in (q, k, v) if t is not None), *others]


def _empty_sums(call: Arguments) -> Tensor:
    return pieces.empty_sums(_seen(call))


_loop = GridLoop("tiled", isolating_nonfinite(_forward_pass), _backward_pass, _empty_sums)


def why_unsupported(call: Call) -> str | None:
    """Why this backend cannot serve a call."""
    if reason := why_not_on_the_cpu(call) or why_unsupported_grid(call):
        return reason
    if call.positions.complete and call.bias.spatial is not None:
        return "without a window it needs an encoding that factorises: Fourier, rotary, absolute, none"
    return None


def attention(call: Call) -> Tensor:
    """Attention over tiles of a grid: see :func:`escnn_attention.functional.attention`."""
    if call.query == "all" and call.q.shape[3] == 1:
        # One query for all output poses: there is nothing to sum.
        call = replace(call, q=call.q.expand(-1, -1, -1, call.bias.num_poses, -1), query="own")
    return _loop(call, chunk_size(SCORES_PER_CHUNK, call.q.element_size(), copies=7))
