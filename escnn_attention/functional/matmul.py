"""Products and sums of many small matrices, whose rows are too short for what torch does by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_to_each", "matmul", "of_one_precision"]

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
    return _Matmul.apply(a.flatten(0, -3), b.flatten(0, -3), False).view(*a.shape[:-1], b.shape[-1])


def add_to_each(x: Tensor, rows: Tensor) -> Tensor:
    """The sum of ``x`` ``(..., p, n)`` and ``rows`` ``(..., 1, n)``."""
    alike = x.shape[:-2] == rows.shape[:-2] and x.dtype == rows.dtype
    if alike and x.device.type == "cpu" and x.shape[-2] > rows.shape[-2] == 1:
        return _AddToEach.apply(x, rows)
    return x + rows


def of_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the precision of matrix products: that of autocast where it is on, else that of ``a``.

    Autocast converts what PyTorch's own products take, and leaves functions like :class:`_Matmul` alone.
    """
    device = a.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.dtype
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
