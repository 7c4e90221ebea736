r"""Reductions that leave a backend with one kind of attention to compute.

Some terms treat every output pose differently before the scores are taken: rotary and absolute encodings transform
queries and keys in the frame of h, and keys of the query's own pose are other keys for every query pose. Seen from one
pose each of them is ordinary attention, so that pose becomes part of the axis of heads:

- :func:`fold_keys`: attention of the query pose with its own pose.
- :func:`fold_frames`: absolute and rotary terms become part of the queries and keys of a frame.
- :func:`fold_measure`: a measure of the keys becomes one more channel, in which every query is 1.

What is left are terms that are added to the keys: a function of the offset and a table over the poses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.bias import KeyMode, QueryMode, Terms, Waves
from escnn_attention.geometry.grid import Positions

__all__ = ["Call", "fold", "fold_frames", "fold_keys", "fold_measure", "rotate"]

Call = tuple[Tensor, Tensor, Tensor, Terms, QueryMode]
"""Queries, keys, values, positional terms and query mode of an attention."""

_Unfold = Callable[[Tensor], Tensor]


def fold(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, query: QueryMode, keys: KeyMode
) -> tuple[Call, _Unfold]:
    """The attention to compute instead, and a function that makes the output for the arguments from that of it."""
    call: Call = (q, k, v, terms, query)
    undo: list[_Unfold] = []
    log_window = terms.log_window
    if terms.log_measure is not None or log_window is not None:
        call, unfold = fold_measure(positions, *call)
        undo.append(unfold)
    if keys == "own" and k.shape[2] > 1:
        call, unfold = fold_keys(*call)
        undo.append(unfold)
    if terms.absolute or terms.rotary is not None:
        call, unfold = fold_frames(positions, *call)
        undo.append(unfold)
    if log_window is not None:
        call = (*call[:3], _weigh_offsets(call[3], log_window, call[0]), query)

    def unfold_all(out: Tensor) -> Tensor:
        for unfold in reversed(undo):
            out = unfold(out)
        return out

    return call, unfold_all


def fold_keys(q: Tensor, k: Tensor, v: Tensor, terms: Terms, query: QueryMode) -> tuple[Call, _Unfold]:
    r"""Fold keys that are restricted to the query's pose, :math:`\hat h = \tilde h`: one head for each of these poses.

    With ``query="own"`` the query pose is the output pose too. With ``query="all"`` each of the heads sees one query
    pose from all output poses, and the output is the sum of these heads.
    """
    heads, poses = q.shape[1:3]
    own = query == "own"

    def per_pose(table: Tensor | None) -> Tensor | None:
        """A table ``(M or 1, H, ...)`` for the heads (m, h) of ``"own"``, and (m, h̃) of ``"all"`` query poses."""
        if table is None:
            return None
        table = table.expand(heads, *table.shape[1:])
        return table.flatten(0, 1).unsqueeze(1) if own else table.repeat_interleave(poses, 0)

    pose = terms.pose
    if pose is not None and not terms.absolute and terms.rotary is None:
        pose = None  # The keys of a query have one pose, whose term is the same for all of them and drops out.
    elif pose is not None:
        pose = pose.expand(heads, -1, -1, -1)
        if own:  # M, H, P, C at ĥ = h
            pose = pose.diagonal(dim1=1, dim2=2).transpose(1, 2).flatten(0, 1)[:, None, None]
        else:
            pose = pose.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    waves = terms.waves
    if waves is not None:
        frequencies = per_pose(waves.frequencies)
        assert frequencies is not None
        readout = waves.readout.expand(heads, -1, -1).repeat_interleave(poses, 0)
        waves = Waves(frequencies, readout)
    folded = replace(
        terms,
        num_poses=1 if own else terms.num_poses,
        spatial=per_pose(terms.spatial),
        pose=pose,
        waves=waves,
        rotary=per_pose(terms.rotary),
    )

    def unfold(out: Tensor) -> Tensor:
        out = out.unflatten(1, (heads, poses))
        return out.squeeze(3) if own else out.sum(2)

    q, k, v = (t.flatten(1, 2).unsqueeze(2) for t in (q, k, v))
    return (q, k, v, folded, query), unfold


def fold_frames(
    positions: Positions, q: Tensor, k: Tensor, v: Tensor, terms: Terms, query: QueryMode
) -> tuple[Call, _Unfold]:
    """Fold absolute and rotary terms: one head for each output pose, in whose frame queries and keys are expressed."""
    heads, num_poses = q.shape[1], terms.num_poses
    q = q.unsqueeze(3) if query == "own" else q.unsqueeze(2)  # B, M, H or 1, J, N, C
    k = k.unsqueeze(2)  # B, M, 1, P, N, C
    if terms.absolute:
        if terms.spatial is not None:
            q, k = (t + terms.spatial.unsqueeze(2) for t in (q, k))
        if terms.pose is not None:
            # With query="own" h̃ = h: the identity, seen from every pose.
            seen = terms.pose
            if query == "own" and seen.shape[2] > 1:
                seen = seen.diagonal(dim1=1, dim2=2).transpose(1, 2).unsqueeze(2)
            elif query == "all":
                seen = seen[:, :, : q.shape[3]]
            q, k = q + seen.unsqueeze(3), k + terms.pose.unsqueeze(3)
    elif terms.pose is not None:
        k = k + terms.pose.unsqueeze(3)
    if terms.rotary is not None:
        precise = working_precision(terms.rotary.dtype)
        # Between two positions the angle is that of their offset, so the origin may lie anywhere.
        points = positions.coordinates.to(precise) * positions.scale
        angle = points @ terms.rotary.to(precise).transpose(-1, -2)
        q, k = (rotate(t, angle.unsqueeze(2)) for t in (q, k))
    v = v.unsqueeze(2).expand(-1, -1, num_poses, -1, -1, -1)
    q, k = (t.expand(-1, -1, num_poses, -1, -1, -1) for t in (q, k))

    def unfold(out: Tensor) -> Tensor:
        return out.squeeze(2).unflatten(1, (heads, num_poses))

    return (q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), Terms(1), query), unfold


def fold_measure(
    positions: Positions, q: Tensor, k: Tensor, v: Tensor, terms: Terms, query: QueryMode
) -> tuple[Call, _Unfold]:
    r"""Fold a measure of the keys: one more channel, in which queries are 1 and keys the logarithm of their measure.

    With C + 1 channels backends divide by :math:`\sqrt{C + 1}`, for which everything else makes up. For the measure of
    the offsets there is only made room: it is added when all that changes the table of offsets is done.
    """
    channels = q.shape[-1]
    # On both sides of the products alike, because absolute terms are on both sides.
    scale = ((channels + 1) / channels) ** 0.25
    measure = k.new_zeros(1, 1)
    if terms.log_measure is not None:
        measure = math.sqrt(channels + 1) * _finite(terms.log_measure).to(k.dtype)
    q = torch.cat([scale * q, q.new_ones(1).expand(*q.shape[:-1], 1)], dim=-1)
    k = torch.cat([scale * k, measure.unsqueeze(-1).expand(*k.shape[:-1], 1)], dim=-1)

    def with_channel(table: Tensor | None) -> Tensor | None:
        return None if table is None else scale * F.pad(table, (0, 1))

    if terms.log_window is not None:
        terms = terms.explicit(positions)
    waves = terms.waves and Waves(terms.waves.frequencies, scale * F.pad(terms.waves.readout, (0, 0, 0, 1)))
    spatial, pose = with_channel(terms.spatial), with_channel(terms.pose)
    terms = replace(terms, spatial=spatial, pose=pose, waves=waves, log_measure=None, log_window=None)

    def unfold(out: Tensor) -> Tensor:
        return out[..., :channels]

    return (q, k, F.pad(v, (0, 1)), terms, query), unfold


def _weigh_offsets(terms: Terms, log_window: Tensor, like: Tensor) -> Terms:
    """Add the measure of the offsets to the last channel of their table, which has as many channels as ``like``."""
    channels = like.shape[-1]
    measure = F.pad(math.sqrt(channels) * _finite(log_window).to(like.dtype).unsqueeze(-1), (channels - 1, 0))
    if terms.spatial is None:
        return replace(terms, spatial=measure.expand(1, terms.num_poses, -1, -1))
    return replace(terms, spatial=terms.spatial + measure)


def _finite(logarithm: Tensor) -> Tensor:
    """Logarithms with a finite number for that of 0, whose exponential is 0 too: infinity times 0 would be NaN."""
    return logarithm.clamp(min=-1e4)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of channels, the first F with the second F of ``x``, by ``angle`` ``(..., F)``."""
    pairs = angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    a, b = a * cos - b * sin, a * sin + b * cos
    # Channels that are left stay as they are, for every pose and position that the angle brings in.
    return torch.cat([a, b, rest.expand(*a.shape[:-1], -1)], dim=-1)
