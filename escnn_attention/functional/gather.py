"""Columns of weights as all poses see them, for representations that permute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention.functional.autograd import is_transformed

__all__ = ["Columns", "add_columns", "gather_columns", "in_groups"]


class Columns(NamedTuple):
    """Which columns of weights ``(F, n)`` each of H poses sees.

    Attributes:
        seen: ``(H, m)``; the columns.
        groups: in how many groups the rows are.
    """

    seen: Tensor
    groups: int


def gather_columns(weight: Tensor, columns: Columns) -> Tensor:
    """The columns of the weights ``(F, n)`` that each pose sees, as :func:`in_groups` has them.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.gather import Columns, gather_columns
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> seen = Columns(torch.tensor([[0, 1], [1, 0]]), groups=2)
        >>> gather_columns(weight, seen)[0]  # the first row, as two poses see it
        tensor([[[1., 2.]],
        <BLANKLINE>
                [[2., 1.]]])
    """
    if is_transformed(weight):
        return in_groups(weight[:, columns.seen], columns.groups)
    if exporting() or not torch.is_grad_enabled():
        return _gathered(weight, *columns)
    return _GatherColumns.apply(weight, *columns)


def in_groups(of_poses: Tensor, groups: int) -> Tensor:
    """Fields and poses in groups, from ``(F, H, n)`` to ``(groups, H, F // groups, n)``.

    In a group the poses lie outside the fields. A single group has them inside, ``(1, F, H, n)``, as the channels of
    regular fields do.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.gather import in_groups
        >>> in_groups(torch.zeros(6, 4, 10), groups=3).shape, in_groups(torch.zeros(6, 4, 10), groups=1).shape
        (torch.Size([3, 4, 2, 10]), torch.Size([1, 6, 4, 10]))
    """
    return of_poses.unsqueeze(0) if groups == 1 else of_poses.unflatten(0, (groups, -1)).transpose(1, 2)


def _gathered(weight: Tensor, index: Tensor, groups: int) -> Tensor:
    # All are gathered along one axis: the gradient of that is fast, and of an index in brackets it is a sort.
    columns = weight.index_select(1, index.flatten()).view(len(weight), *index.shape)
    return in_groups(columns, groups).contiguous()


def add_columns(of_poses: Tensor, index: Tensor, num_columns: int) -> Tensor:
    """The transpose of :func:`gather_columns`: what the poses have, added up in the columns ``(F, n)`` that they saw.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.gather import Columns, add_columns, gather_columns
        >>> weight, index = torch.randn(6, 3), torch.tensor([[0, 1, 2], [2, 0, 1]])
        >>> torch.equal(add_columns(gather_columns(weight, Columns(index, groups=2)), index, 3), 2 * weight)
        True
    """
    if len(of_poses) > 1:
        of_poses = of_poses.transpose(1, 2)
    rows = of_poses.reshape(-1, index.numel())
    return rows.new_zeros(len(rows), num_columns).index_add_(1, index.flatten(), rows)


class _GatherColumns(torch.autograd.Function):
    """One node, because in a small layer each operation on shapes costs as much as a product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_columns = weight.shape[1]
        return _gathered(weight, index, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return add_columns(grad, index, ctx.num_columns), None, None
