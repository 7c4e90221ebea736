"""Rotations of pairs of channels: on CUDA by one kernel that Triton compiles, in every pass."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.autograd import Operator, Passes, needs_operators
from escnn_attention.functional.grid.triton import why_not_run


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of channels, the first F with the second F of ``x``, by ``angle`` ``(..., F)``.

    Example:
        >>> import math
        >>> import torch
        >>> from escnn_attention.functional.rotate import rotate
        >>> rotate(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([math.pi / 2])).round(decimals=4)
        tensor([-0., 1., 5.])
    """
    # Gradients of angles of more than three axes on each side: those of attention.
    if needs_operators(x, angle) or x.dim() != 6 or angle.dim() != 6 or not has_kernel(x) or x.stride(-1) != 1:
        return _plainly(_Arguments(x, angle))
    return _operator(_Arguments(x, angle.contiguous()))


def has_kernel(x: Tensor) -> bool:
    """Whether one kernel rotates on the device of a tensor. An interpreter would take far longer than PyTorch."""
    return x.is_cuda and why_not_run("cuda") is None


class _Arguments(NamedTuple):
    """Tensors to rotate, and their angles: six axes each, the first five of which broadcast."""

    x: Tensor
    angle: Tensor

    @property
    def shape(self) -> torch.Size:
        """The axes of the result."""
        return torch.Size((*torch.broadcast_shapes(self.x.shape[:-1], self.angle.shape[:-1]), self.x.shape[-1]))


def _plainly(call: _Arguments) -> Tensor:
    x, angle = call
    pairs = angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    a, b = a * cos - b * sin, a * sin + b * cos
    # Channels that are left stay as they are, for every pose and position that the angle brings in.
    return torch.cat([a, b, rest.expand(*a.shape[:-1], -1)], dim=-1)


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    """Room for the result: heads and poses side by side, where there is one vector of each."""
    shape = call.shape
    if shape[4] > 1:
        out = call.x.new_empty(shape)
    else:
        m, h, b, n, j, c = shape
        out = call.x.new_empty(b, n, m, h, j, c).permute(2, 3, 0, 1, 4, 5)
    return out, call.x.new_empty(0)


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    out, nothing = _empty(call)
    _launch("rotate", call, out)
    return out, nothing


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, __: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_x, _ = _empty(call)
    grad_angle = call.angle.new_empty(*call.shape[:-1], call.angle.shape[-1])
    _launch("rotate_back", call, grad, grad_x, grad_angle)
    return [grad_x.sum_to_size(call.x.shape), grad_angle.sum_to_size(call.angle.shape)]


def _launch(name: str, call: _Arguments, *tensors: Tensor) -> None:
    shape, pairs = call.shape, call.angle.shape[-1]
    rows, tile = shape[:-1].numel(), max(1, 1024 // _power(pairs))
    strides = [s for t in (call.x.expand(shape), call.angle.expand(*shape[:-1], -1), *tensors) for s in t.stride()[:-1]]
    getattr(_kernels(), name)[(-(-rows // tile),)](
        call.x, call.angle, *tensors, rows, *shape[1:5], *strides, F=pairs, FP=_power(pairs), C=shape[-1], BR=tile
    )


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("escnn_attention.functional.rotate_kernels")


_operator = Operator("rotate", _Arguments, 2, Passes(_forward_pass, _backward_pass, _empty, _plainly))
