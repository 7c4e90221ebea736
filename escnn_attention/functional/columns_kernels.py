"""The loops of :mod:`~escnn_attention.functional.matmul`, for Triton to compile."""

import triton
import triton.language as tl


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
