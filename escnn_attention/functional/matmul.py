"""Products and sums of many small matrices, for which torch by itself is slow: short rows, and many groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from escnn_attention.exporting.mode import in_packages
from escnn_attention.functional import launch
from escnn_attention.functional.autograd import needs_operators
from escnn_attention.functional.columns import add_columns

# Rows that fill no vector register are slow to make; of fewer positions images are copied to rows.
_NARROW = 16
# Of fewer positions a product for each image takes longer than one product of all and a copy.
_MANY_POSITIONS = 64

# For groups of at most so many outputs a product for each takes two to three times as long as one product for all
# groups and a copy of its result.
_FEW_OUTPUTS = 8
_FEW = 2**16
# Of so many numbers a backward pass of our own takes about as long as PyTorch's, and of fewer it takes longer.
SMALL = 2**20
# Sums of so many numbers take longer than to start another.
_LONG = 2**12
# Sums for at most so many numbers that are this long or longer are made in parts.
_FEW_SUMS, _LONG_SUM, _PARTS = 2**12, 2**16, 512
# Numbers of gradients of weights that may be held for all images at once; of more, features are copied.
_FEW_GRADIENTS = 2**22


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix products of ``(..., r, i)`` with ``(..., i, c)``.

    Where the result has long columns and short rows, its transpose is made, which takes a third of the time; and so are
    the gradients.
    """
    if a.shape[:-2] != b.shape[:-2]:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = a.expand(*batch, -1, -1), b.expand(*batch, -1, -1)
    a, b = of_one_precision(a, b)
    if needs_operators(a, b):
        return a @ b
    return _Matmul.apply(a.flatten(0, -3), b.flatten(0, -3), False).view(*a.shape[:-1], b.shape[-1])


def add_to_each(x: Tensor, rows: Tensor) -> Tensor:
    """The sum of ``x`` ``(..., p, n)`` and ``rows`` ``(..., 1, n)``."""
    alike = x.shape[:-2] == rows.shape[:-2] and x.dtype == rows.dtype
    alike = alike and x.device.type not in launch.DEVICES and x.shape[-2] > rows.shape[-2] == 1
    if alike and not needs_operators(x, rows):
        return _AddToEach.apply(x, rows)
    return x + rows


def of_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the precision of matrix products: that of autocast where it is on, else that of ``a``.

    Autocast converts what PyTorch's own products take, but for double precision, and leaves functions like
    :class:`_Matmul` alone.
    """
    device = a.device.type
    lower = device != "meta" and torch.is_autocast_enabled(device) and a.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if lower else a.dtype
    return (a, b) if a.dtype == dtype == b.dtype else (a.to(dtype), b.to(dtype))


def _sum_in_parts(a: Tensor, b: Tensor) -> Tensor:
    """Products of ``(B, r, i)`` and ``(B, i, c)`` with long sums: partial ones are independent."""
    whole = a.shape[2] // _PARTS * _PARTS
    found = []
    for x, y in zip(a, b, strict=True):
        of_parts = x[:, :whole].unflatten(1, (_PARTS, -1)).transpose(0, 1) @ y[:whole].unflatten(0, (_PARTS, -1))
        found.append(of_parts.sum(0) + x[:, whole:] @ y[whole:])
    return torch.stack(found)


def _is_transposed(x: Tensor) -> bool:
    """Whether the transpose of each matrix is contiguous, and the matrix is not."""
    return x.stride(1) == 1 and x.stride(2) != 1


class _Matmul(torch.autograd.Function):
    """The products of ``(B, r, i)`` and ``(B, i, c)``, whose gradients are made in the layout that is fastest, too.

    ``transposed`` asks for a result whose transpose is contiguous; rows that are long have precedence.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        rows, columns = a.shape[1], b.shape[2]
        # Few sums by one core each would leave most of a device with many cores without work.
        if a.shape[2] >= _LONG_SUM and rows * columns <= _FEW_SUMS and a.device.type in launch.DEVICES:
            return _sum_in_parts(a, b)
        if min(rows, columns) < _NARROW:
            transposed = columns < rows
        if not transposed:
            return a @ b
        y = (b.mT @ a.mT).mT
        return y.data if torch.compiler.is_compiling() or not is_legacy_batchedtensor(y) else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        return (
            _Matmul.apply(grad, b.mT, _is_transposed(a)) if ctx.needs_input_grad[0] else None,
            _Matmul.apply(a.mT, grad, _is_transposed(b)) if ctx.needs_input_grad[1] else None,
            None,
        )


