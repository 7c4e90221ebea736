"""The loops of :mod:`~escnn_attention.functional.rotate`, for Triton to compile.

A row is a vector of channels; its number is that of five axes, along which every tensor has steps of its own. ``AT`` is
the channel of the result where pairs begin, and ``START`` the first channel that is not one of a pair.
"""

import triton
import triton.language as tl

from escnn_attention.functional.vectors_kernels import precise


@triton.jit
def _at(r, n1, n2, n3, n4, s0, s1, s2, s3, s4):
    """Where the rows begin in a tensor."""
    at = r % n4 * s4 + r // n4 % n3 * s3
    r = r // n4 // n3
    return at + r % n2 * s2 + r // n2 % n1 * s1 + r // n2 // n1 * s0


@triton.jit
def rotate(
    x, pairs, pose, angle, out, rows, n1, n2, n3, n4,
    x0, x1, x2, x3, x4, w0, w1, w2, w3, w4, p0, p1, p2, p3, p4, a0, a1, a2, a3, a4, o0, o1, o2, o3, o4,
    F: tl.constexpr, FP: tl.constexpr, C: tl.constexpr, AT: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
    UNIT: tl.constexpr, POSE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The first F channels of pairs with the second F, and the other channels as they are."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    f = tl.arange(0, FP)[None, :]
    here = (r < rows)[:, None]
    mask = here & (f < F)
    x += _at(r, n1, n2, n3, n4, x0, x1, x2, x3, x4)[:, None] + f
    pairs += _at(r, n1, n2, n3, n4, w0, w1, w2, w3, w4)[:, None] + f
    pose += _at(r, n1, n2, n3, n4, p0, p1, p2, p3, p4)[:, None] + f
    angle += _at(r, n1, n2, n3, n4, a0, a1, a2, a3, a4)[:, None] + f
    out += _at(r, n1, n2, n3, n4, o0, o1, o2, o3, o4)[:, None] + f
    phase = precise(tl.load(angle, mask=mask, other=0.0))
    a, b = tl.cos(phase), tl.sin(phase)
    if not UNIT:
        cos, sin = a, b
        u = tl.load(pairs, mask=mask, other=0.0).to(phase.dtype)
        v = tl.load(pairs + F, mask=mask, other=0.0).to(phase.dtype)
        if POSE and AT == 0:
            u += tl.load(pose, mask=mask, other=0.0).to(phase.dtype)
            v += tl.load(pose + F, mask=mask, other=0.0).to(phase.dtype)
        a, b = u * cos - v * sin, u * sin + v * cos
    tl.store(out + AT, a.to(out.dtype.element_ty), mask=mask)
    tl.store(out + AT + F, b.to(out.dtype.element_ty), mask=mask)
    for c in range(START, C, FP):
        rest = here & (f < C - c)
        as_is = tl.load(x + c, mask=rest, other=0.0)
        if POSE:
            as_is = as_is.to(phase.dtype) + tl.load(pose + c, mask=rest, other=0.0).to(phase.dtype)
        tl.store(out + c, as_is.to(out.dtype.element_ty), mask=rest)
    for c in range(C + 2 * F - START, WIDTH, FP):
        tl.store(out + c, tl.zeros((BR, FP), out.dtype.element_ty), mask=here & (f < WIDTH - c))


@triton.jit
def rotate_back(
    pairs, pose, angle, grad, grad_pairs, grad_angle, rows, apart, count, each, m1, m2, m3, m4, n1, n2, n3, n4,
    a0, a1, a2, a3, a4, w0, w1, w2, w3, w4, p0, p1, p2, p3, p4, g0, g1, g2, g3, g4, h0, h1, h2, h3, h4,
    F: tl.constexpr, FP: tl.constexpr, C: tl.constexpr, AT: tl.constexpr, UNIT: tl.constexpr, POSE: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The gradients of pairs, and those of angles: sums over a stretch of all rows that an angle rotates."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    first = tl.program_id(1).to(tl.int64) * each
    f = tl.arange(0, FP)[None, :]
    here = (r < rows)[:, None]
    pairs += _at(r, m1, m2, m3, m4, w0, w1, w2, w3, w4)[:, None] + f
    pose += _at(r, m1, m2, m3, m4, p0, p1, p2, p3, p4)[:, None] + f
    grad += _at(r, m1, m2, m3, m4, g0, g1, g2, g3, g4)[:, None] + f
    grad_pairs += _at(r, m1, m2, m3, m4, h0, h1, h2, h3, h4)[:, None] + f
    mask = here & (f < F)
    of_angle = _at(r, m1, m2, m3, m4, a0, a1, a2, a3, a4)[:, None] + f
    phase = precise(tl.load(angle + of_angle, mask=mask, other=0.0))
    cos, sin = tl.cos(phase), tl.sin(phase)
    total = tl.zeros((BR, FP), phase.dtype)
    for i in range(first, tl.minimum(first + each, count)):
        of_grad = grad + _at(i, n1, n2, n3, n4, g0, g1, g2, g3, g4)
        u = tl.load(of_grad + AT, mask=mask, other=0.0).to(phase.dtype)
        v = tl.load(of_grad + AT + F, mask=mask, other=0.0).to(phase.dtype)
        # The gradient, turned back: of a small further turn a grows by -b and b by a.
        u, v = u * cos + v * sin, v * cos - u * sin
        if UNIT:
            total += v
        else:
            of_pairs = pairs + _at(i, n1, n2, n3, n4, w0, w1, w2, w3, w4)
            a = tl.load(of_pairs, mask=mask, other=0.0).to(phase.dtype)
            b = tl.load(of_pairs + F, mask=mask, other=0.0).to(phase.dtype)
            if POSE:
                of_pose = pose + _at(i, n1, n2, n3, n4, p0, p1, p2, p3, p4)
                a += tl.load(of_pose, mask=mask, other=0.0).to(phase.dtype)
                b += tl.load(of_pose + F, mask=mask, other=0.0).to(phase.dtype)
            total += v * a - u * b
            to = grad_pairs + _at(i, n1, n2, n3, n4, h0, h1, h2, h3, h4)
            tl.store(to, u.to(to.dtype.element_ty), mask=mask)
            tl.store(to + F, v.to(to.dtype.element_ty), mask=mask)
            if AT == 0:
                for c in range(2 * F, C, FP):
                    rest = here & (f < C - c)
                    tl.store(to + c, tl.load(of_grad + c, mask=rest, other=0.0).to(to.dtype.element_ty), mask=rest)
    grad_angle += tl.program_id(1).to(tl.int64) * apart + of_angle
    tl.store(grad_angle, total.to(grad_angle.dtype.element_ty), mask=mask)
