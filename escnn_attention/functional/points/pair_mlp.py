r"""Networks of two hidden layers that make one number of every pair of points, for each head by itself.

.. math:: w^T \mathrm{SiLU}\big( W'\, \mathrm{SiLU}(W x + b) \big)

What is hidden is many times what goes in and comes out. On the CPU a loop that is compiled for the machine,
``pair_mlp.cpp``, keeps it in the cache, and the backward pass makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import recompute
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.native.build import FOLDER, Kernel
from escnn_attention.functional.native.fields import FIELDS

__all__ = ["pair_mlp"]

_KERNEL = Kernel(FOLDER / "pair_mlp.cpp", "a PairKernel", FIELDS["pair_mlp"])
_WEIGHTS = ("bias", "first", "second", "last")
_GRADIENTS = [f"grad_{name}" for name in _WEIGHTS]
_NO_GRADIENTS = dict.fromkeys(("grad", *_GRADIENTS))


def pair_mlp(x: Tensor, bias: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
    """One number ``(M, B, Q, R)`` of every row of a block, for every repetition with another bias, and every head.

    Args:
        x: ``(B, I, R)``, the inputs of all heads.
        bias: ``(M, F, B, Q)`` of the first layer.
        first: ``(M, F, I)``.
        second: ``(M, S, F)``.
        last: ``(M, S)``.
    """
    weights = (bias, first, second, last)
    alike = all(t.dtype == x.dtype for t in weights) and x.dtype in (torch.float32, torch.float64)
    autocast = torch.is_autocast_enabled(x.device.type)
    # Gradients of the inputs are those of coordinates: forces, which are differentiated once more.
    forces = x.requires_grad and torch.is_grad_enabled()
    if x.device.type != "cpu" or not alike or autocast or forces or _why_not_built(x.dtype):
        return _plainly(x, *weights)
    return _natively(x, *weights)


@torch.compiler.assume_constant_result
def _why_not_built(dtype: torch.dtype) -> str | None:
    return _KERNEL.why_not_built(dtype)


def _plainly(x: Tensor, bias: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
    # All rows side by side, so that every layer is a product with long rows.
    rows = x.transpose(0, 1).flatten(1)
    hidden = matmul(first.flatten(0, 1).unsqueeze(0), rows.unsqueeze(0)).squeeze(0)
    hidden = hidden.view(*first.shape[:2], len(x), 1, -1) + bias.unsqueeze(-1)
    size = hidden.shape[2:]
    hidden = F.silu(matmul(second, F.silu(hidden).flatten(2)))
    return matmul(last.unsqueeze(1), hidden).squeeze(1).unflatten(-1, size)


@torch.compiler.disable
def _natively(*tensors: Tensor) -> Tensor:
    out: Tensor = _PairMLP.apply(*(t.contiguous() for t in tensors))
    return out


class _PairMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        x, bias = tensors[:2]
        out = x.new_empty(len(bias), *bias.shape[2:], x.shape[2])
        _run(tensors, {**_NO_GRADIENTS, "out": out})
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or needed[0]:
            return tuple(recompute(_plainly, tensors, needed, grad))
        grads = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needed, strict=True)]
        filled = dict(zip(_GRADIENTS, grads[1:], strict=True))
        _run(tensors, {"out": None, "grad": grad.contiguous(), **filled})
        return tuple(grads)


def _run(inputs: Sequence[Tensor], tensors: dict[str, Tensor | None]) -> None:
    """Run the loop on an input and weights, and on further tensors, which it reads or fills."""
    x, bias, first, second, _ = inputs
    values: dict[str, Any] = {
        **dict(zip(("x", *_WEIGHTS), inputs, strict=True)),
        **tensors,
        "heads": len(bias),
        "inputs": x.shape[1],
        "hidden": first.shape[1],
        "second_hidden": second.shape[1],
        "blocks": len(x),
        "repeats": bias.shape[3],
        "rows": x.shape[2],
        "threads": torch.get_num_threads(),
    }
    _KERNEL.run(x.dtype, values)
