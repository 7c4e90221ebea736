"""Attention between all points of a cloud by the backends of grids: clouds of one size are images of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from escnn_attention.functional.grid import dense as fused
from escnn_attention.functional.grid import reference as formula
from escnn_attention.functional.grid.call import Call, PositionalBias
from escnn_attention.functional.grid.fold import fold
from escnn_attention.functional.points.bias import PairBias
from escnn_attention.functional.points.portable import RowsOf, in_place
from escnn_attention.geometry.neighbours import Chunk
from escnn_attention.geometry.points import Points

__all__ = ["dense", "reference", "why_not_dense", "why_not_first", "why_unsupported"]

# With so many points a cloud, on average, fused attention is faster on a CPU.
_MANY = 64

# To how many times its size a cloud is filled up, to go with others. A CPU has no use for it; on a GPU every operation
# that is left out counts.
_SLACK = {"cpu": 1.0, "cuda": 1.5}


def why_unsupported(call: Call) -> str | None:
    """Why a call is not that of all points of clouds to each other."""
    assert isinstance(call.bias, PairBias)
    if call.values is not None or call.edges is not None or call.normalization != "softmax":
        return "it is for softmax attention with an encoding, and for edges without features"
    if reason := call.bias.why_no_table():
        return reason
    if not isinstance(call.positions, Points) or not call.positions.whole:
        return "it is for the offsets between all points of a cloud"
    return None


def why_not_dense(call: Call) -> str | None:
    """Why fused attention cannot serve a call."""
    if reason := why_unsupported(call) or fused.why_unsupported(replace(call, bias=PositionalBias(1))):
        return reason
    return None if call.bias.factorises else "it needs an encoding that factorises: Fourier, rotary, absolute, none"


def why_not_first(call: Call) -> str | None:
    """Why another backend is better for a call that fused attention could serve.

    Raises:
        RuntimeError: the backward pass of a reentrant checkpoint calls this, and the first pass, without gradients, had
            another answer and dropped other keys.
    """
    assert isinstance(call.positions, Points)
    if not call.positions.whole:
        return "neighbours are fewer than all points"
    number = call.positions.num_positions
    if not number or (call.q.device.type == "cpu" and number < _MANY * len(call.positions.clouds().sizes)):
        return f"clouds have fewer than {_MANY} points"
    if not call.bias.factorises:
        return "the encoding does not factorise"
    # A gradient by coordinates is a force, to be differentiated once more, which fused attention cannot be. With
    # dropout the answer is the same without gradients, for the first pass of a reentrant checkpoint.
    coords = call.positions.coordinates
    if not coords.requires_grad or not (torch.is_grad_enabled() or call.dropout):
        return None
    # Coordinates that the checkpoint is given are leaves in its backward pass, and required a gradient before.
    if call.dropout and not coords.is_leaf and why_not_dense(call) is None and _in_reentrant_checkpoint():
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


def dense(call: Call) -> Tensor:
    """Fused attention in all clouds: see :func:`escnn_attention.functional.attention`."""

    def attend(clouds: Call) -> Tensor:
        folded, unfold = fold(clouds)
        return unfold(fused.attention(folded))

    return _in_groups(call, attend, _SLACK.get(call.q.device.type, 1.0))


def reference(call: Call) -> Tensor:
    """The formula in each cloud: see :func:`escnn_attention.functional.attention`."""
    return _in_groups(call, formula.attention, 0.0)


def _in_groups(call: Call, attend: Callable[[Call], Tensor], slack: float) -> Tensor:
    """The output ``(M, 1, N, |H|, C)`` of all clouds.

    Args:
        call: the attention.
        attend: attends within each of several clouds that are filled up to one size.
        slack: to how many times its size a cloud is filled up at most; 0 for one cloud after the other.
    """
    assert isinstance(call.positions, Points)
    assert isinstance(call.bias, PairBias)
    heads, _, number, _, channels = call.q.shape
    shape = (number, heads, call.bias.num_poses, channels)
    groups = call.positions.clouds().alike(slack)
    # Without anything that tells them apart, all output poses are alike.
    out = [attend(_images(call, some)).expand(-1, -1, -1, shape[2], -1) for some in groups]
    rows = [y.permute(1, 2, 0, 3, 4).flatten(0, 1) for y in out]
    return (in_place(rows, groups, shape) if rows else call.v.new_zeros(shape)).transpose(0, 1).unsqueeze(1)


def _images(call: Call, some: Chunk) -> Call:
    """The attention of clouds to themselves, each of which is an image."""
    positions = call.positions
    assert isinstance(positions, Points)
    assert isinstance(call.bias, PairBias)
    # The first point of a cloud fills up, where it is near the others and counts nothing as a key.
    take = RowsOf(some.keys, some.keys[:, :1] if some.padded else None, some.first)
    cloud, bias = call.bias.table(take(positions.coordinates))
    measure = call.bias.log_measure
    if measure is not None:
        measure = take(measure).mT if len(measure) > 1 else measure.T
    if some.padded:
        measure = (call.q.new_zeros(1, 1) if measure is None else measure).masked_fill(
            (some.keys < 0).unsqueeze(1), -torch.inf
        )
    q, k, v = (take(t.squeeze(1).transpose(0, 1)).permute(2, 0, 1, 3, 4) for t in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, positions=cloud, bias=replace(bias, log_measure=measure))
