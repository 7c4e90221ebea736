"""Layer normalisation at positions with one scale and one shift of each field: on CUDA by kernels of Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional import launch
from escnn_attention.functional.autograd import (
    PRECISE,
    Operator,
    Passes,
    is_followed,
    is_transformed,
    needs_operators,
)

_NUMBERS, _PROGRAMS = 2**12, 512
"""How many numbers a program has at once, and how many programs of the backward pass there are at most."""


def has_field_norm(x: Tensor) -> bool:
    """Whether kernels normalise features ``(B, C, *space)``: compilers fuse PyTorch's operations by themselves."""
    if not launch.has_kernels(x.device) or torch.compiler.is_compiling() or needs_operators(x):
        return False
    return x.shape[1] <= _NUMBERS and x.numel() > 0


def field_norm(x: Tensor, weight: Tensor, bias: Tensor | None, invariants: Tensor, eps: float, *, rms: bool) -> Tensor:
    r"""Features ``(B, C, *space)`` normalised over their channels, at each position by itself.

    .. math:: \frac{x_c - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}}\, w_f + v_c b_f

    Args:
        x: of fields f of one size.
        weight, bias: of the fields, ``(F,)``.
        invariants: ``(C, F)``, v of each channel in the column of its field.
        eps: added to the variance.
        rms: whether the mean is not subtracted.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.norms import field_norm
        >>> field_norm(torch.tensor([[[1.0], [3.0]]]), torch.ones(1), None, torch.ones(2, 1), 0.0, rms=False).flatten()
        tensor([-1.,  1.])
    """
    call = _Arguments(x, weight, bias, invariants, eps, rms)
    return _operator(call) if has_field_norm(x) else _plainly(call)


def layer_norm(rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation of ``(..., C)`` over its last axis, with derivatives of every order.

    The third derivatives of ``torch.nn.functional.layer_norm`` are wrong, and so are the second ones in forward mode:
    they take the statistics for constants (https://github.com/pytorch/pytorch/issues/175754).

    Args:
        rows: what is normalised.
        weight, bias: ``(C,)``, in the precision of the rows; None for 1 and 0.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.norms import layer_norm
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), None, None, 0.0)
        tensor([[-1.,  1.]])
    """
    if is_transformed(rows, weight, bias):
        y, _ = _standardised(rows, eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    if not torch.is_grad_enabled() or is_followed(rows, weight, bias):
        return F.layer_norm(rows, rows.shape[-1:], weight, bias, eps)
    out: Tensor = _LayerNorm.apply(rows, weight, bias, eps)
    return out


def _standardised(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows with mean 0 and variance 1, and what the centred ones are multiplied by."""
    centred = rows - rows.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * scale, scale


class _LayerNorm(torch.autograd.Function):
    """PyTorch's layer norm, whose gradients have gradients by operations that autograd looks through."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, scale = torch.native_layer_norm(rows, rows.shape[-1:], weight, bias, eps)
        ctx.eps = eps
        ctx.save_for_backward(rows, weight, bias, mean, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, mean, scale = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled():
            backward = torch.ops.aten.native_layer_norm_backward.default
            return (*backward(grad, rows, rows.shape[-1:], mean, scale, weight, bias, needed), None)
        y, scale = _standardised(rows, ctx.eps)
        of_y = grad if weight is None else grad * weight
        of_rows = scale * (of_y - of_y.mean(-1, keepdim=True) - y * (of_y * y).mean(-1, keepdim=True))
        axes = tuple(range(grad.dim() - 1))
        of_weight = (grad * y).sum(axes) if needed[1] else None
        return of_rows if needed[0] else None, of_weight, grad.sum(axes) if needed[2] else None, None


class _Arguments(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    invariants: Tensor
    eps: float
    rms: bool


def _plainly(call: _Arguments) -> Tensor:
    rows = call.x.movedim(1, -1).to(PRECISE[call.x.dtype])
    channels = rows.shape[-1:]
    weight = call.weight.to(rows.dtype).repeat_interleave(channels[0] // len(call.weight))
    if call.rms:
        y = F.rms_norm(rows, channels, weight, call.eps)
    else:
        bias = None if call.bias is None else (call.invariants @ call.bias.to(call.invariants)).to(rows.dtype)
        y = layer_norm(rows, weight, bias, call.eps)
    return y.movedim(-1, 1).to(call.x.dtype)


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    x, precise = _flat(call.x), PRECISE[call.x.dtype]
    return _like(call.x, torch.empty_like(x)), x.new_empty(2, x.numel() // x.shape[1], dtype=precise)


def _flat(x: Tensor) -> Tensor:
    """Features ``(B, C, N)`` of N positions, of those without space those of one image."""
    return x.flatten(2) if x.dim() > 2 else x.T.unsqueeze(0)


def _like(x: Tensor, flat: Tensor) -> Tensor:
    """The inverse of :func:`_flat`, of the shape of ``x``."""
    return flat.view(x.shape) if x.dim() > 2 else flat[0].T


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    out, kept = _empty(call)
    x, to = _flat(call.x), _flat(out)
    constants, programs = _constants(call)
    bias = call.weight if call.bias is None else call.bias
    sizes = kept.shape[1], x.shape[2], *_strides(x, to)
    constants |= {"BIAS": call.bias is not None, "EPS": call.eps}
    _launch("norm", programs, constants, x, call.weight, bias, call.invariants, to, kept, *sizes)
    return out, kept


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, kept: Tensor, __: list[bool]
) -> list[Tensor | None]:
    x, grad = _flat(call.x), _flat(grad)
    grad_x = torch.empty_like(x)
    constants, tiles = _constants(call)
    programs = min(tiles, _PROGRAMS)
    sums = kept.new_empty(2, programs, x.shape[1])
    sizes = kept.shape[1], tiles, x.shape[2], *_strides(x, grad, grad_x)
    _launch("norm_back", programs, constants, x, call.weight, grad, kept, grad_x, sums, *sizes)
    grads = [None if t is None else torch.empty_like(t) for t in call[1:3]]
    size = constants["S"]
    of_fields = {"C": x.shape[1], "S": size, "SP": launch.power_of_two(size), "BP": 32, "BIAS": call.bias is not None}
    given = [sums if t is None else t for t in grads]
    _launch("norm_sums", len(call.weight), of_fields, sums, call.invariants, *given, programs)
    return [_like(call.x, grad_x), *grads]


def _launch(name: str, programs: int, constants: dict[str, Any], *arguments: Any) -> None:
    with launch.on_device(arguments[0].device):
        getattr(launch.kernels("norms_kernels"), name)[(programs,)](
            *arguments, **constants, num_warps=8 if name != "norm_sums" else 4
        )


def _strides(*tensors: Tensor) -> list[int]:
    """The steps of images, positions and channels."""
    return [t.stride(axis) for t in tensors for axis in (0, 2, 1)]


def _constants(call: _Arguments) -> tuple[dict[str, Any], int]:
    """The constants that kernels of rows are compiled for, and how many tiles there are."""
    images, channels, positions = _flat(call.x).shape
    padded = launch.power_of_two(channels)
    at_once = max(1, _NUMBERS // padded)
    size = channels // len(call.weight)
    found = {"C": channels, "CP": padded, "S": size, "RMS": call.rms, "BR": at_once}
    return found, images * -(-positions // at_once)


_operator = Operator("field_norm", _Arguments, 3, Passes(_forward_pass, _backward_pass, _empty, _plainly))
