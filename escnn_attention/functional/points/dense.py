"""Fused attention between all points of a cloud: clouds of one size are images of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from escnn_attention.functional.grid.call import Heads
from escnn_attention.functional.grid.dense import fused, why_no_kernel
from escnn_attention.functional.grid.fold import fold
from escnn_attention.functional.points.call import MANY, PointCall
from escnn_attention.functional.points.portable import in_place, rows_of
from escnn_attention.geometry.neighbours import Chunk

# To how many times its size a cloud is filled up, to go with others. A CPU has no use for it; on a GPU every operation
# that is left out counts.
_SLACK = {"cpu": 1.0, "cuda": 1.5}


def why_unsupported(call: PointCall) -> str | None:
    """Why a call is not softmax attention of all points of clouds to each other, by an encoding that factorises."""
    return why_no_product(call) or why_no_kernel(call.q, call.dropout)


def why_no_product(call: PointCall) -> str | None:
    """Why the scores of a call are not those of all points of a cloud, products of what queries and keys know."""
    if call.values is not None or call.edges is not None:
        return "it is for attention with an encoding, and for edges without features"
    if reason := call.bias.why_no_table():
        return reason
    if not call.query_points.whole:
        return "it is for the offsets between all points of a cloud"
    return None if call.bias.factorises else "it needs an encoding that factorises: Fourier, rotary, absolute, none"


def why_not_first(call: PointCall) -> str | None:
    """Why another backend is better for a call that fused attention could serve.

    Raises:
        RuntimeError: the backward pass of a reentrant checkpoint calls this, and the first pass, without gradients, had
            another answer and dropped other keys.
    """
    points = call.query_points
    if not points.whole:
        return "neighbours are fewer than all points"
    if not points.number or (call.q.device.type == "cpu" and not call.has_large_clouds):
        return f"clouds have fewer than {MANY} points"
    if not call.bias.factorises:
        return "the encoding does not factorise"
    # A gradient by coordinates is a force, to be differentiated once more, for which fused attention holds every score.
    # With dropout the answer is the same without gradients, for the first pass of a reentrant checkpoint.
    coords = points.coordinates
    if not coords.requires_grad or not (torch.is_grad_enabled() or call.dropout):
        return None
    # Coordinates that the checkpoint is given are leaves in its backward pass, and required a gradient before.
    if call.dropout and not coords.is_leaf and why_unsupported(call) is None and _in_reentrant_checkpoint():
        raise RuntimeError(
            "checkpoint: got use_reentrant=True, dropout, and coordinates that require a gradient and are computed "
            "within the checkpoint, whose first pass dropped other keys; needed use_reentrant=False, or a layer with "
            "backend='neighbours'"
        )
    return "coordinates require a gradient"


def _in_reentrant_checkpoint() -> bool:
    """Whether this is called in the backward pass of a checkpoint with ``use_reentrant=True``."""
    node = None if torch.compiler.is_compiling() else torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def attention(call: PointCall) -> Tensor:
    """Fused attention in all clouds: see :func:`escnn_attention.functional.attention`."""
    return in_clouds(call, fused)


def in_clouds(call: PointCall, attend: Callable[[Heads, Tensor], Tensor], groups: list[Chunk] | None = None) -> Tensor:
    """Attention of all clouds, those of one size at once, as images: ``(M, 1, N, H, C)``.

    Args:
        call: of whole clouds.
        attend: the attention of images, folded, with points at ``(B · n, d)``: ``(M, B, n, H, C)``.
        groups: the clouds that are taken at once; None for those of about one size.
    """
    if groups is None:
        groups = call.query_points.clouds().alike(_SLACK.get(call.q.device.type, 1.0))
    # Without anything that tells them apart, all output poses are alike.
    out = [_attend(call, some, attend).expand(-1, -1, -1, call.num_poses, -1) for some in groups]
    rows = [y.permute(1, 2, 0, 3, 4).flatten(0, 1) for y in out]
    return in_place(rows, groups, call)


def _attend(call: PointCall, some: Chunk, attend: Callable[[Heads, Tensor], Tensor]) -> Tensor:
    """The attention of clouds to themselves, each of which is an image: ``(M, B, n, H, C)``."""
    # The first point of a cloud fills up, where it is near the others and counts nothing as a key.
    index = torch.where(some.keys < 0, some.keys[:, :1].clamp(min=0), some.keys) if some.padded else some.keys
    take = partial(rows_of, index=index, some=some._replace(padded=False))
    points = take(call.query_points.coordinates)
    bias = call.bias.table(points.flatten(0, 1))
    points = (points - points.mean(1, keepdim=True)).flatten(0, 1)  # small numbers, where clouds are far away
    measure = call.bias.log_measure
    if measure is not None:
        measure = take(measure).mT if len(measure) > 1 else measure.T
    if some.padded:
        measure = (call.q.new_zeros(1, 1) if measure is None else measure).masked_fill(
            (some.keys < 0).unsqueeze(1), -torch.inf
        )
    q, k, v = (take(t.squeeze(1).transpose(0, 1)).permute(2, 0, 1, 3, 4) for t in (call.q, call.k, call.v))
    bias = replace(bias, log_measure=measure)
    modes: dict[str, Any] = {"query": call.query, "keys": call.keys, "normalization": call.normalization}
    folded, unfold = fold(Heads(q, k, v, bias, dropout=call.dropout, **modes), points)
    out = attend(folded, points)
    return out if unfold is None else unfold(out)
