r"""The formula, written out; every other backend is tested against this one.

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

from escnn_attention._precision import working_precision
from escnn_attention.functional.bias import KeyMode, QueryMode, Terms
from escnn_attention.functional.fold import rotate
from escnn_attention.geometry.grid import Positions

__all__ = ["attention", "probabilities"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    query: QueryMode = "own",
    keys: KeyMode = "all",
    dropout: float = 0.0,
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    p = F.dropout(probabilities(q, k, positions, terms, query=query, keys=keys), dropout)
    return torch.einsum("bmhjnpk,bmpkc->bmhnc", p, v)


def probabilities(
    q: Tensor,
    k: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    query: QueryMode,
    keys: KeyMode = "all",
    queries: Tensor | None = None,
    poses: Tensor | None = None,
) -> Tensor:
    """What each query attends to.

    Args:
        q, k, positions, terms, query, keys: as in :func:`escnn_attention.functional.attention`.
        queries: ``(n,)``, the positions of the queries; all by default.
        poses: ``(m,)``, the output poses; all by default.

    Returns:
        ``(B, M, m, J, n, P, N)``, where J runs over the query poses: one for ``"own"``, all of ``q``'s for ``"all"``.
        It sums to 1 over the last axis but one and the last.
    """
    num_positions, channels = q.shape[-2:]
    queries = torch.arange(num_positions, device=q.device) if queries is None else queries
    poses = torch.arange(terms.num_poses, device=q.device) if poses is None else poses
    rows = positions.rows(queries[:, None], torch.arange(num_positions, device=q.device))
    terms = terms.explicit(positions)
    q = q[:, :, :, queries]
    q = q[:, :, poses, None] if query == "own" else q[:, :, None].expand(-1, -1, len(poses), -1, -1, -1)
    k = k[:, :, None].expand(-1, -1, len(poses), -1, -1, -1)
    score = q.new_zeros(())
    if terms.absolute:
        if terms.spatial is not None:
            spatial = terms.spatial[:, poses]
            q = q + spatial[:, :, None, queries]
            k = k + spatial[:, :, None]
        if terms.pose is not None:
            # In the own mode h̃ = h, so that h⁻¹h̃ is the identity, seen from every pose.
            pose = terms.pose[:, poses]
            of_queries = pose[:, :, : q.shape[3]]
            if query == "own" and pose.shape[2] > 1:
                of_queries = pose[:, torch.arange(len(poses)), poses][:, :, None]
            q = q + of_queries[:, :, :, None]
            k = k + pose[:, :, :, None]
    else:
        if terms.spatial is not None:
            spatial = terms.spatial[:, poses][:, :, rows.clamp(min=0)].expand(q.shape[1], -1, -1, -1, -1)
            score = score + torch.einsum("bmhjnc,mhnkc->bmhjnk", q, spatial)[..., None, :]
        if terms.pose is not None and terms.rotary is None:
            pose = terms.pose[:, poses].expand(q.shape[1], -1, -1, -1)
            score = score + torch.einsum("bmhjnc,mhpc->bmhjnp", q, pose)[..., None]
    if terms.rotary is None:
        score = score + torch.einsum("bmhjnc,bmhpkc->bmhjnpk", q, k)
    else:
        if terms.pose is not None:
            k = k + terms.pose[:, poses].unsqueeze(3)
        precise = working_precision(q.dtype)
        angle = positions.offsets.to(precise) @ terms.rotary[:, poses].to(precise).transpose(-1, -2)
        # The key as this query sees it: rotated by the angle of their offset.
        angle = angle[:, :, rows.clamp(min=0)].unsqueeze(3)  # M, H, n, 1, N, F
        score = score + torch.einsum("bmhjnc,bmhnpkc->bmhjnpk", q, rotate(k.unsqueeze(3), angle))
    score = score / math.sqrt(channels)
    if terms.log_measure is not None:
        score = score + terms.log_measure.to(score.dtype)
    if terms.log_window is not None:
        score = score + terms.log_window.to(score.dtype)[rows.clamp(min=0)].unsqueeze(1)
    unseen = (rows < 0)[:, None].expand(-1, score.shape[-2], -1)
    score = score.masked_fill(unseen, -torch.inf)
    if keys == "own" and score.shape[-2] > 1:
        key_pose = torch.arange(score.shape[-2], device=q.device)
        query_pose = poses[:, None] if query == "own" else key_pose.expand(len(poses), -1)
        other = query_pose[..., None] != key_pose  # H, J, P
        score = score.masked_fill(other[:, :, None, :, None], -torch.inf)
    exact = working_precision(score.dtype)
    return score.flatten(-2).softmax(-1, dtype=exact).to(q.dtype).unflatten(-1, (-1, num_positions))
