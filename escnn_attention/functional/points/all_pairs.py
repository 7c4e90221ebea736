"""Attention between points over a table of all pairs, by operators that PyTorch and ONNX have: for exports.

No decision depends on who sees whom, so that a program that is written down is for any number of points. The scores of
all pairs are there at once: memory grows with the square of the number of points in a call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.call import Call
from escnn_attention.functional.points.bias import PairBias
from escnn_attention.functional.points.chunks import Chunks
from escnn_attention.functional.points.edges import with_table
from escnn_attention.geometry.points import Points

__all__ = ["attention"]


def attention(call: Call) -> Tensor:
    """Attention between all points at once, folded: see :func:`escnn_attention.functional.attention`."""
    positions, bias = call.positions, call.bias
    assert isinstance(positions, Points)
    assert isinstance(bias, PairBias)
    rule = Chunks(call, None)
    q, k, v = (t.movedim(0, 2) for t in (call.q, call.k, call.v))  # one group of all points: 1, N, M, P, C
    times = positions.times_seen()
    measure = None if bias.log_measure is None else bias.log_measure.expand(q.shape[1], -1).unsqueeze(0)
    unseen = log_times = None
    if times is not None:
        unseen = (times == 0).unsqueeze(0)
        log_times = times.to(working_precision(q.dtype)).clamp(min=1).log().unsqueeze(0)
        measure, v = _isolate_nonfinite(k, v, measure)
    coords = positions.coordinates.unsqueeze(0)
    seen = bias.tables.relate(coords.unsqueeze(2), coords.unsqueeze(1))
    asking = q.permute(0, 2, 3, 1, 4).unsqueeze(rule.weights.own_axis)
    terms = bias.scores(asking, lambda: rule.weights.near(k), seen, True)
    parts = (
        rule.weights.probabilities(t, lambda: k, unseen, measure, log_times) for t in with_table(terms, call, times)
    )
    p = functools.reduce(torch.add, parts)
    return rule.weights.weighted_sum(p, v, call.values, seen).to(call.v.dtype).transpose(0, 1).unsqueeze(1)


def _isolate_nonfinite(k: Tensor, v: Tensor, measure: Tensor | None) -> tuple[Tensor, Tensor]:
    """A measure that is NaN for keys with values that are not finite, and values with zeros in place of these.

    A probability of zero times NaN would be NaN, also for those who do not see the key.
    """
    finite = torch.isfinite(v)
    bad = ~(finite.flatten(2).all(-1) & torch.isfinite(k).flatten(2).all(-1))  # 1, N
    poison = torch.where(bad, torch.nan, 0.0).to(v.dtype).unsqueeze(-1)
    return poison if measure is None else measure + poison, torch.where(finite, v, 0.0)
