r"""Attention on grids on the CPU, by a loop that is compiled for the machine.

``attention.cpp`` takes as many queries at a time as a vector of the processor has lanes through scores, softmax and the
product with the values, so that no score leaves the cache; its backward pass makes them again. Windows, and global
attention with a table of all offsets, go over the offsets; global attention with terms that factorise
(:mod:`~escnn_attention.functional.grid.widen`) goes over the keys, queries and keys being widened by waves as they are
met, and values not. It needs a C++ compiler (:mod:`~escnn_attention.functional.native.build`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.grid.call import Call, PositionalBias
from escnn_attention.functional.grid.kernel import (
    Arguments,
    GridLoop,
    empty_output,
    isolating_nonfinite,
    steps_of,
    why_not_on_the_cpu,
    why_unsupported_grid,
)
from escnn_attention.functional.memory import chunk_size
from escnn_attention.functional.native.build import FOLDER, Kernel, num_threads
from escnn_attention.functional.native.fields import FIELDS
from escnn_attention.functional.native.packaged import attention_on_grids
from escnn_attention.geometry.cache import constant_result, constant_tables
from escnn_attention.geometry.grid import Grid

__all__ = ["NUMBERS_PER_CHUNK", "attention", "why_not_built", "why_unsupported"]

_KERNEL = Kernel(FOLDER / "attention.cpp", "attention on grids", FIELDS["grids"])

# Tables of which the loop gives the gradients in double precision.
_TABLES = ("grad_spatial", "grad_pose", "grad_waves")
# What only the other pass reads or fills.
_NO_GRADIENTS = dict.fromkeys(("grad", "grad_q", "grad_k", "grad_v", "grad_amplitudes", *_TABLES))

NUMBERS_PER_CHUNK = 2**19
"""The numbers of an image that each thread has laid out at once. 2 MB in float32."""

_MOST_KEYS = 2**16  # Each of some tables of the scores of a vector has 16 MB then.

_PARTS = 8
"""Into how many parts a batch falls, in each of which the gradients of the terms are added up."""


_QUERY_GROUP = 4  # How many query poses share the loads of a key.


def why_unsupported(call: Call) -> str | None:
    """Why this backend cannot serve a call."""
    if reason := why_not_on_the_cpu(call) or why_unsupported_grid(call):
        return reason
    positions = call.positions
    assert isinstance(positions, Grid)
    if positions.complete and call.bias.spatial is not None:
        if not positions.shape:
            return "there is no base space for a table of offsets"
        if len(positions.offsets) * call.bias.num_poses > _MOST_KEYS:
            return f"without a window it serves at most {_MOST_KEYS} offsets and poses"
    return why_not_built(working_precision(call.q.dtype))


def attention(call: Call) -> Tensor:
    """Attention by the compiled loop over grids: see :func:`escnn_attention.functional.attention`."""
    chunk = chunk_size(NUMBERS_PER_CHUNK, call.q.element_size(), copies=num_threads())
    if not call.positions.complete or call.bias.spatial is not None:
        return _loop(call, chunk)
    if call.query == "all" and call.q.shape[3] == 1:
        # One query for all output poses: there is nothing to sum.
        call = replace(call, q=call.q.expand(-1, -1, -1, call.bias.num_poses, -1), query="own")
    without_poses = call.bias.pose is None or call.k.shape[3] == 1  # the term of a single pose is that of every key
    if call.bias.waves is None and without_poses and (call.query == "own" or not call.dropout):
        return _without_bias(call, chunk)
    return _loop(call, chunk)


def _without_bias(call: Call, chunk: int) -> Tensor:
    """Queries that all see the same, in whole groups, and once for all output poses."""
    number = math.prod(call.q.shape[2:4])
    q = F.pad(call.q.flatten(2, 3), (0, 0, 0, -number % _QUERY_GROUP)).unflatten(2, (-1, _QUERY_GROUP))
    out = _loop(replace(call, q=q, bias=PositionalBias(_QUERY_GROUP), query="own"), chunk)
    out = out.flatten(2, 3)[:, :, :number].unflatten(2, call.q.shape[2:4])
    return out if call.query == "own" else out.sum(3, keepdim=True).expand(-1, -1, -1, call.bias.num_poses, -1)


@constant_result
def why_not_built(dtype: torch.dtype) -> str | None:
    """Why there is no compiled loop for numbers of this type, if there is none."""
    return _KERNEL.why_not_built(dtype)


def _fields(call: Arguments) -> dict[str, Any]:
    """What the kernel is told of the arguments, all that is neither an output nor a gradient."""
    q, k, waves = call.q, call.k, _waves(call)
    heads, images, positions, query_poses, channels = q.shape
    everything = _sees_everything(call)
    if everything:
        shape, steps, pad = *_line(positions), 0
        rows, parts = positions, torch.sym_min(images, max(1, _PARTS // heads))
    else:
        shape, steps, pad = _space(tuple(call.shape), call.kernel_size, call.window, call.dilation)
        rows, parts = _rows(call, pad), torch.sym_min(images, _PARTS)
    return {
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": call.v.contiguous(),
        "spatial": None if call.spatial is None else call.spatial.contiguous(),
        "pose": None if call.pose is None else call.pose.contiguous(),
        "waves": waves,
        "amplitudes": None if call.readout is None else _amplitudes(q, call.readout),
        "shape": shape,
        "steps": steps,
        "dim": len(shape),
        "heads": heads,
        "images": images,
        "query_poses": query_poses,
        "key_poses": k.shape[3],
        "num_poses": call.num_poses,
        "offsets": len(steps),
        "channels": channels,
        "num_waves": 0 if waves is None else waves.shape[-1],
        "spatial_heads": 1 if call.spatial is None else len(call.spatial),
        "pose_heads": 1 if call.pose is None else len(call.pose),
        "wave_heads": 1 if waves is None else len(waves),
        "key_positions": k.shape[2],
        "everything": everything,
        "pad": pad,
        "rows": rows,
        "parts": parts,
        "threads": num_threads(),
        "seed": 0 if call.seed is None else int(call.seed),
        "sum_query_poses": call.sum_query_poses,
        "dropout": call.dropout,
        "scale": 1 / math.sqrt(channels),
    }


def _run(call: Arguments, tensors: dict[str, Tensor | None]) -> None:
    """Run the kernel on the arguments and on further tensors, which it reads or fills."""
    _KERNEL.run(call.q.dtype, {**_fields(call), **tensors})


def _packaged(call: Arguments) -> Tensor:
    """The output of the kernel in a package."""
    values = {**_fields(call), **_NO_GRADIENTS, "out": None, "sums": None}
    return attention_on_grids(call.q.dtype, values, isolating=call.kernel_size > 0)


@constant_tables
def _space(shape: tuple[int, ...], *window: Any) -> tuple[Tensor, Tensor, int]:
    """A grid as the loop has it: its shape, the offsets of a window, and the longest."""
    return torch.tensor(shape), *steps_of(shape, *window)


@constant_tables
def _line(positions: int) -> tuple[Tensor, Tensor]:
    """Positions that all see each other as the loop has them: a line of them, and no offsets."""
    return torch.tensor([positions]), torch.zeros(0, 1, dtype=torch.long)


def _sees_everything(call: Arguments) -> bool:
    """Whether every query sees all keys, without a table of offsets."""
    return not call.kernel_size and call.spatial is None


def _waves(call: Arguments) -> Tensor | None:
    """Cosines and sines of the phases, side by side: ``(M or 1, H, N, 2F)``, or None without waves."""
    return None if call.cos is None or call.sin is None else torch.cat([call.cos, call.sin], dim=-1)


def _amplitudes(q: Tensor, readout: Tensor) -> Tensor:
    """Amplitudes of the waves that every query sees, ``(M, B, N, J, 2F)``."""
    return (q.flatten(1, -2) @ readout).unflatten(1, q.shape[1:-1])


def _rows(call: Arguments, pad: int) -> int:
    """The rows of a band, as many as the chunk allows for."""
    query_poses, channels = call.q.shape[3:]
    pairs_of_poses = call.num_poses * (query_poses if call.sum_query_poses else 1)
    row = math.prod(n + pad for n in call.shape[1:])
    of_queries = (2 * query_poses + call.num_poses) * channels + pairs_of_poses
    of_keys = 4 * call.k.shape[3] * channels
    return max(1, min(call.shape[0], (call.chunk // row - 2 * pad * of_keys) // (of_queries + of_keys)))


def _empty_sums(call: Arguments) -> Tensor:
    """Room for what the backward pass makes probabilities from."""
    heads, batch, positions, poses, _ = call.q.shape
    return call.q.new_empty(heads, batch, 2, call.num_poses if call.sum_query_poses else 1, poses, positions)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = empty_output(call), _empty_sums(call)
    _run(call, {**_NO_GRADIENTS, "out": out, "sums": sums})
    return out, sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    grad_q, grad_k, grad_v = torch.empty_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    tables = {
        name: None if t is None else torch.zeros_like(t, dtype=torch.float64, memory_format=torch.contiguous_format)
        for name, t in zip(_TABLES, (call.spatial, call.pose, _waves(call)), strict=True)
    }
    grad_amplitudes = None if call.readout is None else torch.empty_like(_amplitudes(call.q, call.readout))
    filled = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v, "grad_amplitudes": grad_amplitudes}
    _run(call, {"out": out, "sums": sums, "grad": grad.contiguous(), **filled, **tables})
    grad_spatial, grad_pose, grad_waves = (None if t is None else t.to(grad_q.dtype) for t in tables.values())
    grad_cos = grad_sin = None
    if grad_waves is not None:
        grad_cos, grad_sin = (t.contiguous() for t in grad_waves.chunk(2, dim=-1))
    grad_readout = None
    if call.readout is not None and grad_amplitudes is not None:
        of_queries = grad_amplitudes.flatten(1, -2)
        grad_q += (of_queries @ call.readout.mT).view_as(grad_q)
        grad_readout = (call.q.flatten(1, -2).mT @ of_queries).sum_to_size(call.readout.shape)
    return [grad_q, grad_k, grad_v, grad_spatial, grad_pose, grad_cos, grad_sin, grad_readout]


_loop = GridLoop("native", isolating_nonfinite(_forward_pass), _backward_pass, _empty_sums, _packaged)
