"""The loops of :mod:`~escnn_attention.functional.norms`, for Triton to compile.

A row is a position, with all its channels; a tile has BR rows of one image. Images, positions and channels of every
tensor have steps of their own.
"""

import triton
import triton.language as tl

from escnn_attention.functional.vectors_kernels import precise


@triton.jit
def _place(t, N, BR: tl.constexpr):
    """The image of a tile, its positions, and the numbers of these rows."""
    blocks = tl.cdiv(N, BR)
    p = t % blocks * BR + tl.arange(0, BR)[:, None]
    return (t // blocks).to(tl.int64), p, t // blocks * N + p


@triton.jit
def norm(
    x, weight, bias, invariants, out, kept, rows, N,
    x_image, x_position, x_channel, out_image, out_position, out_channel,
    C: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, EPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Rows without their mean, divided by their deviation; both are kept."""
    (b, p, r), c = _place(tl.program_id(0), N, BR), tl.arange(0, CP)[None, :]
    here = (p < N) & (c < C)
    y = precise(tl.load(x + b * x_image + p * x_position + c * x_channel, mask=here, other=0.0))
    mean = tl.sum(y, axis=1, keep_dims=True) * 0.0
    if not RMS:
        mean = tl.sum(y, axis=1, keep_dims=True) / C
    y = tl.where(here, y - mean, 0.0)
    gain = 1 / tl.sqrt(tl.sum(y * y, axis=1, keep_dims=True) / C + EPS)
    y = y * gain * tl.load(weight + c // S, mask=c < C, other=0.0).to(y.dtype)
    if BIAS:
        shift = tl.load(bias + c // S, mask=c < C, other=0.0).to(y.dtype)
        y += shift * tl.load(invariants + c * (C // S) + c // S, mask=c < C, other=0.0).to(y.dtype)
    tl.store(out + b * out_image + p * out_position + c * out_channel, y.to(out.dtype.element_ty), mask=here)
    tl.store(kept + r, mean, mask=p < N)
    tl.store(kept + rows + r, gain, mask=p < N)


@triton.jit
def norm_back(
    x, weight, grad, kept, grad_x, sums, rows, tiles, N, x_image, x_position, x_channel,
    grad_image, grad_position, grad_channel, of_image, of_position, of_channel,
    C: tl.constexpr, CP: tl.constexpr, S: tl.constexpr, RMS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradients of rows, and of every channel the sums over the rows of a program, ``(2, programs, C)``."""
    c = tl.arange(0, CP)[None, :]
    factor = precise(tl.load(weight + c // S, mask=c < C, other=0.0))
    of_gain, of_shift = tl.zeros((BR, CP), factor.dtype), tl.zeros((BR, CP), factor.dtype)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        b, p, r = _place(t, N, BR)
        here = (p < N) & (c < C)
        mean = tl.load(kept + r, mask=p < N, other=0.0)
        gain = tl.load(kept + rows + r, mask=p < N, other=0.0)
        y = precise(tl.load(x + b * x_image + p * x_position + c * x_channel, mask=here, other=0.0))
        g = precise(tl.load(grad + b * grad_image + p * grad_position + c * grad_channel, mask=here, other=0.0))
        y = tl.where(here, (y - mean) * gain, 0.0)
        of_gain += g * y
        of_shift += g
        g = g * factor
        change = g - y * (tl.sum(g * y, axis=1, keep_dims=True) / C)
        if not RMS:
            change -= tl.sum(g, axis=1, keep_dims=True) / C
        to = grad_x + b * of_image + p * of_position + c * of_channel
        tl.store(to, (change * gain).to(grad_x.dtype.element_ty), mask=here)
    c, sums = tl.arange(0, CP), sums + tl.program_id(0) * C
    tl.store(sums + c, tl.sum(of_gain, axis=0), mask=c < C)
    tl.store(sums + tl.num_programs(0) * C + c, tl.sum(of_shift, axis=0), mask=c < C)


@triton.jit
def norm_sums(
    sums, invariants, grad_weight, grad_bias, programs,
    C: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BIAS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of the scale and the shift of a field, of sums over the rows of every program."""
    c = tl.arange(0, SP)[None, :]
    field, channel = tl.program_id(0), tl.program_id(0) * S + c
    of_gain = tl.zeros((BP, SP), sums.dtype.element_ty)
    of_shift = of_gain
    for first in range(0, programs, BP):
        p = first + tl.arange(0, BP)[:, None]
        here = (p < programs) & (c < S)
        of_gain += tl.load(sums + p * C + channel, mask=here, other=0.0)
        if BIAS:
            of_shift += tl.load(sums + (programs + p) * C + channel, mask=here, other=0.0)
    total = tl.sum(tl.sum(of_gain, axis=1), axis=0)
    tl.store(grad_weight + field, total.to(grad_weight.dtype.element_ty))
    if BIAS:
        of_shift *= tl.load(invariants + channel * (C // S) + field, mask=c < S, other=0.0).to(of_shift.dtype)
        total = tl.sum(tl.sum(of_shift, axis=1), axis=0)
        tl.store(grad_bias + field, total.to(grad_bias.dtype.element_ty))
