"""Windows on the CPU, and global attention there with tables of offsets, by a loop that is compiled for the machine.

``attention.cpp`` takes as many queries at a time as a vector of the processor has lanes through scores, softmax and the
product with the values, so that no score leaves the cache; its backward pass makes them again. It needs a C++ compiler
(:mod:`~escnn_attention.functional.native.build`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import (
    LOG2E,
    Arguments,
    Operators,
    empty_gradients,
    empty_output,
    isolating_nonfinite,
    steps_of,
    why_not_a_table,
    why_not_on_the_cpu,
)
from escnn_attention.functional.call import Call
from escnn_attention.functional.memory import chunk_size
from escnn_attention.functional.native.build import FOLDER, Kernel
from escnn_attention.functional.native.fields import FIELDS

__all__ = ["NUMBERS_PER_CHUNK", "attention", "why_not_built", "why_unsupported"]

_KERNEL = Kernel(FOLDER / "attention.cpp", "attention over windows", FIELDS["grids"])

# What only the other pass reads or fills.
_NO_GRADIENTS = dict.fromkeys(("grad", "grad_q", "grad_k", "grad_v", "grad_spatial", "grad_pose"))

NUMBERS_PER_CHUNK = 2**19
"""The numbers of an image that each thread has laid out at once. 2 MB in float32."""

_MOST_KEYS = 2**16  # Each of some tables of the scores of a vector has 16 MB then.

_PARTS = 8
"""Into how many parts a batch falls, in each of which the gradients of the terms are added up."""


def why_unsupported(call: Call) -> str | None:
    """Why this backend cannot serve a call."""
    if reason := why_not_on_the_cpu(call) or why_not_a_table(call):
        return reason
    positions = call.positions
    if positions.complete and len(positions.offsets) * call.bias.num_poses > _MOST_KEYS:
        return f"without a window it serves at most {_MOST_KEYS} offsets and poses"
    return why_not_built(working_precision(call.q.dtype))


def attention(call: Call) -> Tensor:
    """Attention by the compiled loop over windows: see :func:`escnn_attention.functional.attention`."""
    return _operators(call, chunk_size(NUMBERS_PER_CHUNK, call.q.element_size(), copies=_threads()))


@torch.compiler.assume_constant_result
def why_not_built(dtype: torch.dtype) -> str | None:
    """Why there is no compiled loop for numbers of this type, if there is none."""
    return _KERNEL.why_not_built(dtype)


@torch.compiler.assume_constant_result
def _threads() -> int:
    return torch.get_num_threads()


def _run(call: Arguments, tensors: dict[str, Tensor | None]) -> None:
    """Run the kernel on the arguments and on further tensors, which it reads or fills."""
    q, k = call.q, call.k
    heads, images, _, query_poses, channels = q.shape
    steps, pad = steps_of(tuple(call.shape), call.kernel_size, call.window, call.dilation)
    values: dict[str, Any] = {
        **tensors,
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": call.v.contiguous(),
        "spatial": None if call.spatial is None else call.spatial.contiguous(),
        "pose": None if call.pose is None else call.pose.contiguous(),
        "shape": torch.tensor(call.shape),
        "steps": steps,
        "dim": len(call.shape),
        "heads": heads,
        "images": images,
        "query_poses": query_poses,
        "key_poses": k.shape[3],
        "frames": call.num_poses,
        "offsets": len(steps),
        "channels": channels,
        "spatial_heads": 1 if call.spatial is None else len(call.spatial),
        "pose_heads": 1 if call.pose is None else len(call.pose),
        "pad": pad,
        "rows": _rows(call, pad),
        "parts": min(images, _PARTS),
        "threads": _threads(),
        "seed": 0 if call.seed is None else int(call.seed),
        "summed": call.summed,
        "dropout": call.dropout,
        "unit": 1 / LOG2E,
    }
    _KERNEL.run(q.dtype, values)


def _rows(call: Arguments, pad: int) -> int:
    """The rows of a band, as many as the chunk allows for."""
    query_poses, channels = call.q.shape[3:]
    frames = call.num_poses * (query_poses if call.summed else 1)
    row = math.prod(n + pad for n in call.shape[1:])
    of_queries = (2 * query_poses + call.num_poses) * channels + frames
    of_keys = 4 * call.k.shape[3] * channels
    return max(1, min(call.shape[0], (call.chunk // row - 2 * pad * of_keys) // (of_queries + of_keys)))


def _empty_sums(call: Arguments) -> Tensor:
    """Room for the logarithms of the sums."""
    heads, batch, positions, poses, _ = call.q.shape
    return call.q.new_empty(heads, batch, call.num_poses if call.summed else 1, poses, positions)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = empty_output(call), _empty_sums(call)
    _run(call, {**_NO_GRADIENTS, "out": out, "sums": sums})
    return out, sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    grads = empty_gradients(call)
    sums_of_tables = {
        name: None if t is None else torch.zeros(t.shape, dtype=torch.float64)
        for name, t in (("grad_spatial", call.spatial), ("grad_pose", call.pose))
    }
    names = ("grad_q", "grad_k", "grad_v")
    zeroed = {name: t.zero_() for name, t in zip(names, grads, strict=False) if t is not None}
    _run(call, {"out": None, "sums": sums, "grad": grad.contiguous(), **zeroed, **sums_of_tables})
    for to, table in zip(grads[3:], sums_of_tables.values(), strict=False):
        if to is not None and table is not None:
            to.copy_(table)
    return grads


_operators = Operators("native", isolating_nonfinite(_forward_pass), _backward_pass, _empty_sums)
