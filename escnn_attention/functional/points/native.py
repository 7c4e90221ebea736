"""Attention between points on the CPU, by a loop that is compiled for the machine.

``points.cpp`` takes the keys of a query as many at a time as a vector of the processor has lanes, reads keys and
values where they lie, and keeps no score but those of a few queries; the backward pass makes them again. What location
adds to the scores comes as functions that queries read, or as numbers: see
:class:`~escnn_attention.functional.points.call.PairScores`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.exporting.packaged import PackagedLoop
from escnn_attention.functional.autograd import PRECISE, Operator, Passes
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.native.arguments import Array, Kernel
from escnn_attention.functional.native.build import FOLDER, archive, why_no_compiler
from escnn_attention.functional.points.call import PairScores, PointCall, against
from escnn_attention.functional.points.portable import Chunks, Weights, attend_in_chunks, attend_in_export
from escnn_attention.geometry.cache import constant_result
from escnn_attention.geometry.neighbours import Chunk

_VECTOR_BYTES = 64  # Of the longest vectors.
_NUMBERS_PER_CHUNK = 2**24  # The loop keeps what it works on in the cache by itself.


class Arguments(NamedTuple):
    """Arguments of one call; the operator of PyTorch, the C++ structure and its header follow from this list.

    Attributes:
        q, k: scaled; None where their products are not in the scores.
        reads, features: their products are added to the scores. Groups that follow each other share features, as many
            for each of these.
        layer, shift, relation: in place of features, which are the SiLU of this linear map of the relation.
        pose: what a pose of the keys is worth to a query; in the loop it is filled up to whole vectors.
        extra: what is added to the scores; its rows are output poses, or pairs of an output and a query pose where all
            query poses contribute, and its poses those of the keys, or one.
        factors: what the weights of values are multiplied by.
        envelope: at least 0; what the measure of keys is multiplied by for each query, before weights are normalised.
        queries, keys: of each group; -1 at the end of a row fills up.
        padded: whether anything fills up.
        ring: with rings, the features are those of the first query of a ring, of whole rings of keys in their order.
    """

    q: Annotated[
        Tensor | None, Array("heads, groups * group_queries, query_poses, channels", "scaled", gradient="void")
    ]
    k: Annotated[Tensor | None, Array("heads, points, key_poses, channels", gradient="void")]
    v: Annotated[Tensor, Array("heads, points, key_poses, channels", gradient="void")]
    reads: Annotated[Tensor | None, Array("heads, groups * group_queries, query_poses, num_features", gradient="void")]
    features: Annotated[
        Tensor | None,
        Array("feature_heads, num_poses, num_features, feature_groups, feature_queries, group_keys", gradient="void"),
    ]
    pose: Annotated[Tensor | None, Array("pose_heads, num_poses, channels, padded_key_poses", gradient="void")]
    extra: Annotated[
        Tensor | None, Array("heads, rows of scores, extra_poses, groups, group_queries, group_keys", gradient="void")
    ]
    factors: Annotated[Tensor | None, Array("heads, groups, group_queries, group_keys", gradient="void")]
    envelope: Annotated[Tensor | None, Array("groups, group_queries, group_keys", gradient="void")]
    layer: Annotated[Tensor | None, Array("num_features, coordinates", gradient="void")]
    shift: Annotated[Tensor | None, Array("num_features", gradient="void")]
    relation: Annotated[Tensor | None, Array("num_poses, coordinates, feature_groups, feature_queries, group_keys")]
    queries: Annotated[Tensor, Array("groups, group_queries", "-1 fills up", element="int64_t")]
    keys: Annotated[Tensor, Array("groups, group_keys", "-1 fills up", element="int64_t")]
    log_measure: Annotated[Tensor | None, Array("points, key_poses")]
    seed: Annotated[Tensor | None, Array("1", "of dropout", element="int64_t")]
    num_poses: Annotated[int, "of the output"]
    query_poses: Annotated[int, "of the queries"]
    exclusive_keys: Annotated[bool, "whether no two groups have keys in common"]
    padded: bool
    ring: Annotated[int, "points of a ring, whose features are those of its first, turned; 0 without rings"]
    sum_query_poses: Annotated[bool, "whether all query poses contribute to every output pose"]
    normalize_by_count: Annotated[bool, "whether scores are divided by the measure of the keys, instead of a softmax"]
    dropout: Annotated[float, "the probability"]

    @property
    def summed_poses(self) -> int:
        """How many query poses contribute to an output pose."""
        return self.query_poses if self.sum_query_poses else 1


class Results(NamedTuple):
    """Outputs of the loop, and inputs of its backward pass. Gradients start at zero."""

    out: Annotated[Tensor | None, Array("heads, groups * group_queries, num_poses, channels")] = None
    sums: Annotated[
        Tensor | None,
        Array("heads, groups * group_queries, rows of scores, 2", "the largest scores, and what makes sums 1"),
    ] = None
    grad: Annotated[Tensor | None, Array("as out", "in the backward pass")] = None


KERNEL = Kernel(FOLDER / "points.cpp", "attention between points", Arguments, Results)
_packaged_loop = PackagedLoop("points", archive, why_no_compiler)
_LEAVES = KERNEL.structure.differentiable


def attend(arguments: Arguments) -> Tensor:
    """The output ``(M, G · A, H, C)``, in single precision at least, of arguments in any layout and precision."""
    dtype, pose, measure = PRECISE[arguments.v.dtype], arguments.pose, arguments.log_measure
    relation = arguments.relation
    if pose is not None:
        # Whole vectors.
        arguments = arguments._replace(pose=F.pad(pose, (0, -pose.shape[-1] % (_VECTOR_BYTES // dtype.itemsize))))
    exact: dict[str, Any] = {}
    for name in _LEAVES:
        leaf = getattr(arguments, name)
        exact[name] = None if leaf is None else leaf.to(dtype).contiguous()
    ready = arguments._replace(
        **exact,
        relation=None if relation is None else relation.to(dtype).contiguous(),
        queries=arguments.queries.long().contiguous(),
        keys=arguments.keys.long().contiguous(),
        log_measure=None if measure is None else measure.to(dtype).contiguous(),
        seed=torch.randint(2**62, (1,), device=arguments.v.device) if arguments.dropout else None,
    )
    # The loop has no gradient of the measure.
    loop = _plainly if measure is not None and measure.requires_grad and torch.is_grad_enabled() else _operator
    return loop(ready)


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output, and for what the backward pass makes weights from."""
    heads, queries = len(call.v), call.queries.numel()
    out = call.v.new_zeros(heads, queries, call.num_poses, call.v.shape[-1])
    return out, call.v.new_empty(heads, queries, call.num_poses * call.summed_poses, 2)


