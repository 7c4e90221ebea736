"""Bias between points that transforms queries and keys, as a head for each output pose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from escnn_attention.functional.grid.call import Call
from escnn_attention.functional.grid.fold import fold_frames, fold_keys
from escnn_attention.functional.points.bias import PairBias, PairScores

__all__ = ["fold_points"]


class _Folded(PairBias):
    """Scores that are products of queries and keys alone, seen from one pose."""

    @property
    def num_poses(self) -> int:
        """The one pose of every head."""
        return 1

    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        """The products of queries and keys."""
        return PairScores(q / math.sqrt(q.shape[-1]))


def fold_points(call: Call) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """The attention between points to compute instead, and what makes of its output that of the call.

    Absolute and rotary encodings treat every output pose differently before the scores are taken: a head for each.
    """
    bias = call.bias
    assert isinstance(bias, PairBias)
    if not bias.in_frames:
        return call, lambda out: out
    undo = []
    cloud, table = bias.table(call.positions.coordinates)
    folded = replace(call, positions=cloud, bias=table)
    if call.keys == "own":
        folded, unfold = fold_keys(folded)
        undo.append(unfold)
    folded, unfold = fold_frames(folded)
    undo.append(unfold)

    def unfold_all(out: Tensor) -> Tensor:
        for unfold in reversed(undo):
            out = unfold(out)
        return out

    return replace(folded, positions=call.positions, bias=_Folded(bias.tables)), unfold_all
