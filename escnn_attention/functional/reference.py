r"""The formula, written out; every other backend is tested against this one.

.. math::
    s_h(x, \tilde h; x', \hat h) &= \langle q(x, \tilde h), k(x', \hat h)
        + \rho(h^{-1}\Delta, h^{-1}\hat h) \rangle / \sqrt C \\
    \mathrm{out}(x, h) &= \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x)}
        \mathrm{softmax}_{(x', \hat h)}(s_h) \; v(x', \hat h)

It holds every score at once, ``B · M · |H| · |Q| · N · P · N`` numbers: for small inputs, for tests, and for looking at
the attention of chosen queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.terms import QueryMode, Terms
from escnn_attention.positions import Positions

__all__ = ["attention", "probabilities"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    p = F.dropout(probabilities(q, k, positions, terms, query=query), dropout)
    return torch.einsum("bmhjnpk,bmpkc->bmhnc", p, v)


def probabilities(
    q: Tensor,
    k: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    query: QueryMode,
    queries: Tensor | None = None,
    poses: Tensor | None = None,
) -> Tensor:
    """What each query attends to.

    Args:
        q, k, positions, terms, query: as in :func:`escnn_attention.functional.attention`.
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
            own = pose[:, torch.arange(len(poses)), poses][:, :, None]
            q = q + (own if query == "own" else pose)[:, :, :, None]
            k = k + pose[:, :, :, None]
    else:
        if terms.spatial is not None:
            spatial = terms.spatial[:, poses][:, :, rows.clamp(min=0)].expand(q.shape[1], -1, -1, -1, -1)
            score = score + torch.einsum("bmhjnc,mhnkc->bmhjnk", q, spatial)[..., None, :]
        if terms.pose is not None:
            pose = terms.pose[:, poses].expand(q.shape[1], -1, -1, -1)
            score = score + torch.einsum("bmhjnc,mhpc->bmhjnp", q, pose)[..., None]
    score = (score + torch.einsum("bmhjnc,bmhpkc->bmhjnpk", q, k)) / math.sqrt(channels)
    score = score.masked_fill((rows < 0)[:, None], -torch.inf)
    exact = torch.float32 if score.dtype in (torch.float16, torch.bfloat16) else score.dtype
    return score.flatten(-2).softmax(-1, dtype=exact).to(q.dtype).unflatten(-1, (-1, num_positions))
