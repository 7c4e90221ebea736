r"""The formula on grids, written out; every other backend is tested against this one.

.. math::
    s_h(x, \tilde h; x', \hat h) &= \langle q(x, \tilde h), k(x', \hat h)
        + \rho(h^{-1}\Delta, h^{-1}\hat h) \rangle / \sqrt C
        + \log \mu(x', \hat h) + \log w(\Delta) \\
    \mathrm{out}(x, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
        \mathrm{softmax}_{(x', \hat h)}(s_h) \; v(x', \hat h)

It holds every score at once, ``B · M · |H| · |Q| · N · P · N`` numbers: for small inputs, for tests, and for looking at
the attention of chosen queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.grid.call import GridCall, PositionalBias
from escnn_attention.functional.registry import refuse_the_impossible
from escnn_attention.functional.rotate import rotate


def attention(call: GridCall) -> Tensor:
    """The formula of attention, written out: see :func:`escnn_attention.functional.attention`."""
    refuse_the_impossible(call)
    p = F.dropout(probabilities(call), call.dropout)
    if call.bias.rotary is None or not call.bias.rotates_values:
        return torch.einsum("mbnhjkp,mbkpc->mbnhc", p, call.v)
    offsets = call.offsets
    queries, keys = (torch.arange(n, device=call.q.device) for n in (call.q.shape[2], call.k.shape[2]))
    angles = _angles(offsets.offsets, call.bias.rotary, offsets.rows(queries[:, None], keys), call.q.dtype)
    seen = rotate(call.v[:, :, None, :, None], angles)
    return torch.einsum("mbnhjkp,mbnkhpc->mbnhc", p, seen)


def probabilities(call: GridCall, queries: Tensor | None = None, poses: Tensor | None = None) -> Tensor:
    """Attention probabilities of each query.

    Args:
        call: the attention.
        queries: ``(n,)``, the positions of the queries; all by default.
        poses: ``(m,)``, the output poses; all by default.

    Returns:
        ``(M, B, n, m, J, N', P)``, where J runs over the query poses: one for ``"own"``, all of ``q``'s for ``"all"``.
        It sums to 1 over the last axis but one and the last; with ``normalization="count"`` it may be negative, and is
        a score divided by the measure of all keys.

    Example:
        >>> import torch
        >>> from escnn_attention.functional import PositionalBias, probabilities
        >>> from escnn_attention.functional.grid.call import GridCall
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> q, k, v = torch.randn(3, 2, 1, 25, 4, 8).unbind()
        >>> grid = Grid((5, 5), Window(3))
        >>> call = GridCall(q, k, v, PositionalBias(num_poses=4), grid, grid)
        >>> p = probabilities(call, queries=torch.tensor([12]))  # of the centre
        >>> p.shape, int((p[0, 0, 0, 0, 0].sum(-1) > 0).sum())  # which sees the 9 positions of its window
        (torch.Size([2, 1, 1, 4, 1, 25, 4]), 9)
    """
    offsets, device, num_keys = call.offsets, call.q.device, call.k.shape[2]
    bias = call.bias.explicit(offsets)
    queries = torch.arange(call.q.shape[2], device=device) if queries is None else queries
    poses = torch.arange(bias.num_poses, device=device) if poses is None else poses
    rows = offsets.rows(queries[:, None], torch.arange(num_keys, device=device))
    score = _scores(call, bias, offsets.offsets, rows, queries, poses)
    if bias.log_window is not None:
        score = score + bias.log_window.to(score.dtype)[rows.clamp(min=0)][:, None, None, :, None]
    score = score.masked_fill((rows < 0)[:, None, None, :, None], -torch.inf)
    if call.keys == "own" and score.shape[-1] > 1:
        key_pose = torch.arange(score.shape[-1], device=device)
        query_pose = poses[:, None] if call.query == "own" else key_pose.expand(len(poses), -1)
        other = query_pose[..., None] != key_pose  # H, J, P
        score = score.masked_fill(other[:, :, None], -torch.inf)
    if call.normalization == "count":
        return _shares(score, bias.log_measure).to(call.q.dtype)
    if bias.log_measure is not None:
        measure = bias.log_measure.to(score.dtype).mT
        measured = score + (measure if measure.dim() == 2 else measure[:, None, None, None])
        # A softmax over keys that are all of measure zero is 0 / 0: there they count alike, as in other backends.
        unseen = measured.isneginf().flatten(-2).all(-1)[..., None, None]
        score = torch.where(unseen, score, measured)
    exact = PRECISE[score.dtype]
    return score.flatten(-2).softmax(-1, dtype=exact).to(call.q.dtype).unflatten(-1, (num_keys, -1))


def _shares(score: Tensor, log_measure: Tensor | None) -> Tensor:
    """Scores ``(..., N', P)``, those of keys that are not seen -inf, times the share of the key in the measure."""
    unseen = score.isneginf()
    mass = torch.ones_like(score)
    if log_measure is not None:
        measure = log_measure.exp().to(score.dtype).mT
        mass = mass * (measure if measure.dim() == 2 else measure[:, None, None, None])
    mass = mass.masked_fill(unseen, 0.0)
    total = mass.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    return score.masked_fill(unseen, 0.0) * mass / total


def _scores(
    call: GridCall, bias: PositionalBias, offsets: Tensor, rows: Tensor, queries: Tensor, poses: Tensor
) -> Tensor:
    """The scores without measures and masks, ``(M, B, n, H, J, N', P)``, for the rows ``(n, N')`` of offsets."""
    own = call.query == "own"
    q = call.q[:, :, queries]
    # M, B, n, H, J, C and M, B, N', H, P, C.
    q = q[:, :, :, poses, None] if own else q[:, :, :, None].expand(-1, -1, -1, len(poses), -1, -1)
    k = call.k[:, :, :, None].expand(-1, -1, -1, len(poses), -1, -1)
    score = q.new_zeros(())
    if bias.absolute:
        q, k = _absolute(q, k, bias, queries, poses, own)
    else:
        if bias.spatial is not None:
            spatial = bias.spatial[:, poses][:, :, rows.clamp(min=0)].expand(len(q), -1, -1, -1, -1)
            score = score + torch.einsum("mbnhjc,mhnkc->mbnhjk", q, spatial)[..., None]
        if bias.pose is not None and bias.rotary is None:
            pose = bias.pose[:, poses].expand(len(q), -1, -1, -1)
            score = score + torch.einsum("mbnhjc,mhpc->mbnhjp", q, pose)[..., None, :]
    if bias.rotary is None:
        score = score + torch.einsum("mbnhjc,mbkhpc->mbnhjkp", q, k)
    else:
        if bias.pose is not None:
            k = k + bias.pose[:, poses][:, None, None]
        # The key as this query sees it: rotated by the angle of their offset.
        seen = rotate(k.unsqueeze(2), _angles(offsets, bias.rotary[:, poses], rows, q.dtype))
        score = score + torch.einsum("mbnhjc,mbnkhpc->mbnhjkp", q, seen)
    return score / math.sqrt(q.shape[-1])


def _angles(offsets: Tensor, rotary: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The angles of all pairs, ``(M, 1, n, N', H, 1, F)``, for the rows ``(n, N')`` of their offsets."""
    precise = PRECISE[dtype]
    angle = offsets.to(precise) @ rotary.to(precise).transpose(-1, -2)
    return angle[:, :, rows.clamp(min=0)].movedim(1, 3)[:, None, :, :, :, None]


def _absolute(
    q: Tensor, k: Tensor, bias: PositionalBias, queries: Tensor, poses: Tensor, own: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the terms of their own positions and poses."""
    if bias.spatial is not None:
        of_queries = bias.spatial if bias.query_spatial is None else bias.query_spatial
        # M, 1, N, H, 1, C
        asking, asked = (t[:, poses].transpose(1, 2)[:, None, :, :, None] for t in (of_queries, bias.spatial))
        q, k = q + asking[:, :, queries], k + asked
    if bias.pose is not None:
        # In the own mode h̃ = h, so that h⁻¹h̃ is the identity, seen from every pose.
        pose = bias.pose[:, poses]
        of_queries = pose[:, :, : q.shape[4]]
        if own and pose.shape[2] > 1:
            of_queries = pose[:, torch.arange(len(poses), device=pose.device), poses][:, :, None]
        q, k = q + of_queries[:, None, None], k + pose[:, None, None]
    return q, k
