"""Attention between all points of a cloud by the backends of grids, one cloud after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from escnn_attention.functional.backends import dense as fused
from escnn_attention.functional.backends import reference as formula
from escnn_attention.functional.call import Call
from escnn_attention.functional.fold import fold
from escnn_attention.functional.points.bias import PairBias
from escnn_attention.geometry.clouds import cloud_slices
from escnn_attention.geometry.points import Points

__all__ = ["dense", "reference", "why_not_dense", "why_not_first", "why_unsupported"]

# With so many points a cloud, on average, fused attention is faster, one cloud after the other.
_MANY = 64


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
    if reason := why_unsupported(call):
        return reason
    if not call.positions.num_positions:
        return None
    return fused.why_unsupported(fold(_stretch(call, slice(0, 1)))[0])


def why_not_first(call: Call) -> str | None:
    """Why another backend is better for a call that fused attention could serve."""
    assert isinstance(call.positions, Points)
    # A gradient by coordinates is a force, to be differentiated once more, which fused attention cannot be.
    if call.positions.coordinates.requires_grad and torch.is_grad_enabled():
        return "coordinates require a gradient"
    batch, number = call.positions.batch, call.positions.num_positions
    clouds = 1 if batch is None or not len(batch) else int(batch.max()) + 1
    if not number or number < _MANY * clouds:
        return f"clouds have fewer than {_MANY} points"
    return None if call.bias.factorises else "the encoding does not factorise"  # type: ignore[union-attr]


def dense(call: Call) -> Tensor:
    """Fused attention in each cloud: see :func:`escnn_attention.functional.attention`."""

    def attend(cloud: Call) -> Tensor:
        folded, unfold = fold(cloud)
        return unfold(fused.attention(folded))

    return _by_cloud(call, attend)


def reference(call: Call) -> Tensor:
    """The formula in each cloud: see :func:`escnn_attention.functional.attention`."""
    return _by_cloud(call, formula.attention)


def _by_cloud(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
    """The output ``(M, 1, N, |H|, C)`` of all clouds, of a function that attends within one."""
    assert isinstance(call.positions, Points)
    assert isinstance(call.bias, PairBias)
    heads, _, number, _, channels = call.q.shape
    if not number:
        return call.v.new_zeros(heads, 1, 0, call.bias.num_poses, channels)
    stretches, order = cloud_slices(call.positions.batch, number), None
    if stretches is None:
        assert call.positions.batch is not None
        order = call.positions.batch.argsort(stable=True)
        call = _in_order(call, order)
        stretches = cloud_slices(call.positions.batch, number)  # type: ignore[attr-defined]
        assert stretches is not None
    # Without anything that tells them apart, all output poses are alike.
    out = [attend(_stretch(call, s)).expand(-1, -1, -1, call.bias.num_poses, -1) for s in stretches]
    y = torch.cat(out, dim=2)
    return y if order is None else torch.empty_like(y).index_copy(2, order, y)


def _in_order(call: Call, order: Tensor) -> Call:
    """The call of the points in another order."""
    assert isinstance(call.positions, Points)
    assert isinstance(call.bias, PairBias)
    measure = call.bias.log_measure
    if measure is not None and len(measure) > 1:
        measure = measure[order]
    return replace(
        call,
        **{name: getattr(call, name)[:, :, order] for name in ("q", "k", "v")},
        positions=call.positions.in_order(order),
        bias=call.bias.with_measure(measure),
    )


def _stretch(call: Call, stretch: slice) -> Call:
    """The attention of a cloud, of the points of a stretch, to itself."""
    assert isinstance(call.bias, PairBias)
    cloud, bias = call.bias.table(call.positions.coordinates[stretch])
    measure = call.bias.log_measure
    if measure is not None:
        measure = (measure[stretch] if len(measure) > 1 else measure).T
    q, k, v = (t[:, :, stretch] for t in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, positions=cloud, bias=replace(bias, log_measure=measure))
