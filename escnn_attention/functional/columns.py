"""The gradient of weights whose columns poses see in orders of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional import launch
from escnn_attention.functional.autograd import Operator, Passes


def add_columns(of_poses: Tensor, back: Tensor) -> Tensor:
    """What the poses have, added up in the columns ``(F, n)`` that they saw.

    It is the transpose of :func:`~escnn_attention.functional.matmul.gather_columns`, with sums over the poses in their
    order, the same on every device.
    """
    call = _Added(of_poses, back)
    by_kernel = of_poses.device.type in launch.DEVICES and launch.has_kernels(of_poses.device)
    return _sum_columns(call) if by_kernel and not torch.compiler.is_compiling() else _added(call)


class _Added(NamedTuple):
    of_poses: Tensor
    back: Tensor


def _added(call: _Added) -> Tensor:
    several = len(call.of_poses) > 1
    places = (call.back.unsqueeze(1) if several else call.back).expand_as(call.of_poses)
    return call.of_poses.gather(-1, places).sum(1 if several else 2).flatten(0, 1)


def _room_for_sums(call: _Added) -> tuple[Tensor, Tensor]:
    of_poses = call.of_poses
    fields = of_poses.shape[:3].numel() // len(call.back)
    return of_poses.new_empty(fields, of_poses.shape[-1]), of_poses.new_empty(0)


def _added_by_kernel(call: _Added) -> tuple[Tensor, Tensor]:
    of_poses, back = call if len(call.of_poses) > 1 else (call.of_poses.transpose(1, 2), call.back)
    of_poses = of_poses if of_poses.stride(-1) == 1 else of_poses.contiguous()
    _, poses, fields, columns = of_poses.shape
    out, nothing = _room_for_sums(call)
    grid = (-(-len(out) // 4), -(-columns // 64))
    with launch.on_device(out.device):
        launch.kernels("tables_kernels").add_columns[grid](
            *(of_poses, back, out, len(out), columns, fields, poses, *of_poses.stride()[:3]), BR=4, BC=64
        )
    return out, nothing


def _gather_again(call: _Added, grad: Tensor, *_: Any) -> list[Tensor | None]:
    groups, seen = len(call.of_poses), call.back.argsort(1)
    of_poses = grad.index_select(1, seen.flatten()).unflatten(1, seen.shape)
    return [of_poses.unsqueeze(0) if groups == 1 else of_poses.unflatten(0, (groups, -1)).transpose(1, 2)]


_sum_columns = Operator("add_columns", _Added, 1, Passes(_added_by_kernel, _gather_again, _room_for_sums, _added))
