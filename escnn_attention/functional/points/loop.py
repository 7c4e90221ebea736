"""Attention between points on the CPU by a compiled loop: lists and whole clouds, both query modes, shares by count."""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.functional.points import native
from escnn_attention.functional.points.bias import PairScores, against
from escnn_attention.functional.points.call import PointCall
from escnn_attention.functional.points.portable import Chunks, attend_in_chunks, attend_in_export
from escnn_attention.geometry.neighbours import Chunk

_NUMBERS_PER_CHUNK = 2**24  # The loop keeps what it works on in the cache by itself.


def why_unsupported(call: PointCall) -> str | None:
    """Why the compiled loop cannot serve a call.

    With dropout, no answer depends on who requires a gradient: a reentrant checkpoint asks without gradients first, and
    another backend would drop other keys in the backward pass.
    """
    if call.values is not None:
        return "values pass through a kernel"
    if call.keys == "own":
        return "queries see keys of their own pose only"
    log_measure = call.bias.log_measure
    if log_measure is not None and log_measure.requires_grad and not call.dropout:
        return "the measure requires a gradient"
    return native.why_unsupported(call.q)


def why_not_first(call: PointCall) -> str | None:
    """Why another backend is better for a call that this one could serve."""
    # A gradient by coordinates is a force, to be differentiated once more: no use of a loop with first derivatives.
    forces = call.query_points.coordinates.requires_grad and torch.is_grad_enabled() and not call.dropout
    return "coordinates require a gradient" if forces else None


def attention(call: PointCall) -> Tensor:
    """Attention between points by the compiled loop: see :func:`escnn_attention.functional.attention`."""
    return attend_in_chunks(call, _CompiledChunks, _NUMBERS_PER_CHUNK)


def exported(call: PointCall) -> Tensor:
    """The same attention in a package into which the loop is linked."""
    return attend_in_export(call, _CompiledChunks)


class _CompiledChunks(Chunks):
    """The attention of one call, chunk by chunk, by the compiled loop."""

    def combine(self, terms: PairScores, k: Tensor, v: Tensor, some: Chunk, seen: Tensor | None) -> Tensor:
        """The output of a chunk, of the terms of its scores."""
        summed = self.call.query == "all"
        query_poses = self.call.q.shape[3]
        pose, extra, features, reads = None, terms.extra, terms.features, terms.reads
        if features is not None and reads is not None and features.shape[5] > 1:
            # Functions of the poses of the keys, too: the loop gets what they are worth.
            worth = against(reads, features).permute(1, 2, 3, 5, 0, 4, 6)
            extra = worth if extra is None else extra + worth
            features = reads = None
        if terms.q is not None and terms.poses is not None:
            # All query poses see the same: where they do not, this loop does not serve.
            pose = terms.poses.squeeze(2).transpose(-1, -2)
        if extra is not None:
            rows = (self.call.bias.num_poses, query_poses if summed else 1)
            extra = extra.expand(v.shape[1], *rows, *extra.shape[3:]).flatten(1, 2)
        arguments = native.Arguments(
            q=None if terms.q is None else of_rows(terms.q),
            k=None if terms.q is None else k.transpose(0, 1),
            v=v.transpose(0, 1),
            reads=None if reads is None else of_rows(reads),
            features=None if features is None else features.squeeze(5),
            pose=pose,
            extra=extra,
            factors=terms.factors,
            envelope=terms.envelope,
            queries=some.queries,
            keys=some.keys,
            log_measure=None if self.measure is None else self.measure.expand(-1, v.shape[2]),
            seed=None,
            num_poses=self.call.bias.num_poses,
            query_poses=query_poses,
            exclusive_keys=some.queries is some.keys,
            padded=some.padded,
            sum_query_poses=summed,
            normalize_by_count=self.call.normalization == "count",
            dropout=self.call.dropout,
        )
        return native.attend(arguments).transpose(0, 1)


def of_rows(x: Tensor) -> Tensor:
    """The rows of all groups as projections leave them, from ``(G, M, H, J, A, X)`` to ``(M, G · A, H · J, X)``."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
