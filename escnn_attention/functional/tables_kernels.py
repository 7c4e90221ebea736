"""The loops of :mod:`~escnn_attention.functional.tables` and of ``matmul.add_columns``, for Triton to compile.

Rows are points as a pose sees them, and columns the channels of all heads: ``MC`` of them, ``C`` of each head.
"""

import triton
import triton.language as tl

from escnn_attention.functional.vectors_kernels import precise


@triton.jit
def _places(r, o, rows, C: tl.constexpr):
    """Where numbers of rows and columns are in a table of heads, rows and channels."""
    return (o // C * rows * C + o % C)[None, :] + (r * C)[:, None]


@triton.jit
def _inner(points, layer, shift, f, d, D: tl.constexpr):
    """What a hidden unit has before its activation, and its weights."""
    weights = tl.load(layer + f * D + d, mask=d < D, other=0.0).to(points.dtype)
    return tl.sum(points * weights[None, :], axis=1) + tl.load(shift + f).to(points.dtype)


@triton.jit
def _seen(points, inverse, r, d, rows, count, i0, i1, i2, D: tl.constexpr):
    """Points as poses see them, of some rows, in at least single precision."""
    points, inverse = points + (r % count * D)[:, None], inverse + (r // count * i0)[:, None] + (d * i1)[None, :]
    here, there = (r < rows)[:, None], (r < rows)[:, None] & (d < D)[None, :]
    x = precise(tl.load(points, mask=here, other=0.0)) * tl.load(inverse, mask=there, other=0.0)
    for e in tl.static_range(1, D):
        x += precise(tl.load(points + e, mask=here, other=0.0)) * tl.load(inverse + e * i2, mask=there, other=0.0)
    return x


@triton.jit
def table(
    points, inverse, layer, shift, readout, out, rows, count, i0, i1, i2,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, MC: tl.constexpr, OP: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The readout of all hidden units at points as poses see them."""
    r, o, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, OP), tl.arange(0, DP)
    seen = _seen(points, inverse, r, d, rows, count, i0, i1, i2, D)
    total = tl.zeros((BR, OP), seen.dtype)
    for f in range(F):
        x = _inner(seen, layer, shift, f, d, D)
        total += (x * tl.sigmoid(x))[:, None] * tl.load(readout + o * F + f, mask=o < MC, other=0.0)[None, :]
    tl.store(out + _places(r, o, rows, C), total.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (o < MC)[None, :])


@triton.jit
def table_back(
    points, inverse, layer, shift, readout, grad, grad_layer, grad_shift, grad_readout, rows, count, i0, i1, i2,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, MC: tl.constexpr, OP: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights of a hidden unit: sums over all rows, in their order."""
    f, o, d = tl.program_id(0), tl.arange(0, OP), tl.arange(0, DP)
    first = _seen(points, inverse, tl.arange(0, BR), d, rows, count, i0, i1, i2, D)
    weights = tl.load(readout + o * F + f, mask=o < MC, other=0.0).to(first.dtype)
    of_readout, of_shift, of_layer = tl.zeros((OP,), first.dtype), tl.zeros((BR,), first.dtype), first * 0
    for start in range(0, rows, BR):
        r = start + tl.arange(0, BR)
        seen = _seen(points, inverse, r, d, rows, count, i0, i1, i2, D)
        x = _inner(seen, layer, shift, f, d, D)
        s = tl.sigmoid(x)
        here = (r < rows)[:, None] & (o < MC)[None, :]
        change = tl.load(grad + _places(r, o, rows, C), mask=here, other=0.0).to(first.dtype)
        of_x = tl.sum(change * weights[None, :], axis=1) * s * (1 + x * (1 - s))
        of_readout += tl.sum(change * (x * s)[:, None], axis=0)
        of_shift += of_x
        of_layer += of_x[:, None] * seen
    tl.store(grad_readout + o * F + f, of_readout.to(grad_readout.dtype.element_ty), mask=o < MC)
    tl.store(grad_shift + f, tl.sum(of_shift, axis=0).to(grad_shift.dtype.element_ty))
    tl.store(grad_layer + f * D + d, tl.sum(of_layer, axis=0).to(grad_layer.dtype.element_ty), mask=d < D)


@triton.jit
def add_rows(grad, index, out, count, rows, channels, BI: tl.constexpr, BC: tl.constexpr):
    """Of a selection of rows ``(tables, count, channels)`` what each row ``(tables, rows, channels)`` was taken for."""
    table, row, c = tl.program_id(1), tl.program_id(0), tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    grad += table.to(tl.int64) * count * channels + c
    total = tl.zeros((BI, BC), tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, count, BI):
        i = first + tl.arange(0, BI)[:, None]
        taken = tl.load(index + i, mask=i < count, other=-1) == row
        total += tl.load(grad + i * channels, mask=taken & (c < channels), other=0.0).to(total.dtype)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    found = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + (table * rows + row) * channels + c, found, mask=c < channels)


@triton.jit
def add_columns(
    x, back, out, rows, columns, fields, poses, of_group, of_pose, of_field, BR: tl.constexpr, BC: tl.constexpr
):
    """What the poses have, ``(groups, poses, fields, columns)`` with strides, added up in the columns that they saw."""
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    here = (r < rows)[:, None] & (c < columns)[None, :]
    x += (r // fields * of_group + r % fields * of_field)[:, None]
    total = tl.zeros((BR, BC), tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for h in range(poses):
        place = tl.load(back + h * columns + c, mask=c < columns, other=0)
        total += tl.load(x + h * of_pose + place[None, :], mask=here, other=0.0).to(total.dtype)
    tl.store(out + r[:, None] * columns + c[None, :], total.to(out.dtype.element_ty), mask=here)
