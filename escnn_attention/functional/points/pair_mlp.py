r"""Networks of two hidden layers that make one number of every pair of points, for each head by itself.

.. math:: w^T \mathrm{SiLU}\big( W'\, \mathrm{SiLU}(W x + b) \big)

What is hidden is many times what goes in and comes out. On the CPU a loop that is compiled for the machine,
``pair_mlp.cpp``, keeps it in the cache, and the backward pass makes it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention.functional.autograd import Operator, Passes
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.native.build import FOLDER, Kernel
from escnn_attention.functional.native.fields import FIELDS
from escnn_attention.geometry.cache import constant_result

__all__ = ["pair_mlp"]

_KERNEL = Kernel(FOLDER / "pair_mlp.cpp", "a PairKernel", FIELDS["pair_mlp"])
_GRADIENTS = ("grad_bias", "grad_first", "grad_second", "grad_last")
_NO_GRADIENTS = dict.fromkeys(("grad", *_GRADIENTS))


class _Arguments(NamedTuple):
    """The weights, which have gradients, and the inputs, which have none here."""

    bias: Tensor
    first: Tensor
    second: Tensor
    last: Tensor
    x: Tensor


def pair_mlp(x: Tensor, bias: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
    """One number ``(M, B, Q, R)`` of every row of a block, for every repetition with another bias, and every head.

    Args:
        x: ``(B, I, R)``, the inputs of all heads.
        bias: ``(M, F, B, Q)`` of the first layer.
        first: ``(M, F, I)``.
        second: ``(M, S, F)``.
        last: ``(M, S)``.
    """
    call = _Arguments(bias, first, second, last, x)
    alike = all(t.dtype == x.dtype for t in call) and x.dtype in (torch.float32, torch.float64)
    autocast = torch.is_autocast_enabled(x.device.type)
    # Gradients of the inputs are those of coordinates: forces, which are differentiated once more.
    forces = x.requires_grad and torch.is_grad_enabled()
    if exporting() or x.device.type != "cpu" or not alike or autocast or forces or _why_not_built(x.dtype):
        return _plainly(call)
    return _operator(_Arguments(*(t.contiguous() for t in call)))


@constant_result
def _why_not_built(dtype: torch.dtype) -> str | None:
    return _KERNEL.why_not_built(dtype)


def _plainly(call: _Arguments) -> Tensor:
    """The numbers by operations that autograd looks through."""
    bias, first, second, last, x = call
    # All rows side by side, so that every layer is a product with long rows.
    rows = x.transpose(0, 1).flatten(1)
    hidden = matmul(first.flatten(0, 1).unsqueeze(0), rows.unsqueeze(0)).squeeze(0)
    hidden = hidden.view(*first.shape[:2], len(x), 1, -1) + bias.unsqueeze(-1)
    size = hidden.shape[2:]
    hidden = F.silu(matmul(second, F.silu(hidden).flatten(2)))
    return matmul(last.unsqueeze(1), hidden).squeeze(1).unflatten(-1, size)


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output; the backward pass needs no more than the arguments."""
    out = call.x.new_empty(len(call.bias), *call.bias.shape[2:], call.x.shape[2])
    return out, call.x.new_empty(0)


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    out, kept = _empty(call)
    _run(call, {**_NO_GRADIENTS, "out": out})
    return out, kept


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, __: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    grads = [torch.zeros_like(t) if need else None for t, need in zip(call[:4], needed, strict=True)]
    _run(call, {"out": None, "grad": grad.contiguous(), **dict(zip(_GRADIENTS, grads, strict=True))})
    return grads


def _run(call: _Arguments, tensors: dict[str, Tensor | None]) -> None:
    """Run the loop on further tensors, which it reads or fills."""
    x, bias, first = call.x, call.bias, call.first
    values: dict[str, Any] = {
        **call._asdict(),
        **tensors,
        "heads": len(bias),
        "inputs": x.shape[1],
        "hidden": first.shape[1],
        "second_hidden": call.second.shape[1],
        "blocks": len(x),
        "repeats": bias.shape[3],
        "rows": x.shape[2],
        "threads": torch.get_num_threads(),
    }
    _KERNEL.run(x.dtype, values)


_operator = Operator("pair_mlp", _Arguments, 4, Passes(_forward_pass, _backward_pass, _empty, _plainly))
