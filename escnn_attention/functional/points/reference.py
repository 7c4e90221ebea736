r"""The formula between points, written out; every other backend is tested against this one.

.. math::
    \mathrm{out}(x, h) = \sum_{\tilde h \in Q(h)} \; \sum_{(x', \hat h) \in N(x, \tilde h)}
        f\, \mathrm{softmax}_{(x', \hat h)}\big(s_h(x, \tilde h; x', \hat h) + \log(\mu(x', \hat h)\, u(x, x'))\big) \;
        v(x', \hat h)

with the scores s of the bias of the layer, the factors f of features of edges, and the envelope u of a cut-off. The
keys :math:`N(x, \tilde h)` of a query are listed one by one, all lists are held at once, and each of them is filled up
to the longest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.points.call import PairScores, PointCall
from escnn_attention.functional.points.portable import with_pairs
from escnn_attention.functional.rotate import rotate
from escnn_attention.geometry.neighbours import Chunk


def attention(call: PointCall) -> Tensor:
    """The formula of attention between points, written out: see :func:`escnn_attention.functional.attention`."""
    _, _, number, _, channels = call.q.shape
    out = call.v.new_zeros(call.q.shape[0], 1, number + 1, call.num_poses, channels)  # one row more for what fills up
    for some in call.query_points.neighbours(call.key_points).chunks(2**62):
        rows = torch.where(some.queries < 0, number, some.queries).flatten()
        out = out.index_copy(2, rows, _attend(call, some).flatten(1, 2).unsqueeze(1).to(out.dtype))
    return out[:, :, :-1]


def probabilities(call: PointCall, queries: Tensor | None = None, poses: Tensor | None = None) -> Tensor:
    """Attention probabilities of each query, without dropout and kernels of values.

    Args:
        call: the attention.
        queries: ``(n,)``, the numbers of the queries; all by default.
        poses: ``(m,)``, the output poses; all by default.

    Returns:
        ``(M, n, m, J, P, N')``, where J runs over the query poses: one for ``"own"``, all of ``q``'s for ``"all"``.
        Zeros for keys that a query does not see.

    Example:
        >>> import torch
        >>> from escnn_attention import PointSelfAttention
        >>> from escnn_attention.functional.points.reference import probabilities
        >>> from escnn_attention.geometry.neighbours import Neighbourhood
        >>> from escnn_attention.geometry.points import Points
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> layer = PointSelfAttention(fields, fields, head_fields=2).plain
        >>> x = torch.randn(5, 2)
        >>> call = layer.call(torch.randn(5, 4), Points(x, x, None, None, Neighbourhood()), None)
        >>> probabilities(call, torch.tensor([2])).shape
        torch.Size([1, 1, 4, 1, 4, 5])
    """
    (heads, _, number, query_poses, _), (key_number, key_poses) = call.q.shape, call.k.shape[2:4]
    device, every = call.q.device, torch.arange(call.num_poses, device=call.q.device)
    poses = every if poses is None else poses
    chosen, back = (torch.arange(number, device=device) if queries is None else queries).unique(return_inverse=True)
    # One row and one column more are for what fills up, and for queries that are not asked for.
    place = chosen.new_full((number + 1,), len(chosen)).index_copy(0, chosen, torch.arange(len(chosen), device=device))
    of_pair = (heads, len(poses), 1 if call.query == "own" else query_poses, key_poses)
    out = call.v.new_zeros(len(chosen) + 1, key_number + 1, *of_pair)
    for some in call.query_points.neighbours(call.key_points).chunks(_PAIRS):
        p = _weigh(call, some)[0][:, :, poses]
        if p.shape[5] < key_poses:  # of the query's own pose only
            own = torch.eye(key_poses, dtype=p.dtype, device=device)
            p = p * (own[poses, None, None, :, None] if call.query == "own" else own[:, None, :, None])
        rows = place[some.queries.masked_fill(some.queries < 0, number)].unsqueeze(2)
        columns = some.keys.masked_fill(some.keys < 0, key_number).unsqueeze(1)
        out = out.index_put((rows, columns), p.permute(0, 4, 6, 1, 2, 3, 5).to(out.dtype), accumulate=True)
    return out[back, :-1].permute(2, 0, 3, 4, 5, 1)


_PAIRS = 2**14
"""The most pairs of points whose probabilities are made at once."""


def _weigh(call: PointCall, some: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the keys of groups, ``(G, M, H, J, A, P, K)``, their values, and what is seen of them."""
    summed, bias = call.query == "all", call.bias
    queries, keys = some.queries.clamp(min=0), some.keys.clamp(min=0)
    # G, M, H or 1, J or 1, A, C: in the own mode the poses of the queries are those of the output.
    # Zeros fill up: nothing that is not finite is among what a query does not see.
    sets = ((call.q, some.queries), (call.k, some.keys), (call.v, some.keys))
    q, k, v = (t[:, 0, i.clamp(min=0)].masked_fill((i < 0)[:, :, None, None], 0.0) for t, i in sets)
    q, k, v = (t.permute(1, 0, 3, 2, 4) for t in (q, k, v))  # G, M, J or P, A or K, C
    q = q.unsqueeze(2 if summed else 3)
    places = (call.query_points.coordinates[queries].unsqueeze(2), call.key_points.coordinates[keys].unsqueeze(1))
    seen = bias.tables.relate(*places)
    if bias.in_frames:
        score, v = _in_frames(call, q, k, v, some)
        terms = with_pairs(PairScores(None, extra=score.permute(1, 2, 3, 5, 0, 4, 6)), call, some)
        score = terms.scores(lambda: k)
    else:
        own_keys = call.keys == "own" and k.shape[2] > 1
        # Keys of the query's own pose stand on the axis of the query poses.
        near = (k.unsqueeze(2) if summed else k.unsqueeze(3)).unsqueeze(4) if own_keys else k[:, :, None, None]
        terms = with_pairs(bias.scores(q, lambda: near, seen, False), call, some)
        score = terms.scores(lambda: near)
        v = (v.unsqueeze(2) if summed else v.unsqueeze(3)) if own_keys else v.unsqueeze(2)
    p = _normalized(call, score, some, terms.envelope)
    if terms.factors is not None:
        p = p * terms.factors.transpose(0, 1)[:, :, None, None, :, None]
    return p, v, seen


def _attend(call: PointCall, some: Chunk) -> Tensor:
    """The output of the queries of groups, ``(M, G, A, H, C)``."""
    p, v, seen = _weigh(call, some)
    p = F.dropout(p, call.dropout)
    # G, M, H, A, P, K, the query poses in place of P where each of them has its own keys.
    p = p.squeeze(-2).movedim(3, -2) if v.shape[3] != p.shape[5] else p.sum(3)
    if call.values is not None:
        return call.values(p.to(v.dtype), v, seen).permute(1, 0, 3, 2, 4)
    v = v if v.dim() == 7 else v.unsqueeze(4)  # G, M, H or 1, P, A or 1, K, C
    return (p.to(v.dtype).unsqueeze(-1) * v.transpose(3, 4)).sum((4, 5)).permute(1, 0, 3, 2, 4)


def _normalized(call: PointCall, score: Tensor, some: Chunk, envelope: Tensor | None) -> Tensor:
    """Probabilities, or shares of the scores, ``(G, M, H, J, A, P, K)``."""
    poses = call.q.shape[3] if call.query == "all" else 1
    score = score.expand(*score.shape[:2], call.num_poses, poses, *score.shape[4:])
    score = score.to(PRECISE[score.dtype])
    measure, unseen = call.bias.log_measure, (some.keys < 0)[:, None, None, None, None, None]
    mu = score.new_zeros(1) if measure is None else measure.expand(len(call.k[0, 0]), -1)[some.keys.clamp(min=0)]
    mu = (mu if measure is None else mu.transpose(1, 2)[:, None, None, None, None]).to(score.dtype)
    u = None if envelope is None else envelope[:, None, None, None, :, None].to(score.dtype)
    if call.normalization == "softmax":
        score = (score + mu).masked_fill(unseen, -torch.inf)
        if u is not None:
            largest = (score + u.log()).detach().amax((-1, -2), keepdim=True)
            # Where u is 0 there is no contribution, and the exponential might be infinite.
            e = u * (score - largest).masked_fill(u == 0, 0.0).exp()
            return e / e.sum((-1, -2), keepdim=True)
        return score.flatten(-2).softmax(-1).unflatten(-1, score.shape[-2:])
    unseen = unseen | score.isneginf()  # keys of other poses than the query's
    mass = (mu.exp() + torch.zeros_like(score)).masked_fill(unseen, 0.0)
    mass = mass if u is None else mass * u
    return score.masked_fill(unseen, 0.0) * mass / mass.sum((-1, -2), keepdim=True)


def _in_frames(call: PointCall, q: Tensor, k: Tensor, v: Tensor, some: Chunk) -> tuple[Tensor, Tensor]:
    """The scores of absolute and rotary encodings, ``(G, M, H, J, A, P, K)``, and the values as queries see them."""
    queries, keys = some.queries.clamp(min=0), some.keys.clamp(min=0)
    asking, asked = call.query_points.coordinates, call.key_points.coordinates
    of_queries, terms = call.bias.table(asking), call.bias.table(asked)
    q, k, v = q.expand(-1, -1, call.num_poses, -1, -1, -1), k.unsqueeze(2), v.unsqueeze(2)
    if terms.absolute and of_queries.spatial is not None and terms.spatial is not None:
        q = q + of_queries.spatial[:, :, queries].permute(2, 0, 1, 3, 4).unsqueeze(3)
        k = k + terms.spatial[:, :, keys].permute(2, 0, 1, 3, 4).unsqueeze(3)
    if terms.pose is not None:
        k = k + terms.pose.unsqueeze(3)
        if terms.absolute:
            own = terms.pose[:, :, : q.shape[3]]
            if call.query == "own" and terms.pose.shape[2] > 1:
                own = terms.pose.diagonal(dim1=1, dim2=2).transpose(1, 2).unsqueeze(2)
            q = q + own.unsqueeze(3)
    k = k.unsqueeze(4)  # G, M, H, P, A, K, C
    if terms.rotary is not None:
        offset = (asked[keys].unsqueeze(1) - asking[queries].unsqueeze(2)).to(PRECISE[terms.rotary.dtype])
        angle = torch.einsum("gakd,mhfd->gmhakf", offset, terms.rotary.to(offset.dtype)).unsqueeze(3)
        k = rotate(k, angle)
        v = rotate(v.unsqueeze(4), angle) if terms.rotates_values else v
    score = torch.einsum("gmhjac,gmhpakc->gmhjapk", q, k.expand(*k.shape[:2], q.shape[2], -1, q.shape[4], -1, -1))
    if call.keys == "own" and k.shape[3] > 1:
        pose = torch.arange(k.shape[3], device=k.device)
        other = pose.unsqueeze(1) != pose  # of the query, and of the key
        other = other[None, :, None, :, None] if call.query == "all" else other[:, None, None, :, None]
        score = score.masked_fill(other, -torch.inf)
    return score / math.sqrt(q.shape[-1]), v
