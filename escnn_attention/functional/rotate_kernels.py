"""The loops of :mod:`~escnn_attention.functional.rotate`, for Triton to compile.

A row is a vector of channels; its number is that of five axes, along which every tensor has steps of its own.
"""

import triton
import triton.language as tl


@triton.jit
def _at(r, n1, n2, n3, n4, s0, s1, s2, s3, s4):
    """Where the rows begin in a tensor."""
    at = r % n4 * s4 + r // n4 % n3 * s3
    r = r // n4 // n3
    return (at + r % n2 * s2 + r // n2 % n1 * s1 + r // n2 // n1 * s0)[:, None]


@triton.jit
def _precise(x):
    """In at least single precision."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def rotate(
    x, angle, out, rows, n1, n2, n3, n4,
    x0, x1, x2, x3, x4, a0, a1, a2, a3, a4, o0, o1, o2, o3, o4,
    F: tl.constexpr, FP: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The first F channels with the second F, and the others as they are."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    f = tl.arange(0, FP)[None, :]
    here = (r < rows)[:, None]
    pairs = here & (f < F)
    x += _at(r, n1, n2, n3, n4, x0, x1, x2, x3, x4) + f
    angle += _at(r, n1, n2, n3, n4, a0, a1, a2, a3, a4) + f
    out += _at(r, n1, n2, n3, n4, o0, o1, o2, o3, o4) + f
    phase = _precise(tl.load(angle, mask=pairs, other=0.0))
    cos, sin = tl.cos(phase), tl.sin(phase)
    a = tl.load(x, mask=pairs, other=0.0).to(phase.dtype)
    b = tl.load(x + F, mask=pairs, other=0.0).to(phase.dtype)
    tl.store(out, (a * cos - b * sin).to(out.dtype.element_ty), mask=pairs)
    tl.store(out + F, (a * sin + b * cos).to(out.dtype.element_ty), mask=pairs)
    for c in range(2 * F, C, FP):
        rest = here & (f < C - c)
        tl.store(out + c, tl.load(x + c, mask=rest, other=0.0), mask=rest)


@triton.jit
def rotate_back(
    x, angle, grad, grad_x, grad_angle, rows, n1, n2, n3, n4,
    x0, x1, x2, x3, x4, a0, a1, a2, a3, a4, g0, g1, g2, g3, g4, h0, h1, h2, h3, h4, k0, k1, k2, k3, k4,
    F: tl.constexpr, FP: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradients of what is rotated, and of the angles."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    f = tl.arange(0, FP)[None, :]
    here = (r < rows)[:, None]
    pairs = here & (f < F)
    x += _at(r, n1, n2, n3, n4, x0, x1, x2, x3, x4) + f
    angle += _at(r, n1, n2, n3, n4, a0, a1, a2, a3, a4) + f
    grad += _at(r, n1, n2, n3, n4, g0, g1, g2, g3, g4) + f
    grad_x += _at(r, n1, n2, n3, n4, h0, h1, h2, h3, h4) + f
    grad_angle += _at(r, n1, n2, n3, n4, k0, k1, k2, k3, k4) + f
    phase = _precise(tl.load(angle, mask=pairs, other=0.0))
    cos, sin = tl.cos(phase), tl.sin(phase)
    a = tl.load(x, mask=pairs, other=0.0).to(phase.dtype)
    b = tl.load(x + F, mask=pairs, other=0.0).to(phase.dtype)
    u = tl.load(grad, mask=pairs, other=0.0).to(phase.dtype)
    v = tl.load(grad + F, mask=pairs, other=0.0).to(phase.dtype)
    # The gradient, turned back: of a small further turn a grows by -b and b by a.
    u, v = u * cos + v * sin, v * cos - u * sin
    tl.store(grad_x, u.to(grad_x.dtype.element_ty), mask=pairs)
    tl.store(grad_x + F, v.to(grad_x.dtype.element_ty), mask=pairs)
    tl.store(grad_angle, (v * a - u * b).to(grad_angle.dtype.element_ty), mask=pairs)
    for c in range(2 * F, C, FP):
        rest = here & (f < C - c)
        tl.store(grad_x + c, tl.load(grad + c, mask=rest, other=0.0), mask=rest)
