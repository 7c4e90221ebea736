"""Products of one matrix with those of many groups, on the CPU a group's result in one stretch of memory.

What works there on one head at a time reads its queries, keys and values several times; interleaved with those of the
other heads each number costs a cache line. Elsewhere every further operation costs, and groups are one product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.matmul import of_one_precision

__all__ = ["collect", "spread"]


def spread(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` times the transposed weight of every group: ``(..., s)`` and ``(G, o, s)`` to ``(G, ..., o)``.

    ``bias`` is ``(G, o)``, or None.
    """
    x, weight = of_one_precision(x, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if len(weight) == 1:
        return _linear(x, weight[0], None if bias is None else bias[0]).unsqueeze(0)
    if _in_one(weight):
        y = _linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        y = y.unflatten(-1, weight.shape[:2]).movedim(-2, 0)
        return y.contiguous() if weight.device.type == "cpu" else y
    y = _Spread.apply(x.flatten(0, -2), weight)
    return (y if bias is None else y + bias.unsqueeze(1)).unflatten(1, x.shape[:-1])


def collect(y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over the groups of ``y`` times the weight: ``(G, ..., o)`` and ``(G, o, s)`` to ``(..., s)``.

    ``bias`` is ``(s,)``, or None.
    """
    y, weight = of_one_precision(y, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if _in_one(weight):
        return _linear(y.movedim(0, -2).flatten(-2), weight.flatten(0, 1).T, bias)
    x = _Collect.apply(y.flatten(1, -2), weight)
    return (x if bias is None else x + bias).unflatten(0, y.shape[1:-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By rows: of others torch adds the bias in an operation of its own."""
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _in_one(weight: Tensor) -> bool:
    """Whether to take one product and move its result: group by group ``x`` is read again for every group."""
    return len(weight) == 1 or weight.shape[2] >= 6 * weight.shape[1] or weight.device.type != "cpu"


def _weight_gradient(y: Tensor, x: Tensor) -> Tensor:
    return y.transpose(1, 2) @ x


# Each is the other's derivative, so that there are derivatives of every order. Written with expanded tensors autograd
# would make a gradient of x for every group before it adds them up.


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x.expand(len(weight), -1, -1), weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            collect(grad, weight) if ctx.needs_input_grad[0] else None,
            _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None,
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        out = y[0] @ weight[0]
        for y_of_group, of_group in zip(y[1:], weight[1:], strict=True):
            out.addmm_(y_of_group, of_group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, weight = ctx.saved_tensors
        return (
            spread(grad, weight) if ctx.needs_input_grad[0] else None,
            _weight_gradient(y, grad) if ctx.needs_input_grad[1] else None,
        )
