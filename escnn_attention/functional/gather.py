"""Columns of weights as all poses see them, for representations that permute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention.functional.autograd import is_transformed

__all__ = ["Columns", "add_columns", "gather_columns", "in_groups"]


class Columns(NamedTuple):
    """In which order each of H poses sees the columns of weights ``(F, n)``.

    Attributes:
        seen: ``(H, n)``; the columns, all of them for each pose.
        back: ``(H, n)``; where each column is seen, the inverse permutations.
        groups: in how many groups the rows are.
    """

    seen: Tensor
    back: Tensor
    groups: int

    @classmethod
    def of(cls, seen: Tensor, groups: int) -> Columns:
        """The columns with the inverse of each permutation."""
        return cls(seen, seen.argsort(1), groups)


def gather_columns(weight: Tensor, columns: Columns) -> Tensor:
    """The columns of the weights ``(F, n)`` that each pose sees, as :func:`in_groups` has them.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.gather import Columns, gather_columns
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> seen = Columns.of(torch.tensor([[0, 1], [1, 0]]), groups=2)
        >>> gather_columns(weight, seen)[0]  # the first row, as two poses see it
        tensor([[[1., 2.]],
        <BLANKLINE>
                [[2., 1.]]])
    """
    if is_transformed(weight):
        return in_groups(weight[:, columns.seen], columns.groups)
    if exporting():
        of_poses = weight.index_select(1, columns.seen.flatten()).unflatten(1, columns.seen.shape)
        return in_groups(of_poses, columns.groups).contiguous()
    return _GatherColumns.apply(weight, *columns) if torch.is_grad_enabled() else _gathered(weight, *columns)


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


def _gathered(weight: Tensor, seen: Tensor, _: Tensor, groups: int) -> Tensor:
    # One operation, which writes the result as it is to lie in memory.
    return _in_order(in_groups(weight.unsqueeze(1).expand(-1, len(seen), -1), groups), seen)


def _in_order(of_poses: Tensor, places: Tensor) -> Tensor:
    """The columns of each pose, from ``(groups, H, F // groups, n)`` or ``(1, F, H, n)``, at its places ``(H, n)``."""
    if len(of_poses) > 1:
        places = places.unsqueeze(1)
    return of_poses.gather(-1, places.expand_as(of_poses))


def add_columns(of_poses: Tensor, back: Tensor) -> Tensor:
    """The transpose of :func:`gather_columns`: what the poses have, added up in the columns ``(F, n)`` that they saw.

    The sums are over the poses in their order, the same on every device.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.gather import Columns, add_columns, gather_columns
        >>> weight, columns = torch.randn(6, 3), Columns.of(torch.tensor([[0, 1, 2], [2, 0, 1]]), groups=2)
        >>> torch.equal(add_columns(gather_columns(weight, columns), columns.back), 2 * weight)
        True
    """
    return _in_order(of_poses, back).sum(1 if len(of_poses) > 1 else 2).flatten(0, 1)


class _GatherColumns(torch.autograd.Function):
    """One node, because in a small layer each operation on shapes costs as much as a product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seen: Tensor, back: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(back)
        return _gathered(weight, seen, back, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return add_columns(grad, back), None, None, None
