r"""Networks of two hidden layers that make one number of every pair of points, for each head by itself.

.. math:: w^T \mathrm{SiLU}\big( W'\, \mathrm{SiLU}(W x + b) \big)

What is hidden is many times what goes in and comes out. On the CPU a loop that is compiled for the machine,
``pair_mlp.cpp``, keeps it in the cache, and the backward pass makes it again.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import Operator, Passes, needs_operators
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.native.arguments import Array, Kernel
from escnn_attention.functional.native.build import FOLDER
from escnn_attention.geometry.cache import constant_result


class Arguments(NamedTuple):
    """The weights, which have gradients, and the inputs, which have none here."""

    bias: Annotated[Tensor, Array("heads, hidden, blocks, repeats", gradient="void")]
    first: Annotated[Tensor, Array("heads, hidden, inputs", gradient="void")]
    second: Annotated[Tensor, Array("heads, second_hidden, hidden", gradient="void")]
    last: Annotated[Tensor, Array("heads, second_hidden", gradient="void")]
    x: Annotated[Tensor, Array("blocks, inputs, rows")]


class Results(NamedTuple):
    """Outputs of the loop, and inputs of its backward pass. Gradients start at zero."""

    out: Annotated[Tensor | None, Array("heads, blocks * repeats, rows")] = None
    grad: Annotated[Tensor | None, Array("as out", "in the backward pass")] = None


KERNEL = Kernel(FOLDER / "pair_mlp.cpp", "a PairKernel", Arguments, Results)


def pair_mlp(x: Tensor, bias: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
    """One number ``(M, B, Q, R)`` of every row of a block, for every repetition with another bias, and every head.

    Args:
        x: ``(B, I, R)``, the inputs of all heads.
        bias: ``(M, F, B, Q)`` of the first layer.
        first: ``(M, F, I)``.
        second: ``(M, S, F)``.
        last: ``(M, S)``.
    """
    call = Arguments(bias, first, second, last, x)
    alike = all(t.dtype == x.dtype for t in call) and x.dtype in (torch.float32, torch.float64)
    autocast = torch.is_autocast_enabled(x.device.type)
    # Gradients of the inputs are those of coordinates: forces, which are differentiated once more.
    forces = x.requires_grad and torch.is_grad_enabled()
    if needs_operators() or x.device.type != "cpu" or not alike or autocast or forces or _why_not_built(x.dtype):
        return _plainly(call)
    return _operator(Arguments(*(t.contiguous() for t in call)))


@constant_result
def _why_not_built(dtype: torch.dtype) -> str | None:
    return KERNEL.why_not_built(dtype)


def _plainly(call: Arguments) -> Tensor:
    """The numbers by operations that autograd looks through."""
    bias, first, second, last, x = call
    # All rows side by side, so that every layer is a product with long rows.
    rows = x.transpose(0, 1).flatten(1)
    hidden = matmul(first.flatten(0, 1).unsqueeze(0), rows.unsqueeze(0)).squeeze(0)
    hidden = hidden.view(*first.shape[:2], len(x), 1, -1) + bias.unsqueeze(-1)
    size = hidden.shape[2:]
    hidden = F.silu(matmul(second, F.silu(hidden).flatten(2)))
    return matmul(last.unsqueeze(1), hidden).squeeze(1).unflatten(-1, size)


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output; the backward pass needs no more than the arguments."""
    out = call.x.new_empty(len(call.bias), *call.bias.shape[2:], call.x.shape[2])
    return out, call.x.new_empty(0)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, kept = _empty(call)
    KERNEL.run(out.dtype, call, Results(out))
    return out, kept


def _backward_pass(
    call: Arguments, grad: Tensor, _: Tensor | None, __: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    grads = [torch.zeros_like(t) if need else None for t, need in zip(call[:4], needed, strict=True)]
    KERNEL.run(grad.dtype, call, Results(grad=grad.contiguous()), grads)
    return grads


_operator = Operator("pair_mlp", Arguments, 4, Passes(_forward_pass, _backward_pass, _empty, _plainly))