def _packaged(call: Arguments) -> Tensor:
    """The output of the kernel in a package."""
    shape = (len(call.v), call.queries.numel(), call.num_poses, call.v.shape[3])
    # Without gradients it does not matter whether groups share keys.
    return _packaged_loop(call.v.dtype, KERNEL.structure.members(call._replace(exclusive_keys=True), Results()), shape)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = _empty(call)
    KERNEL.run(out.dtype, call, Results(out, sums))
    return out, sums


def _backward_pass(
    call: Arguments, grad: Tensor, _: Tensor | None, sums: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    # Every number of these is written, where nothing fills up, and those of shared features are added to.
    shared = call.features is not None and (call.ring or call.features.shape[3] < len(call.keys))
    whole = () if call.padded else ("extra",) if shared else ("features", "extra")
    grads = [
        None if not need or t is None else torch.empty_like(t) if name in whole else torch.zeros_like(t)
        for name, t, need in zip(_LEAVES, (getattr(call, name) for name in _LEAVES), needed, strict=True)
    ]
    KERNEL.run(sums.dtype, call, Results(sums=sums, grad=grad.contiguous()), grads)
    return grads


def _plainly(call: Arguments) -> Tensor:
    """The output by operations that autograd looks through."""
    key_poses = call.v.shape[2]
    normalization: Normalization = "count" if call.normalize_by_count else "softmax"
    weights = Weights(call.num_poses, call.query_poses, call.sum_query_poses, False, normalization, 0.0)

    def of_queries(rows: Tensor | None) -> Tensor | None:
        """Rows of the queries of each group, from ``(M, G · A, J, F)`` to ``(G, M, H or 1, J, A, F)``."""
        if rows is None:
            return None
        return rows.unflatten(1, call.queries.shape).permute(1, 0, 3, 2, 4).unsqueeze(weights.own_axis)

    def of_keys(points: Tensor) -> Tensor:
        """Rows of the keys of each group, ``(G, K, ...)``, with zeros for keys that fill up."""
        rows = points.index_select(0, call.keys.clamp(min=0).flatten()).unflatten(0, call.keys.shape)
        return rows.masked_fill((call.keys < 0).view(*call.keys.shape, *[1] * (points.dim() - 1)), 0.0)

    features = call.features
    if call.layer is not None and call.shift is not None and call.relation is not None:
        features = features_of(call.layer, call.shift, call.relation)
    terms = PairScores(
        of_queries(call.q),
        None if call.pose is None else call.pose[..., :key_poses].transpose(-1, -2).unsqueeze(2),
        of_queries(call.reads),
        None if features is None else _turned(features, call).unsqueeze(5),
        None if call.extra is None else call.extra.unflatten(1, (call.num_poses, call.summed_poses)),
        call.factors,
        call.envelope,
    )
    k, v = ((call.v if t is None else t).transpose(0, 1) for t in (call.k, call.v))
    measure = None if call.log_measure is None else of_keys(call.log_measure)
    p = weights.probabilities(terms, lambda: of_keys(k), call.keys < 0 if call.padded else None, measure)
    p = p * _kept(call) if call.dropout else p
    return weights.weighted_sum(p, of_keys(v)).masked_fill((call.queries < 0).view(-1, 1, 1, 1), 0.0).transpose(0, 1)


def features_of(layer: Tensor, shift: Tensor, relation: Tensor) -> Tensor:
    """The features ``(1, H, F, ...)`` that a layer makes of a relation ``(H, D, ...)``."""
    inner = torch.tensordot(layer, relation, dims=([1], [1])) + shift.view(-1, *[1] * (relation.dim() - 1))
    return F.silu(inner).transpose(0, 1).unsqueeze(0)


def _turned(features: Tensor, call: Arguments) -> Tensor:
    """The features of all queries of a group, where ``features`` are those of the first of their ring."""
    if not call.ring:
        return features
    place = torch.arange(call.keys.shape[1], device=features.device)
    ahead = (place - call.queries[0].unsqueeze(1)) % call.ring
    return features.squeeze(4)[..., place - place % call.ring + ahead]


def _kept(call: Arguments) -> Tensor:
    """Factors of dropout on the probabilities ``(G, M, H, J or 1, A, P, K)``, drawn by the counter of the loop."""
    groups, queries = call.queries.shape

    def counted(number: int, *axes: int) -> Tensor:
        return torch.arange(number, device=call.v.device).view(-1, *axes)

    assert call.seed is not None
    # As points/normalization.h: of the head, then of the query, then of the row of scores.
    key = _mixed((call.seed & _LOW) + counted(len(call.v), 1, 1))
    key = _mixed(key ^ counted(groups * queries).view(groups, 1, 1, queries))
    rows = counted(call.num_poses * call.summed_poses, 1)
    key = _mixed(key + (call.seed >> 32) + rows)  # G, M, S, A
    # The keys of all poses side by side, without those that fill up at the end.
    of_pose = counted(call.keys.shape[1]).add(1).mul(call.keys >= 0).amax(1)
    at = counted(call.v.shape[2], 1) * of_pose.view(-1, 1, 1) + counted(call.keys.shape[1])  # G, P, K
    drawn = _mixed(key[..., None, None] + 0x9E3779B1 * at[:, None, None, None])
    rate = min(int(call.dropout * 2**32), 2**32 - 1)
    scale = 1 / (1 - call.dropout) if call.dropout < 1 else 0.0
    return (drawn >= rate).to(call.v.dtype).mul(scale).unflatten(2, (call.num_poses, call.summed_poses))


_LOW = 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """``mix`` of ``dropout.h``, with the lower halves of integers."""
    x = x & _LOW
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


_operator = Operator(
    "points",
    Arguments,
    len(_LEAVES),
    Passes(_forward_pass, _backward_pass, _empty, _plainly, _packaged),
)


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
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {call.q.device}"
    return why_not_built(PRECISE[call.q.dtype])


@constant_result
def why_not_built(dtype: torch.dtype) -> str | None:
    """Why there is no compiled loop for numbers of this type, if there is none."""
    return KERNEL.why_not_built(dtype)


def why_not_first(call: PointCall) -> str | None:
    """Why another backend is better for a call that this one could serve."""
    # A gradient by coordinates is a force, to be differentiated once more: no use of a loop with first derivatives.
    forces = call.query_points.coordinates.requires_grad and torch.is_grad_enabled() and not call.dropout
    return "coordinates require a gradient" if forces else None


class _CompiledChunks(Chunks):
    """The attention of one call, chunk by chunk, by the compiled loop."""

    keep = (torch.ops.escnn_attention.points.default,)
    on_rings = 4
    makes_features = True

    def groups(self, some: Chunk, seen: Tensor) -> Chunk:
        call = self.call
        alone = call.envelope is None and call.edges is None and seen.shape[3:4] == (1,)
        return some.by_ring() if some.arc is not None and alone and call.bias.num_features else some.whole()

    def combine(self, terms: PairScores, k: Tensor, v: Tensor, some: Chunk, seen: Tensor | None) -> Tensor:
        """The output of a chunk, of the terms of its scores."""
        query_poses = self.call.q.shape[3]
        summed = self.call.query == "all" and query_poses > 1
        pose, extra, features, reads = None, terms.extra, terms.features, terms.reads
        if features is not None and reads is not None and features.shape[5] > 1:
            # Functions of the poses of the keys, too: the loop gets what they are worth.
            worth = against(reads, features).permute(1, 2, 3, 5, 0, 4, 6)
            extra = worth if extra is None else extra + worth
            features = reads = None
        first = self.layer if reads is not None and features is None else None
        if terms.q is not None and terms.poses is not None:
            # All query poses see the same: where they do not, this loop does not serve.
            pose = terms.poses.squeeze(2).transpose(-1, -2)
        if extra is not None:
            rows = (self.call.bias.num_poses, query_poses if summed else 1)
            extra = extra.expand(v.shape[1], *rows, *extra.shape[3:]).flatten(1, 2)
        arguments = Arguments(
            q=None if terms.q is None else of_rows(terms.q),
            k=None if terms.q is None else k.transpose(0, 1),
            v=v.transpose(0, 1),
            reads=None if reads is None or (features is None and first is None) else of_rows(reads),
            features=None if features is None else features.squeeze(5),
            pose=pose,
            extra=extra,
            factors=terms.factors,
            envelope=terms.envelope,
            layer=None if first is None else first[0],
            shift=None if first is None else first[1],
            relation=None if first is None or seen is None else seen.squeeze(3).permute(1, 4, 0, 2, 3),
            queries=some.queries,
            keys=some.keys,
            log_measure=None if self.measure is None else self.measure.expand(-1, v.shape[2]),
            seed=None,
            num_poses=self.call.bias.num_poses,
            query_poses=query_poses,
            exclusive_keys=some.queries is some.keys,
            padded=some.padded,
            ring=0 if some.arc is None else some.arc[1],
            sum_query_poses=summed,
            normalize_by_count=self.call.normalization == "count",
            dropout=self.call.dropout,
        )
        return attend(arguments).transpose(0, 1)


attention = partial(attend_in_chunks, kind=_CompiledChunks, fastest=_NUMBERS_PER_CHUNK)
"""Attention between points by the compiled loop: see :func:`escnn_attention.functional.attention`."""

exported = partial(attend_in_export, kind=_CompiledChunks)
"""The same attention in a package into which the loop is linked."""


def of_rows(x: Tensor) -> Tensor:
    """The rows of all groups as projections leave them, from ``(G, M, H, J, A, X)`` to ``(M, G · A, H · J, X)``."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
