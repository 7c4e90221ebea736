"""Vectors in kernels that Triton compiles: tuples of their channels, with every W-th channel in a thread."""

# ruff: noqa: RUF005  (the language of Triton has no stars in tuples)

import triton
import triton.language as tl


@triton.jit
def precise(x):
    """Numbers in at least single precision."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def dot(a, b, W: tl.constexpr = 1):
    """Products, ``(..., 1, lanes)``: in every pass the channels are added up in the same order."""
    s = a[0] * b[0]
    for i in tl.static_range(1, len(a)):
        s += a[i] * b[i]
    if W > 1:
        s = tl.sum(s, axis=1, keep_dims=True)
    return s


@triton.jit
def add(total, factor, x):
    """The sums with multiples of vectors."""
    v = ()
    for i in tl.static_range(len(total)):
        v = v + (total[i] + factor * x[i],)
    return v


@triton.jit
def scaled(x, factor):
    """Multiples of vectors."""
    v = ()
    for i in tl.static_range(len(x)):
        v = v + (x[i] * factor,)
    return v
