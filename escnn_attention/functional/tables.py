"""Tables of a network of the offset, and of poses: on CUDA by one kernel that Triton compiles, in every pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import Operator, Passes, needs_operators
from escnn_attention.functional.launch import has_kernels, kernels, on_device, power_of_two

MOST = 2**17
"""The most numbers of a table that the kernels make: of the gradients of a hidden unit one program sums all."""

_ROWS, _TILE = 64, 2**12


def network_table(offsets: Tensor, layer: Tensor, shift: Tensor, readout: Tensor) -> Tensor:
    r"""The function :math:`W\,\mathrm{SiLU}(A\delta + b)` at all offsets, ``(M, R, C)``.

    Args:
        offsets: ``(R, d)``.
        layer, shift: A, ``(F, d)``, and b, ``(F,)``.
        readout: W, ``(M, C, F)``.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.tables import network_table
        >>> network_table(torch.zeros(9, 2), torch.randn(16, 2), torch.zeros(16), torch.randn(3, 4, 16)).abs().max()
        tensor(0.)
    """
    call = _Arguments(layer, shift, readout, offsets)
    alike = all(t.dtype == offsets.dtype for t in call)
    if needs_operators(*call) or not has_kernels(offsets.device) or offsets.requires_grad or not alike:
        return _plainly(call)
    small = len(offsets) > 0 and len(offsets) * readout[..., 0].numel() <= MOST
    return _operator(_Arguments(*(t.contiguous() for t in call))) if small else _plainly(call)


class _Arguments(NamedTuple):
    layer: Tensor
    shift: Tensor
    readout: Tensor
    offsets: Tensor


def _plainly(call: _Arguments) -> Tensor:
    values = F.linear(F.silu(F.linear(call.offsets, call.layer, call.shift)), call.readout.flatten(0, 1))
    return values.unflatten(1, call.readout.shape[:2]).transpose(0, 1)


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    heads, channels, _ = call.readout.shape
    return call.offsets.new_empty(heads, len(call.offsets), channels), call.offsets.new_empty(0)


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    out, nothing = _empty(call)
    _launch("table", call, -(-len(call.offsets) // _constants(call)["BR"]), out)
    return out, nothing


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, __: Tensor, ___: list[bool]
) -> list[Tensor | None]:
    grads = [torch.empty_like(t) for t in call[:3]]
    _launch("table_back", call, len(call.layer), grad.contiguous(), *grads)
    return [*grads]


def _launch(name: str, call: _Arguments, programs: int, *tensors: Tensor) -> None:
    with on_device(call.offsets.device):
        getattr(kernels("tables_kernels"), name)[(programs,)](
            *(call.offsets, call.layer, call.shift, call.readout, *tensors, len(call.offsets)), **_constants(call)
        )


def _constants(call: _Arguments) -> dict[str, int]:
    """The constants that both kernels are compiled for."""
    (heads, channels, functions), dim = call.readout.shape, call.offsets.shape[1]
    columns = power_of_two(heads * channels)
    return {
        **{"D": dim, "DP": power_of_two(dim), "F": functions, "MC": heads * channels, "OP": columns, "C": channels},
        "BR": max(1, min(_ROWS, _TILE // columns)),
    }


_operator = Operator("network_table", _Arguments, 3, Passes(_forward_pass, _backward_pass, _empty, _plainly))


def select_rows(tables: Tensor, index: Tensor) -> Tensor:
    """The rows of every table that an index names.

    On CUDA gradients are added up in the order of the index, and not atomically.

    Args:
        tables: ``(M, n, C)``.
        index: ``(count,)``.

    Example:
        >>> import torch
        >>> from escnn_attention.functional.tables import select_rows
        >>> select_rows(torch.tensor([[[1.0], [2.0]]]), torch.tensor([1, 1, 0])).flatten()
        tensor([2., 2., 1.])
    """
    call = _Selection(tables, index)
    return _select(call) if needs_operators(tables) or not has_kernels(tables.device) else _selection(call)


class _Selection(NamedTuple):
    tables: Tensor
    chosen: Tensor


def _select(call: _Selection) -> Tensor:
    return call.tables.index_select(1, call.chosen)


def _select_forward(call: _Selection) -> tuple[Tensor, Tensor]:
    return _select(call), call.tables.new_empty(0)


def _select_backward(
    call: _Selection, grad: Tensor, _: Tensor | None, __: Tensor, ___: list[bool]
) -> list[Tensor | None]:
    out, grad = call.tables.new_empty(call.tables.shape), grad.contiguous()
    heads, rows, channels = call.tables.shape
    columns = min(64, power_of_two(channels))
    with on_device(out.device):
        kernels("tables_kernels").add_rows[rows, heads, -(-channels // columns)](
            *(grad, call.chosen, out, len(call.chosen), rows, channels), BI=32, BC=columns
        )
    return [out]


_selection = Operator("select_rows", _Selection, 1, Passes(_select_forward, _select_backward, _select_forward, _select))
