r"""Attention without a softmax, at a cost that is linear in the number of positions.

A score is a product of what the query knows and what the key knows, if the encoding factorises, and

.. math::
    \sum_{x'} \langle q(x), k(x') \rangle\, v(x') = \Big(\sum_{x'} v(x')\, k(x')^T\Big)\, q(x)

so keys and values are summed to one C × C matrix, which all queries read. The terms of poses and waves have sums of
their own; absolute and rotary terms are part of the queries and keys of a frame.

Source: Katharopoulos et al., "Transformers are RNNs", ICML 2020; Platonic Transformers, 2025, for their use in frames.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from escnn_attention.functional.grid.call import GridCall, Heads
from escnn_attention.functional.grid.widen import of_images


def why_unsupported(call: GridCall) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if call.normalization != "count":
        return 'it is for normalization="count"'
    if call.dropout:
        return "it has no scores to drop"
    if not call.query_grid.complete:
        return "it is for global attention"
    return (
        None if call.bias.spatial is None else "it needs an encoding that factorises: Fourier, rotary, absolute, none"
    )


def attention(call: GridCall) -> Tensor:
    """Attention without a softmax: see :func:`escnn_attention.functional.attention`."""
    positions = call.offsets
    return sums(call, positions.places, positions.key_places)


def sums(call: Heads, points: Tensor, key_points: Tensor | None = None) -> Tensor:
    """The sums of values times scores, ``(M, B, N, H, C)``.

    Args:
        call: after folding.
        points: ``(N, d)``, or ``(B · N, d)`` where images differ; the positions.
        key_points: the positions of the keys, where these are others.
    """
    bias, v = call.bias, call.v
    q = call.q if call.query == "own" else call.q.sum(3, keepdim=True)
    q = q / math.sqrt(q.shape[-1])
    out = (q.flatten(2, 3) @ (call.k.flatten(2, 3).mT @ v.flatten(2, 3))).unflatten(2, q.shape[2:4])
    if bias.pose is not None:
        of_poses = bias.pose.to(v.dtype).mT.unsqueeze(1) @ v.sum(2).unsqueeze(2)  # M, B, H, C, C
        out = out + torch.einsum("mbnhc,mbhcd->mbnhd", q.expand(-1, -1, -1, bias.num_poses, -1), of_poses)
    if bias.waves is not None:
        cos, sin, *_ = near = _waves(call, points, q.shape[2])
        far = near if key_points is None else _waves(call, key_points, v.shape[2])
        a, b = (q @ bias.waves.readout.to(q.dtype)[:, None, None]).chunk(2, dim=-1)
        reads = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        waves = torch.cat(far, dim=-1).expand(len(v), v.shape[1], -1, -1, -1)
        of_waves = torch.einsum("mbnhf,mbnc->mbhfc", waves, v.sum(3))
        out = out + torch.einsum("mbnhf,mbhfc->mbnhc", reads, of_waves)
    return out.expand(-1, -1, -1, bias.num_poses, -1)


def _waves(call: Heads, points: Tensor, positions: int) -> list[Tensor]:
    """The cosine and the sine of the phase at each of the positions, ``(M or 1, B or 1, N, H, F)``."""
    assert call.bias.waves is not None
    return [of_images(t, positions).movedim(1, 3).to(call.v.dtype) for t in call.bias.waves.phases(points)]