class _Unbind(torch.autograd.Function):
    """The parts of a tensor, whose gradients lie in memory as it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.strides = x.shape, x.stride()
        return x.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return torch.stack(grads)
        out = grads[0].new_empty_strided(ctx.shape, ctx.strides)
        for i, grad in enumerate(grads):
            out[i].copy_(grad)
        return out


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


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    columns: Columns | None = None,
    side_by_side: bool | None = None,
) -> Tensor:
    """A linear map for every group: ``(..., s)`` and weights ``(G, *o, s)`` to ``(G, ..., *o)``.

    On the CPU the result of a group lies in one stretch of memory: what works there on one head at a time reads its
    queries, keys and values several times, and interleaved with those of the other heads each number costs a cache
    line. Elsewhere every further operation costs, and groups are one product.

    Args:
        x: ``(..., s)``.
        weight: ``(G, *o, s)``; with ``columns`` ``(F, n)``.
        bias: that of the first groups, ``(G', *o)``, with axes of length 1 where all share it.
        columns: of the weights, that each pose sees: the map is what
            :func:`~escnn_attention.functional.matmul.gather_columns` gives.
        side_by_side: whether the positions of the result lie side by side in memory, for ``x`` ``(B, *space, s)``; by
            default as those of ``x`` for a single group.
    """
    x, weight = of_one_precision(x, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if needs_operators(x, weight, bias):
        return _linear_of_operators(x, gather_columns(weight, columns), bias)
    if side_by_side is None:
        groups = len(weight) if columns is None else columns.groups
        side_by_side = groups == 1 and x.dim() > 2 and x.stride(-1) != 1 == x.stride(-2)
        # On a CPU a product for each image of few positions takes longer than a copy; a GPU waits for each launch.
        side_by_side &= x.device.type in launch.DEVICES or x.shape[1:-1].numel() >= _NARROW
    if not torch.is_grad_enabled() or (not side_by_side and _is_simple(math.prod(x.shape[:-1]), weight, columns)):
        return _linear(x, gather_columns(weight, columns), bias, side_by_side)
    return _GroupedLinear.apply(x, weight, bias, side_by_side, *(columns or (None, None, 0)))


def grouped_linears(
    parts: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    columns: Columns | None = None,
    side_by_side: bool | None = None,
) -> Sequence[Tensor]:
    """:func:`grouped_linear` in so many parts, each of as many groups ``(G', ..., *o)``.

    On the CPU parts of many numbers are a product each, so that their gradients need not be copied into one tensor.
    """
    rows, positions = math.prod(x.shape[:-1]), math.prod(x.shape[1:-1])  # in programs they may be any numbers
    few = x.device.type not in launch.DEVICES and not (isinstance(positions, int) and positions >= _MANY_POSITIONS)
    by_rows = (few or not side_by_side) and not needs_operators(x, weight, bias)
    copied = bool(side_by_side) and by_rows
    side_by_side = side_by_side and not few
    if parts > 1 and by_rows and _is_simple(rows, weight, columns):
        x, weight = of_one_precision(x, weight)
        bias = None if bias is None else bias.to(weight.dtype)
        return _one_product(x, gather_columns(weight, columns), bias, parts, copied)
    if copied:
        return [_positions_last(t) for t in grouped_linears(parts, x, weight, bias, columns, False)]
    outputs = math.prod(weight.shape[:-1]) if columns is None else weight.shape[0] * len(columns.seen)
    one_group = columns is not None and columns.groups == parts  # A single group would have its poses inside.
    if (
        parts == 1
        or x.device.type in launch.DEVICES
        or not isinstance(rows, int)
        or rows * outputs <= _FEW
        or one_group
    ):
        return apart(grouped_linear(x, weight, bias, columns, side_by_side), parts, side_by_side)
    groups = (len(weight) if columns is None else columns.groups) // parts
    columns = None if columns is None else columns._replace(groups=groups)
    biases = () if bias is None else bias.split(groups)
    return [
        grouped_linear(x, of_part, biases[i] if i < len(biases) else None, columns, side_by_side)
        for i, of_part in enumerate(weight.chunk(parts))
    ]


def apart(made: Tensor, parts: int, side_by_side: bool | None = None) -> Sequence[Tensor]:
    """Parts ``(G', B, *space, p, c)`` of a tensor ``(G, B, *space, p, c)``.

    Their gradients are put together in one piece, as :func:`grouped_linear` has made them: with positions side by
    side, on the CPU by group, else by position.
    """
    if parts == 1:
        return [made]
    made = made.unflatten(0, (parts, -1))
    if side_by_side:
        found = list(made.movedim(2, 0).movedim((-2, -1), (3, 4)).unbind(1))
        for i, t in enumerate(found):
            found[i] = t.movedim((2, 3), (-2, -1)).transpose(0, 1)
        return found
    if made.device.type not in launch.DEVICES:
        if made.is_contiguous() or not made.requires_grad or needs_operators(made):
            return made.unbind()
        return _Unbind.apply(made)
    return [t.movedim(-3, 0) for t in made.movedim((0, 1), (-4, -3)).unbind(-4)]


def grouped_linear_transpose(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    columns: Columns | None = None,
    side_by_side: bool | None = None,
) -> Tensor:
    """The transpose of :func:`grouped_linear`: ``(G, ..., *o)`` and weights ``(G, *o, s)`` to the sum ``(..., s)``.

    Args:
        y: ``(G, ..., *o)``.
        bias: ``(s,)``, or ``(f, 1)`` where each of f fields of one size has one number.
        weight, columns: as in :func:`grouped_linear`.
        side_by_side: as there, for ``y`` ``(G, B, *space, *o)``; by default as those of ``y``.
    """
    y, weight = of_one_precision(y, weight)
    bias = None if bias is None else bias.to(weight.dtype)
    if needs_operators(y, weight, bias):
        bias = None if bias is None else bias.view(len(bias), -1).expand(-1, weight.shape[-1] // len(bias)).flatten()
        return _linear_transpose_of_operators(y, gather_columns(weight, columns), bias)
    last = weight.dim() - 2 if columns is None else 2
    lead = y.dim() - 1 - last
    number, positions = y.shape[1 : 1 + lead].numel(), y.shape[2 : 1 + lead].numel()
    if side_by_side is None:
        side_by_side = lead > 1 and y.stride(-1) != 1 == y.stride(-1 - last)
        if side_by_side and y.device.type not in launch.DEVICES and positions < _MANY_POSITIONS:
            side_by_side = positions >= _NARROW and not _is_simple(number, weight, columns)
    if y.device.type in launch.DEVICES and not side_by_side:  # One copy, if any, in place of one for each product.
        rows = _rows_of_all(y, lead)
        y = rows.view(*y.shape[1 : 1 + lead], len(y), *y.shape[1 + lead :]).movedim(lead, 0)
    if not torch.is_grad_enabled() or (not side_by_side and _is_simple(number, weight, columns)):
        return _linear_transpose(y, gather_columns(weight, columns), bias, side_by_side)
    return _GroupedLinearTranspose.apply(y, weight, bias, side_by_side, *(columns or (None, None, 0)))


def _in_one(weight: Tensor, rows: int, shape: tuple[int, int, int] | None = None) -> bool:
    """Whether to take one product and move its result: group by group ``x`` is read again for every group.

    Few numbers are moved in less time than another product takes to start. A map that is not gathered yet has a shape.
    """
    groups, outputs, inputs = shape or weight.shape
    few = isinstance(rows, int) and rows * groups * outputs <= _FEW  # in programs it may be any number
    return few or groups == 1 or inputs >= 6 * outputs or weight.device.type in launch.DEVICES


def _is_simple(rows: int, weight: Tensor, columns: Columns | None) -> bool:
    """Whether a map is one product of few numbers on a CPU, whose gradients PyTorch makes in the least time."""
    groups, poses = (len(weight), 1) if columns is None else (columns.groups, len(columns.seen))
    outputs, inputs = weight.shape[:-1].numel() * poses // groups, weight.shape[-1]
    if weight.device.type in launch.DEVICES or not isinstance(rows, int):
        return False
    return rows * max(groups * outputs, inputs) <= SMALL and _in_one(weight, rows, (groups, outputs, inputs))


def _columns(y: Tensor, last: int) -> Tensor:
    """Positions as columns, ``(B, channels, N)``, of ``(G, B, *space, *o)`` with so many axes behind space."""
    space = y.dim() - 2 - last
    y = y.permute(1, 0, *range(2 + space, y.dim()), *range(2, 2 + space))
    return y.flatten(1, 1 + last).flatten(2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, side_by_side: bool = False) -> Tensor:
    shape, of_groups = weight.shape, weight.flatten(1, -2)
    groups, outputs, inputs = of_groups.shape
    if not side_by_side and (outputs <= _FEW_OUTPUTS or _in_one(of_groups, math.prod(x.shape[:-1]))):
        return _one_product(x, weight, bias)[0]
    if side_by_side:
        if bias is not None:  # With zeros for the other groups: one copy.
            bias = F.pad(bias.expand(-1, *shape[1:-1]), (0, 0) * (len(shape) - 2) + (0, groups - len(bias))).view(-1)
        map_, columns = weight.reshape(-1, inputs).expand(len(x), -1, -1), x.movedim(-1, 1).flatten(2)
        y = torch.bmm(map_, columns) if bias is None else torch.baddbmm(bias.unsqueeze(1), map_, columns)
        last, space = len(shape) - 2, x.dim() - 2
        y = y.view(len(x), groups, *shape[1:-1], *x.shape[1:-1])
        return y.permute(1, 0, *range(2 + last, 2 + last + space), *range(2, 2 + last))
    y = torch.bmm(x.reshape(-1, inputs).expand(groups, -1, -1), of_groups.transpose(1, 2))
    if bias is not None:
        y[: len(bias)].add_(bias.expand(-1, *shape[1:-1]).reshape(-1, 1, outputs))
    return y.view(groups, *x.shape[:-1], *shape[1:-1])


def _one_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int = 1, side_by_side: bool = False
) -> Sequence[Tensor]:
    """The outputs of so many parts of the groups, by one product; with positions side by side after a copy."""
    shape, groups = weight.shape, len(weight) // parts
    if bias is not None:
        missing, bias = len(weight) - len(bias), bias.expand(-1, *shape[1:-1])
        bias = (F.pad(bias, (0, 0) * (len(shape) - 2) + (0, missing)) if missing else bias).flatten()
    # Of other shapes torch adds the bias in an operation of its own.
    y = F.linear(x.reshape(-1, shape[-1]), weight.flatten(0, -2), bias)
    if len(weight) == 1:
        return [y.view(1, *x.shape[:-1], *shape[1:-1])]
    outputs = y.shape[1] // len(weight)
    if side_by_side:
        last, space = len(shape) - 2, x.dim() - 2
        made = y.view(len(x), math.prod(x.shape[1:-1]), parts, groups * outputs).permute(2, 0, 3, 1).contiguous()
        made = made.view(parts, len(x), groups, *shape[1:-1], *x.shape[1:-1])
        axes = (1, 0, *range(2 + last, 2 + last + space), *range(2, 2 + last))
        # Permuted one by one, so that their gradients are put together as they lie in memory.
        return [part.permute(axes) for part in made.unbind()]
    made = y.view(-1, parts, groups, outputs).permute(1, 2, 0, 3)
    made = made if y.device.type in launch.DEVICES else made.contiguous()
    return made.view(parts, groups, *x.shape[:-1], *shape[1:-1]).unbind()


def _linear_transpose(y: Tensor, weight: Tensor, bias: Tensor | None, side_by_side: bool = False) -> Tensor:
    lead, last, weight = y.shape[1 : y.dim() - weight.dim() + 2], weight.dim() - 2, weight.flatten(1, -2)
    if bias is not None:
        bias = bias.view(len(bias), -1).expand(-1, weight.shape[-1] // len(bias)).flatten()
    if side_by_side:
        map_, columns = weight.flatten(0, 1).T.expand(lead[0], -1, -1), _columns(y, last)
        x = torch.bmm(map_, columns) if bias is None else torch.baddbmm(bias.unsqueeze(1), map_, columns)
        return x.unflatten(2, lead[1:]).movedim(1, -1)
    by_position, map_ = y.movedim(0, len(lead)), weight.flatten(0, 1).T
    if _in_one(weight, math.prod(lead)) or by_position.is_contiguous():
        x = F.linear(by_position.reshape(math.prod(lead), map_.shape[1]), map_, bias)
    else:
        rows = y.reshape(len(weight), -1, weight.shape[1])
        x = rows[0] @ weight[0] if bias is None else torch.addmm(bias, rows[0], weight[0])
        for of_group, weight_of_group in zip(rows[1:], weight[1:], strict=True):
            x = x.addmm_(of_group, weight_of_group)
    return x.view(*lead, x.shape[-1])


@in_packages(_linear)
def _linear_of_operators(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`grouped_linear` in one product, without a decision by the number of rows."""
    y = torch.einsum("...s,gos->g...o", x, weight.flatten(1, -2)).unflatten(-1, weight.shape[1:-1])
    if bias is not None:
        bias = F.pad(bias, (0, 0) * (bias.dim() - 1) + (0, len(weight) - len(bias)))
        y = y + bias[(slice(None), *[None] * (x.dim() - 1))]
    return y


@in_packages(_linear_transpose)
def _linear_transpose_of_operators(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`grouped_linear_transpose` in one product, without a decision by the number of rows."""
    x = torch.einsum("g...o,gos->...s", y.flatten(2 - weight.dim()), weight.flatten(1, -2))
    return x if bias is None else x + bias


def _positions_last(y: Tensor) -> Tensor:
    """A copy of ``(G, B, *space, p, c)`` whose positions lie side by side in memory."""
    return y.movedim((-2, -1), (2, 3)).transpose(0, 1).contiguous().transpose(0, 1).movedim((2, 3), (-2, -1))


def _rows_of_all(y: Tensor, lead: int) -> Tensor:
    """The outputs of all groups side by side, from ``(G, ..., *o)`` with so many axes in the middle: one copy."""
    y = y.movedim(0, lead)
    return y.reshape(math.prod(y.shape[:lead]), math.prod(y.shape[lead:]))


def _laid_out(y: Tensor, x: Tensor, weight: Tensor, side_by_side: bool) -> Tensor:
    """Outputs ``(G, ..., *o)`` for inputs ``(..., s)``, copied if otherwise each product would copy them."""
    lead, axes, positions = x.dim() - 1, list(range(y.dim())), math.prod(x.shape[:-1])
    if side_by_side:
        axes = [1, 0, *axes[1 + lead :], *axes[2 : 1 + lead]]
        matrices = [len(x), weight[..., 0].numel(), math.prod(x.shape[1:-1])]
    elif _in_one(weight.flatten(1, -2), positions):
        axes = [*axes[1 : 1 + lead], 0, *axes[1 + lead :]]
        matrices = [positions, weight[..., 0].numel()]
    else:
        matrices = [len(weight), positions, weight[0, ..., 0].numel()]
    y = y.permute(axes)
    return y.reshape(matrices).view(y.shape).permute([axes.index(i) for i in range(len(axes))])


def _weight_gradient(y: Tensor, x: Tensor, weight: Tensor, side_by_side: bool) -> Tensor:
    """The gradient of the weights ``(G, *o, s)``, of ``(G, ..., *o)`` and ``(..., s)``."""
    shape, weight = weight.shape, weight.flatten(1, -2)
    if side_by_side:
        outputs, inputs = _columns(y, len(shape) - 2), x.movedim(-1, 1).flatten(2)
        held = len(x) * weight.numel()  # gradients, one for each image
        if held > max(_FEW_GRADIENTS, outputs.numel() + inputs.numel()):
            outputs, inputs = (t.transpose(0, 1).flatten(1).unsqueeze(0) for t in (outputs, inputs))
        of_images = torch.bmm(outputs, inputs.mT)
        return (of_images if len(of_images) == 1 else of_images.sum(0)).view(shape)
    columns = x.reshape(-1, shape[-1])
    if _in_one(weight, len(columns)):
        return (_rows_of_all(y, x.dim() - 1).T @ columns).view(shape)
    rows = y.reshape(len(weight), -1, weight.shape[1])
    return (rows.transpose(1, 2) @ columns).view(shape)


def _bias_gradient(y: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of the bias, of its shape, of ``(G, ..., *o)``."""
    y, last = y[: shape[0]], y.dim() - len(shape) + 1
    if y.numel() > _LONG:  # Over positions the sum is in the order in memory, which is faster, if there are many.
        return y.sum([*range(1, last)]).sum_to_size(shape)
    shared = [last + i for i in range(len(shape) - 1) if shape[1 + i] == 1 != y.shape[last + i]]
    return y.sum([*range(1, last), *shared]).view(shape)


def _sum_of_fields(x: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of the bias of :func:`grouped_linear_transpose`, of its shape, of ``(..., s)``."""
    over = [*range(x.dim() - 1)]
    return x.sum(over) if len(shape) == 1 else x.unflatten(-1, (shape[0], -1)).sum([*over, -1]).unsqueeze(1)


# Each is the other's derivative, so that there are derivatives of every order. Written with expanded tensors autograd
# would make a gradient of x for every group before it adds them up. The operations on shapes are inside, because in a
# small layer each of them costs as much as a product. Of outputs that are views, ``.data`` is none, so that they may be
# changed in place; of gradients in batches there is no ``.data``.


class _Grouped(torch.autograd.Function):
    """Code that both share: the weights, which may be gathered first, and their gradient."""

    @staticmethod
    def keep(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, side_by_side: bool, *columns: Any
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Keep what the backward pass needs; the map itself, with what else it is given."""
        ctx.side_by_side = side_by_side
        seen, back, ctx.groups = columns
        map_ = weight if seen is None else _gathered(weight, *columns)
        ctx.save_for_backward(x, weight, seen, back, None if seen is None else map_)
        ctx.of_bias = None if bias is None else bias.shape
        return map_, bias, side_by_side

    @staticmethod
    def kept(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The input, the map and where its columns are from. Gradient checkpointing allows one call in a backward pass.

        Where autograd records the backward pass, the map is gathered again from the weights.
        """
        x, weight, seen, back, map_ = ctx.saved_tensors
        if map_ is None:
            return x, weight, back
        again = torch.is_grad_enabled()
        return x, gather_columns(weight, Columns(seen, back, ctx.groups)) if again else map_, back

    @staticmethod
    def weight_gradient(ctx: Any, y: Tensor, x: Tensor, map_: Tensor, back: Tensor | None) -> Tensor | None:
        """The gradient of the weights, of the outputs' and the inputs' side of the map."""
        if not ctx.needs_input_grad[1]:
            return None
        of_map = _weight_gradient(y, x, map_, ctx.side_by_side)
        return of_map if back is None else add_columns(of_map, back)


class _GroupedLinear(_Grouped):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        out = _linear(x, *_Grouped.keep(ctx, x, *arguments))
        return out.data if torch.compiler.is_compiling() or not is_legacy_batchedtensor(out) else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, map_, back = _Grouped.kept(ctx)
        grad = _laid_out(grad, x, map_, ctx.side_by_side)
        return (
            grouped_linear_transpose(grad, map_, None, None, ctx.side_by_side) if ctx.needs_input_grad[0] else None,
            _Grouped.weight_gradient(ctx, grad, x, map_, back),
            _bias_gradient(grad, ctx.of_bias) if ctx.needs_input_grad[2] else None,
            *(None, None, None, None),
        )


class _GroupedLinearTranspose(_Grouped):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *arguments: Any) -> Tensor:
        out = _linear_transpose(y, *_Grouped.keep(ctx, y, *arguments))
        return out.data if torch.compiler.is_compiling() or not is_legacy_batchedtensor(out) else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, map_, back = _Grouped.kept(ctx)
        if not ctx.side_by_side:  # One copy in place of one for each product, if any.
            grad = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1]).view(grad.shape)
        return (
            grouped_linear(grad, map_, None, None, ctx.side_by_side) if ctx.needs_input_grad[0] else None,
            _Grouped.weight_gradient(ctx, y, grad, map_, back),
            _sum_of_fields(grad, ctx.of_bias) if ctx.needs_input_grad[2] else None,
            *(None, None, None, None),
        )


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


def gather_columns(weight: Tensor, columns: Columns | None) -> Tensor:
    """The columns of the weights ``(F, n)`` that each pose sees, as :func:`in_groups` has them; or all of them.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> seen = Columns.of(torch.tensor([[0, 1], [1, 0]]), groups=2)
        >>> gather_columns(weight, seen)[0]  # the first row, as two poses see it
        tensor([[[1., 2.]],
        <BLANKLINE>
                [[2., 1.]]])
    """
    if columns is None:
        return weight
    if weight.device.type not in launch.DEVICES or needs_operators(weight):
        of_poses = weight.index_select(1, columns.seen.flatten()).unflatten(1, columns.seen.shape)
        return in_groups(of_poses, columns.groups).contiguous()
    return _GatherColumns.apply(weight, *columns) if torch.is_grad_enabled() else _gathered(weight, *columns)


def in_groups(of_poses: Tensor, groups: int) -> Tensor:
    """Fields and poses in groups, from ``(F, H, n)`` to ``(groups, H, F // groups, n)``.

    In a group the poses lie outside the fields. A single group has them inside, ``(1, F, H, n)``, as the channels of
    regular fields do.

    Example:
        >>> in_groups(torch.zeros(6, 4, 10), groups=3).shape, in_groups(torch.zeros(6, 4, 10), groups=1).shape
        (torch.Size([3, 4, 2, 10]), torch.Size([1, 6, 4, 10]))
    """
    return of_poses.unsqueeze(0) if groups == 1 else of_poses.unflatten(0, (groups, -1)).transpose(1, 2)


def _gathered(weight: Tensor, seen: Tensor, _: Tensor | None, groups: int) -> Tensor:
    # One operation, which writes the result as it is to lie in memory.
    of_poses = in_groups(weight.unsqueeze(1).expand(-1, len(seen), -1), groups)
    return of_poses.gather(-1, (seen.unsqueeze(1) if groups > 1 else seen).expand_as(of_poses))


class _GatherColumns(torch.autograd.Function):
    """One node, because a GPU waits for each operation, and adds rows of an index in any order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seen: Tensor, back: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(back)
        return _gathered(weight, seen, back, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return add_columns(grad, back), None, None, None
