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


def network_tables(
    points: Tensor,
    inverse: Tensor,
    network: tuple[Tensor, Tensor, Tensor],
    poses: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""The function :math:`W\,\mathrm{SiLU}(A h^{-1}\delta + b)` as all poses h see all points, ``(M, |H|, R, C)``.

    Args:
        points: ``(R, d)``.
        inverse: ``(|H|, d, d)``, the matrix of the inverse of every h.
        network: A, ``(F, d)``, b, ``(F,)``, and W, ``(M, C, F)``.
        poses: a table ``(M, n, C)``.
        index: rows of it, ``(|H|, P)``, which are the second result, ``(M, |H|, P, C)``; None without them.
    """
    chosen = None if poses is None or index is None else index.flatten()
    call = _Arguments(*network, poses, points, inverse, chosen)
    alike = all(t is None or t.dtype == points.dtype for t in call[:-1])
    small = 0 < _rows(call) * network[2][..., 0].numel() <= MOST
    by_kernel = has_kernels(points.device) and alike and small and not (points.requires_grad or inverse.requires_grad)
    if needs_operators(*call) or not by_kernel:
        table, rows = _plainly(call)
    else:
        layer, shift, readout = (t.contiguous() for t in network)
        table, rows = _operator(_Arguments(layer, shift, readout, poses, points.contiguous(), inverse, chosen))
    return table, None if chosen is None or index is None else rows.unflatten(1, index.shape)


class _Arguments(NamedTuple):
    layer: Tensor
    shift: Tensor
    readout: Tensor
    poses: Tensor | None
    points: Tensor
    inverse: Tensor
    chosen: Tensor | None


def _plainly(call: _Arguments) -> tuple[Tensor, Tensor]:
    seen = call.points @ call.inverse.mT
    values = F.linear(F.silu(F.linear(seen, call.layer, call.shift)), call.readout.flatten(0, 1))
    return values.unflatten(2, call.readout.shape[:2]).movedim(2, 0), _chosen_rows(call)


def _chosen_rows(call: _Arguments) -> Tensor:
    if call.poses is None or call.chosen is None:
        return call.points.new_empty(0)
    return call.poses.index_select(1, call.chosen)


def _empty(call: _Arguments) -> tuple[Tensor, Tensor]:
    heads, channels, _ = call.readout.shape
    return call.points.new_empty(heads, len(call.inverse), len(call.points), channels), _chosen_rows(call)


def _forward_pass(call: _Arguments) -> tuple[Tensor, Tensor]:
    out, chosen = _empty(call)
    _launch("table", call, -(-_rows(call) // _constants(call)["BR"]), out)
    return out, chosen


def _backward_pass(
    call: _Arguments, grad: Tensor, _: Tensor | None, of_chosen: Tensor, ___: list[bool]
) -> list[Tensor | None]:
    grads = [torch.empty_like(t) for t in call[:3]]
    _launch("table_back", call, len(call.layer), grad.contiguous(), *grads)
    if call.poses is None or call.chosen is None:
        return [*grads, None]
    return [*grads, _added(call.poses, call.chosen, of_chosen)]


def _rows(call: _Arguments) -> int:
    return len(call.points) * len(call.inverse)


def _launch(name: str, call: _Arguments, programs: int, *tensors: Tensor) -> None:
    with on_device(call.points.device):
        getattr(kernels("tables_kernels"), name)[(programs,)](
            *(call.points, call.inverse, call.layer, call.shift, call.readout, *tensors, _rows(call)),
            *(len(call.points), *call.inverse.stride()),
            **_constants(call),
        )


def _constants(call: _Arguments) -> dict[str, int]:
    """The constants that both kernels are compiled for."""
    (heads, channels, functions), dim = call.readout.shape, call.points.shape[1]
    columns = power_of_two(heads * channels)
    return {
        **{"D": dim, "DP": power_of_two(dim), "F": functions, "MC": heads * channels, "OP": columns, "C": channels},
        "BR": max(1, min(_ROWS, _TILE // columns)),
    }


_operator = Operator(
    "network_tables", _Arguments, 4, Passes(_forward_pass, _backward_pass, _empty, _plainly, pair=True)
)


def select_rows(tables: Tensor, index: Tensor) -> Tensor:
    """The rows of every table that an index names.

    On CUDA gradients are added up in the order of the index, and not atomically.

    Args:
        tables: ``(M, n, C)``.
        index: ``(count,)``.

    Example:
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
    return [_added(call.tables, call.chosen, grad)]


def _added(tables: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The gradients of tables ``(M, n, C)``, of those of the rows ``(M, count, C)`` that an index names."""
    out, grad = tables.new_empty(tables.shape), grad.contiguous()
    heads, rows, channels = tables.shape
    columns = min(64, power_of_two(channels))
    with on_device(out.device):
        kernels("tables_kernels").add_rows[rows, heads, -(-channels // columns)](
            *(grad, index, out, len(index), rows, channels), BI=32, BC=columns
        )
    return out


_selection = Operator("select_rows", _Selection, 1, Passes(_select_forward, _select_backward, _select_forward, _select))
