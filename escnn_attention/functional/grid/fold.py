r"""Reductions that leave a backend with one kind of attention to compute.

Some terms treat every output pose differently before the scores are taken: rotary and absolute encodings transform
queries and keys in the frame of h, and keys of the query's own pose are other keys for every query pose. Seen from one
pose each of them is ordinary attention, so that pose becomes part of the axis of heads:

- :func:`_fold_keys`: attention of the query pose with its own pose.
- :func:`_fold_frames`: absolute and rotary terms become part of the queries and keys of a frame.
- :func:`_fold_measure`: a measure of the keys becomes one more channel, in which every query is 1.
- :func:`_fold_shares`: without a softmax it multiplies the values, divided by its sum.

What is left are terms that are added to the keys: a function of the offset and a table over the poses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.grid.call import Heads, PositionalBias, Waves
from escnn_attention.functional.grid.widen import angles_of, of_images
from escnn_attention.functional.rotate import rotate

Unfold = Callable[[Tensor], Tensor]

_H = TypeVar("_H", bound=Heads)


def fold(call: _H, points: Tensor, key_points: Tensor | None = None) -> tuple[_H, Unfold | None]:
    """The attention to compute instead, and what makes of its output that of the call; None where both are the same.

    Args:
        call: queries, keys and values.
        points: ``(N, d)``, or ``(B · N, d)`` where images differ; the positions. Between two of them an angle is that
            of their offset, so the origin may lie anywhere.
        key_points: the positions of the keys, where these are others.
    """
    if call.normalization == "count":
        call = _fold_shares(call)
    if call.bias.adds_to_keys and call.keys == "all":
        return call, None
    undo: list[Unfold] = []
    log_window = call.bias.log_window
    if call.bias.log_measure is not None or log_window is not None:
        call, unfold = _fold_measure(call)
        undo.append(unfold)
    if call.keys == "own" and call.k.shape[3] == 1:
        call = replace(call, keys="all")
    elif call.keys == "own":
        call, unfold = _fold_keys(call)
        undo.append(unfold)
    if call.bias.absolute or call.bias.rotary is not None:
        call, unfold = _fold_frames(call, points, key_points)
        undo.append(unfold)
    if log_window is not None:
        call = replace(call, bias=_weigh_offsets(call.bias, log_window, call.q))

    def unfold_all(out: Tensor) -> Tensor:
        for unfold in reversed(undo):
            out = unfold(out)
        return out

    return call, unfold_all


def _fold_keys(call: _H) -> tuple[_H, Unfold]:
    r"""Keys restricted to the query's pose, :math:`\hat h = \tilde h`: one head for each of these poses.

    In the own mode it is the output pose too. In the mode ``"all"`` each of the heads sees one query pose from all
    output poses, and the output is the sum of these heads.
    """
    bias = call.bias
    heads, poses = call.q.shape[0], call.q.shape[3]
    own = call.query == "own"

    def per_pose(table: Tensor) -> Tensor:
        """A table ``(M or 1, H, ...)`` for the heads (m, h) in the own mode, and for (m, h̃) in the mode ``"all"``."""
        table = table.expand(heads, *table.shape[1:])
        return table.flatten(0, 1).unsqueeze(1) if own else table.repeat_interleave(poses, 0)

    pose = bias.pose
    if pose is not None and not bias.absolute and bias.rotary is None and call.normalization == "softmax":
        pose = None  # The keys of a query have one pose, whose term is the same for all of them and drops out.
    elif pose is not None:
        pose = pose.expand(heads, -1, -1, -1)
        if own:  # M, H, P, C at ĥ = h
            pose = pose.diagonal(dim1=1, dim2=2).transpose(1, 2).flatten(0, 1)[:, None, None]
        else:
            pose = pose.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    waves = bias.waves
    if waves is not None:
        readout = waves.readout.expand(heads, -1, -1).repeat_interleave(poses, 0)
        waves = Waves(per_pose(waves.frequencies), readout)
    bias = replace(bias, num_poses=1 if own else bias.num_poses, pose=pose, waves=waves)
    bias = bias.map_tables(per_pose, "spatial", "query_spatial", "rotary")

    def unfold(out: Tensor) -> Tensor:
        out = out.unflatten(0, (heads, poses))
        return out.squeeze(4).movedim(1, 3) if own else out.sum(1)

    q, k, v = (t.movedim(3, 1).flatten(0, 1).unsqueeze(3) for t in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, bias=bias, keys="all"), unfold


def _fold_frames(call: _H, points: Tensor, key_points: Tensor | None = None) -> tuple[_H, Unfold]:
    """Absolute and rotary terms: one head for each output pose, in whose frame queries and keys are expressed."""
    bias, pose, back = call.bias, call.bias.pose, None
    heads, num_poses = call.q.shape[0], bias.num_poses
    # M, H or 1, B, N, J, C: the frame stands beside the head.
    q = call.q.movedim(3, 1).unsqueeze(4) if call.query == "own" else call.q.unsqueeze(1)
    k, v = call.k.unsqueeze(1), call.v.unsqueeze(1)
    if bias.absolute:
        if bias.spatial is not None:
            of_queries = bias.spatial if bias.query_spatial is None else bias.query_spatial
            q, k = (t + of_images(s, t.shape[3]).unsqueeze(4) for t, s in ((q, of_queries), (k, bias.spatial)))
        if bias.pose is not None:
            # In the own mode h̃ = h: the identity, seen from every pose.
            seen = bias.pose
            if call.query == "own" and seen.shape[2] > 1:
                seen = seen.diagonal(dim1=1, dim2=2).transpose(1, 2).unsqueeze(2)
            elif call.query == "all":
                seen = seen[:, :, : q.shape[4]]
            q, k = q + seen[:, :, None, None], k + bias.pose[:, :, None, None]
        pose = None
    if bias.rotary is not None:
        near, far = angles_of(q, k, bias.rotary, points, key_points)
        q, k = rotate(q, near), rotate(k, far, None if pose is None else pose[:, :, None, None])
        if bias.rotates_values:
            back, v = -near, rotate(v, far)
    q, k, v = (t.expand(-1, num_poses, *t.shape[2:]).flatten(0, 1) for t in (q, k, v))

    def unfold(out: Tensor) -> Tensor:
        out = out.unflatten(0, (heads, num_poses))
        # From the frame of the query: between two positions the angle is that of their offset, of values too.
        out = out if back is None else rotate(out, back)
        return out.squeeze(4).movedim(1, 3)

    return replace(call, q=q, k=k, v=v, bias=PositionalBias(1), keys="all"), unfold


def _fold_measure(call: _H) -> tuple[_H, Unfold]:
    r"""A measure of the keys: one more channel, in which queries are 1 and keys the logarithm of their measure.

    With C + 1 channels backends divide by :math:`\sqrt{C + 1}`, for which everything else makes up. For the measure of
    the offsets there is only made room: it is added when all that changes the table of offsets is done.
    """
    q, k, v, bias = call.q, call.k, call.v, call.bias
    channels = q.shape[-1]
    # On both sides of the products alike, because absolute terms are on both sides.
    scale = ((channels + 1) / channels) ** 0.25
    measure = k.new_zeros(1, 1)
    if bias.log_measure is not None:
        measure = _in_channel(bias.log_measure, channels + 1, k.dtype).mT
    q = torch.cat([scale * q, q.new_ones(1).expand(*q.shape[:-1], 1)], dim=-1)
    k = torch.cat([scale * k, measure.unsqueeze(-1).expand(*k.shape[:-1], 1)], dim=-1)

    waves = bias.waves and Waves(bias.waves.frequencies, scale * F.pad(bias.waves.readout, (0, 0, 0, 1)))
    bias = replace(bias, waves=waves, log_measure=None, log_window=None)
    bias = bias.map_tables(lambda table: scale * F.pad(table, (0, 1)), "spatial", "query_spatial", "pose")

    def unfold(out: Tensor) -> Tensor:
        return out[..., :channels]

    return replace(call, q=q, k=k, v=F.pad(v, (0, 1)), bias=bias), unfold


def _fold_shares(call: _H) -> _H:
    """Values multiplied by the share of their key in the measure of all keys that a query sees: all see all.

    What is left is a sum of values times scores.
    """
    number, poses = call.k.shape[2:4]
    axes = (-3,) if call.keys == "own" else (-3, -2)  # of the keys that a query sees
    if call.bias.log_measure is None:
        return replace(call, v=call.v / (number if call.keys == "own" else number * poses))
    measure = call.bias.log_measure.to(PRECISE[call.v.dtype]).exp().mT.unsqueeze(-1)
    measure = measure.expand(*measure.shape[:-3], number, poses, 1)
    share = measure / measure.sum(axes, keepdim=True).clamp(min=torch.finfo(measure.dtype).tiny)
    return replace(call, v=call.v * share.to(call.v.dtype), bias=replace(call.bias, log_measure=None))


def _weigh_offsets(bias: PositionalBias, log_window: Tensor, like: Tensor) -> PositionalBias:
    """The measure of the offsets in the last channel of their table, which has as many as ``like``."""
    channels = like.shape[-1]
    measure = F.pad(_in_channel(log_window, channels, like.dtype).unsqueeze(-1), (channels - 1, 0))
    if bias.spatial is None:
        return replace(bias, spatial=measure.expand(1, bias.num_poses, -1, -1))
    return replace(bias, spatial=bias.spatial + measure)


def _in_channel(logarithm: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    r"""A logarithm as a channel of the keys, whose product is divided by :math:`\sqrt C`.

    A finite number, in half precision too, stands for that of 0: its exponential is 0 as well, and infinity times 0
    would be NaN.
    """
    scale = math.sqrt(channels)
    return (scale * logarithm.clamp(min=max(-1e4, torch.finfo(dtype).min / scale))).to(dtype)
