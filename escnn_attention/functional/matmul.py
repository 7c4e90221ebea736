"""Products and sums of many small matrices, for which torch by itself is slow: short rows, and many groups."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import is_transformed

__all__ = ["add_to_each", "grouped_linear", "grouped_linear_transpose", "matmul", "of_one_precision"]

# Rows that fill no vector register are slow to make.
_NARROW = 16


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix products of ``(..., r, i)`` with ``(..., i, c)``.

    Where the result has long columns and short rows, its transpose is made, which takes a third of the time; and so are
    the gradients.
    """
    if a.shape[:-2] != b.shape[:-2]:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = a.expand(*batch, -1, -1), b.expand(*batch, -1, -1)
    a, b = of_one_precision(a, b)
    if is_transformed(a, b):
        return a @ b
    return _Matmul.apply(a.flatten(0, -3), b.flatten(0, -3), False).view(*a.shape[:-1], b.shape[-1])


def add_to_each(x: Tensor, rows: Tensor) -> Tensor:
    """The sum of ``x`` ``(..., p, n)`` and ``rows`` ``(..., 1, n)``."""
    alike = x.shape[:-2] == rows.shape[:-2] and x.dtype == rows.dtype
    if alike and x.device.type == "cpu" and x.shape[-2] > rows.shape[-2] == 1 and not is_transformed(x, rows):
        return _AddToEach.apply(x, rows)
    return x + rows


def of_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the precision of matrix products: that of autocast where it is on, else that of ``a``.

    Autocast converts what PyTorch's own products take, but for double precision, and leaves functions like
    :class:`_Matmul` alone.
    """
    device = a.device.type
    lower = torch.is_autocast_enabled(device) and a.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if lower else a.dtype
    return a.to(dtype), b.to(dtype)


def _multiply(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
    """The products of ``(B, r, i)`` and ``(B, i, c)``.

    ``transposed`` asks for a result whose transpose is contiguous; rows that are long have precedence.
    """
    rows, columns = a.shape[1], b.shape[2]
    if min(rows, columns) < _NARROW:
        transposed = columns < rows
    return (b.mT @ a.mT).mT if transposed else a @ b


def _is_transposed(x: Tensor) -> bool:
    """Whether the transpose of each matrix is contiguous, and the matrix is not."""
    return x.stride(1) == 1 and x.stride(2) != 1


class _Matmul(torch.autograd.Function):
    """Matrix products whose gradients are made in the layout that is fastest, too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        return _multiply(a, b, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        return (
            _Matmul.apply(grad, b.mT, _is_transposed(a)) if ctx.needs_input_grad[0] else None,
            _Matmul.apply(a.mT, grad, _is_transposed(b)) if ctx.needs_input_grad[1] else None,
            None,
        )


class _AddToEach(torch.autograd.Function):
    """The sum of ``(..., p, n)`` and ``(..., 1, n)``, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        out, rows = torch.empty_like(x), rows.squeeze(-2).contiguous()
        for i in range(x.shape[-2]):
            torch.add(x[..., i, :], rows, out=out[..., i, :])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, functools.reduce(torch.add, grad.unbind(-2)).unsqueeze(-2)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map for every group: ``(..., s)`` and weights ``(G, o, s)`` to ``(G, ..., o)``.

    On the CPU the result of a group lies in one stretch of memory: what works there on one head at a time reads its
    queries, keys and values several times, and interleaved with those of the other heads each number costs a cache
    line. Elsewhere every further operation costs, and groups are one product.

    ``bias`` is ``(G', o)``, of the first groups, or None.
    """
    x, weight = of_one_precision(x, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if is_transformed(x, weight, bias):
        y = torch.einsum("...s,gos->...go", x, weight)
        return (y if bias is None else y + F.pad(bias, (0, 0, 0, len(weight) - len(bias)))).movedim(-2, 0)
    return _GroupedLinear.apply(x, weight, bias)


def grouped_linear_transpose(y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The transpose of :func:`grouped_linear`: ``(G, ..., o)`` and weights ``(G, o, s)`` to the sum ``(..., s)``.

    ``bias`` is ``(s,)``, or None.
    """
    y, weight = of_one_precision(y, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if is_transformed(y, weight, bias):
        x = torch.einsum("g...o,gos->...s", y, weight)
        return x if bias is None else x + bias
    return _GroupedLinearTranspose.apply(y, weight, bias)


def _in_one(weight: Tensor) -> bool:
    """Whether to take one product and move its result: group by group ``x`` is read again for every group."""
    return len(weight) == 1 or weight.shape[2] >= 6 * weight.shape[1] or weight.device.type != "cpu"


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    groups, outputs, _ = weight.shape
    rows = x.flatten(0, -2)  # of other shapes torch adds the bias in an operation of its own
    if _in_one(weight):
        if bias is not None and len(bias) < groups:
            bias = F.pad(bias, (0, 0, 0, groups - len(bias)))
        y = F.linear(rows, weight.flatten(0, 1), None if bias is None else bias.flatten())
        y = y.unflatten(-1, (groups, outputs)).transpose(0, 1)
        y = y.contiguous() if y.device.type == "cpu" else y
    else:
        y = torch.bmm(rows.expand(groups, -1, -1), weight.transpose(1, 2))
        if bias is not None:
            y[: len(bias)] += bias.unsqueeze(1)
    return y.unflatten(1, x.shape[:-1])


def _linear_transpose(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = y.flatten(1, -2)
    if _in_one(weight):
        x = F.linear(rows.transpose(0, 1).flatten(1), weight.flatten(0, 1).T, bias)
    else:
        x = rows[0] @ weight[0] if bias is None else torch.addmm(bias, rows[0], weight[0])
        for of_group, weight_of_group in zip(rows[1:], weight[1:], strict=True):
            x = x.addmm_(of_group, weight_of_group)
    return x.unflatten(0, y.shape[1:-1])


def _weight_gradient(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights ``(G, o, s)``, of ``(G, ..., o)`` and ``(..., s)``."""
    rows, columns = y.flatten(1, -2), x.flatten(0, -2)
    if _in_one(weight):
        return (rows.transpose(0, 1).flatten(1).T @ columns).view(weight.shape)
    return rows.transpose(1, 2) @ columns


# Each is the other's derivative, so that there are derivatives of every order. Written with expanded tensors autograd
# would make a gradient of x for every group before it adds them up. The operations on shapes are inside, because in a
# small layer each of them costs as much as a product.


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.with_bias = 0 if bias is None else len(bias)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            grouped_linear_transpose(grad, weight) if ctx.needs_input_grad[0] else None,
            _weight_gradient(grad, x, weight) if ctx.needs_input_grad[1] else None,
            grad[: ctx.with_bias].flatten(1, -2).sum(1) if ctx.needs_input_grad[2] else None,
        )


class _GroupedLinearTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, weight)
        return _linear_transpose(y, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        y, weight = ctx.saved_tensors
        return (
            grouped_linear(grad, weight) if ctx.needs_input_grad[0] else None,
            _weight_gradient(y, grad, weight) if ctx.needs_input_grad[1] else None,
            grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None,
        )
