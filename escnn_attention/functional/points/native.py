"""Attention between points on the CPU, by a loop that is compiled for the machine.

``points.cpp`` takes the keys of a query as many at a time as a vector of the processor has lanes, reads keys and
values where they lie, and keeps no score but those of a few queries; the backward pass makes them again. What location
adds to the scores comes as functions that queries read, or as numbers: see
:class:`~escnn_attention.functional.points.bias.PairScores`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._export import packaging
from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import Operator, Passes
from escnn_attention.functional.grid.call import Normalization
from escnn_attention.functional.native.build import FOLDER, Kernel, num_threads
from escnn_attention.functional.native.fields import FIELDS
from escnn_attention.functional.native.packaged import attention_between_points
from escnn_attention.functional.points.bias import PairScores
from escnn_attention.functional.points.weights import Weights
from escnn_attention.geometry.cache import constant_result

__all__ = ["Arguments", "attend", "prepared", "why_unsupported_grid"]

_KERNEL = Kernel(FOLDER / "points.cpp", "attention between points", FIELDS["points"])
_VECTOR_BYTES = 64  # Of the longest vectors.
_CACHED_NUMBERS = 2**19  # Of a group whose scores stay in the cache.
_FEWEST_GROUPS = 8  # To be shared among threads. For any number of these the result is the same, so they do not count.


def why_unsupported_grid(q: Tensor) -> str | None:
    """Why these queries cannot be served."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}"
    return _why_not_built(working_precision(q.dtype))


@constant_result
def _why_not_built(dtype: torch.dtype) -> str | None:
    return _KERNEL.why_not_built(dtype)


class Arguments(NamedTuple):
    """What there is to compute, in tensors and numbers that an operator takes.

    Attributes:
        q, k: ``(M, G · A, J, C)``, scaled, and ``(M, points, P, C)``; None where their products are not in the scores.
        v: ``(M, points, P, C)``.
        reads, features: ``(M, G · A, J, F)`` and ``(M or 1, H, F, G, A, K)``, or None.
        pose: ``(M or 1, H, C, P)``, what a pose of the keys is worth to a query, or None; in the loop P is filled up
            to whole vectors.
        extra: ``(M, S, P or 1, G, A, K)``, with S = H, or H · J where all query poses contribute; None without.
        factors: ``(M, G, A, K)``, which multiply the weights of values, or None.
        queries: ``(G, A)``, points; -1 fills up.
        keys: ``(G, K)``, points; -1 fills up.
        log_measure: ``(points, P)`` or None.
        seed: ``(1,)``, for dropout.
        num_poses: H, of the output.
        query_poses: J.
        exclusive_keys: whether no two groups have keys in common.
        padded: whether anything fills up.
        sum_query_poses: whether all query poses contribute to every output pose.
        normalize_by_count: whether scores are divided by the measure of the keys, instead of a softmax.
        dropout: the probability.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    reads: Tensor | None
    features: Tensor | None
    pose: Tensor | None
    extra: Tensor | None
    factors: Tensor | None
    queries: Tensor
    keys: Tensor
    log_measure: Tensor | None
    seed: Tensor | None
    num_poses: int
    query_poses: int
    exclusive_keys: bool
    padded: bool
    sum_query_poses: bool
    normalize_by_count: bool
    dropout: float

    @property
    def summed_poses(self) -> int:
        """How many query poses contribute to an output pose."""
        return self.query_poses if self.sum_query_poses else 1

    @property
    def score_rows(self) -> int:
        """S: how many rows of scores a query has."""
        return self.num_poses * self.summed_poses

    @property
    def grad_rows(self) -> int:
        """How many rows of gradients of scores a query has: output poses are summed if query poses are."""
        return self.query_poses if self.sum_query_poses else self.num_poses

    @property
    def row_stride(self) -> int:
        """The numbers of a row of scores: one vector more, since that at the end of a pose reaches beyond it."""
        width = _VECTOR_BYTES // self.v.element_size()
        return (-(-self.v.shape[2] * self.keys.shape[1] // width) + 1) * width

    @property
    def group_by_group(self) -> bool:
        """Whether the keys of a group get their gradients right after its queries.

        Then no two groups have keys in common, there are several for each thread, and the scores of one fit into the
        cache.
        """
        groups, queries = self.queries.shape
        rows = self.num_poses + self.grad_rows
        scores = len(self.v) * self.score_rows
        held = queries * max(rows * self.row_stride, scores * self.keys.shape[1])
        return self.exclusive_keys and groups >= _FEWEST_GROUPS and held <= _CACHED_NUMBERS

    @property
    def leaves(self) -> dict[str, Tensor | None]:
        """The tensors of the call that have gradients, by name."""
        return dict(zip(_LEAVES, self[:8], strict=True))


_LEAVES = Arguments._fields[:8]  # The first ones have gradients.
_GRADIENTS = [f"grad_{name}" for name in _LEAVES]
_NO_GRADIENTS = dict.fromkeys(("grad", *_GRADIENTS, "weights", "grad_scores"))


def attend(arguments: Arguments) -> Tensor:
    """The output ``(M, G · A, H, C)``, in single precision at least."""
    exact = prepared(arguments)
    if exact.log_measure is not None and exact.log_measure.requires_grad and torch.is_grad_enabled():
        return _plainly(exact)  # The loop has no gradient of the measure.
    return _packaged(exact) if packaging() else _operator(exact)


def prepared(arguments: Arguments) -> Arguments:
    """The arguments as the loop takes them: contiguous, of one precision, in whole vectors, with a seed."""
    dtype, pose, measure = working_precision(arguments.v.dtype), arguments.pose, arguments.log_measure
    if pose is not None:
        # Whole vectors.
        arguments = arguments._replace(pose=F.pad(pose, (0, -pose.shape[-1] % (_VECTOR_BYTES // dtype.itemsize))))
    exact: dict[str, Any] = {
        name: None if t is None else t.to(dtype).contiguous() for name, t in arguments.leaves.items()
    }
    return arguments._replace(
        **exact,
        queries=arguments.queries.long().contiguous(),
        keys=arguments.keys.long().contiguous(),
        log_measure=None if measure is None else measure.to(dtype).contiguous(),
        seed=torch.randint(2**62, (1,), device=arguments.v.device) if arguments.dropout else None,
    )


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output, and for what the backward pass makes weights from."""
    heads, queries = len(call.v), call.queries.numel()
    out = call.v.new_zeros(heads, queries, call.num_poses, call.v.shape[-1])
    return out, call.v.new_empty(heads, queries, call.score_rows, 2)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = _empty(call)
    _run(call, {**_NO_GRADIENTS, "out": out, "sums": sums})
    return out, sums


def _backward_pass(
    call: Arguments, grad: Tensor, _: Tensor | None, sums: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    # Every number of these is written, where nothing fills up.
    whole = () if call.padded else ("features", "extra")
    grads = [
        None if not need or t is None else torch.empty_like(t) if name in whole else torch.zeros_like(t)
        for (name, t), need in zip(call.leaves.items(), needed, strict=True)
    ]
    filled: dict[str, Tensor | None] = {"out": None, "sums": sums, "grad": grad.contiguous()}
    filled |= {"weights": None, "grad_scores": None, **dict(zip(_GRADIENTS, grads, strict=True))}
    if not call.group_by_group:
        shape = (len(call.v), call.queries.numel())
        filled["weights"] = call.v.new_empty(*shape, call.num_poses, call.row_stride)
        filled["grad_scores"] = call.v.new_empty(*shape, call.grad_rows, call.row_stride)
    _run(call, filled)
    return grads


def _plainly(call: Arguments) -> Tensor:
    """The output by operations that autograd looks through."""
    key_poses = call.v.shape[2]
    normalization: Normalization = "count" if call.normalize_by_count else "softmax"
    weights = Weights(call.num_poses, call.query_poses, call.sum_query_poses, False, normalization, 0.0)

    def of_queries(rows: Tensor | None) -> Tensor | None:
        """What belongs to the queries of each group, from ``(M, G · A, J, F)`` to ``(G, M, H or 1, J, A, F)``."""
        if rows is None:
            return None
        return rows.unflatten(1, call.queries.shape).permute(1, 0, 3, 2, 4).unsqueeze(weights.own_axis)

    def of_keys(points: Tensor) -> Tensor:
        """What belongs to the keys of each group, ``(G, K, ...)``, with zeros for keys that fill up."""
        rows = points.index_select(0, call.keys.clamp(min=0).flatten()).unflatten(0, call.keys.shape)
        return rows.masked_fill((call.keys < 0).view(*call.keys.shape, *[1] * (points.dim() - 1)), 0.0)

    terms = PairScores(
        of_queries(call.q),
        None if call.pose is None else call.pose[..., :key_poses].transpose(-1, -2).unsqueeze(2),
        of_queries(call.reads),
        None if call.features is None else call.features.unsqueeze(5),
        None if call.extra is None else call.extra.unflatten(1, (call.num_poses, call.summed_poses)),
        call.factors,
    )
    k, v = ((call.v if t is None else t).transpose(0, 1) for t in (call.k, call.v))
    measure = None if call.log_measure is None else of_keys(call.log_measure)
    p = weights.probabilities(terms, lambda: of_keys(k), call.keys < 0 if call.padded else None, measure)
    p = p * _kept(call) if call.dropout else p
    return weights.weighted_sum(p, of_keys(v)).masked_fill((call.queries < 0).view(-1, 1, 1, 1), 0.0).transpose(0, 1)


def _kept(call: Arguments) -> Tensor:
    """What dropout multiplies the probabilities ``(G, M, H, J or 1, A, P, K)`` with, by the counter of the loop."""
    groups, queries = call.queries.shape

    def counted(number: int, *axes: int) -> Tensor:
        return torch.arange(number, device=call.v.device).view(-1, *axes)

    assert call.seed is not None
    # As points/normalization.h: of the head, then of the query, then of the row of scores.
    key = _mixed((call.seed & _LOW) + counted(len(call.v), 1, 1))
    key = _mixed(key ^ counted(groups * queries).view(groups, 1, 1, queries))
    rows = counted(call.score_rows, 1)
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


def _fields(call: Arguments) -> dict[str, Any]:
    """What the loop is told of the arguments, all that is neither an output nor a gradient, but how it takes groups."""
    v, features, pose, extra = call.v, call.features, call.pose, call.extra
    return {
        **call.leaves,
        "queries": call.queries,
        "keys": call.keys,
        "log_measure": call.log_measure,
        "heads": len(v),
        "points": v.shape[1],
        "groups": call.queries.shape[0],
        "group_queries": call.queries.shape[1],
        "group_keys": call.keys.shape[1],
        "num_poses": call.num_poses,
        "query_poses": call.query_poses,
        "key_poses": v.shape[2],
        "channels": v.shape[3],
        "num_features": 0 if features is None else features.shape[2],
        "feature_heads": 0 if features is None else len(features),
        "pose_heads": 0 if pose is None else len(pose),
        "padded_key_poses": 0 if pose is None else pose.shape[3],
        "extra_poses": 0 if extra is None else extra.shape[2],
        "row_stride": call.row_stride,
        "sum_query_poses": call.sum_query_poses,
        "normalize_by_count": call.normalize_by_count,
        "threads": num_threads(),
        "seed": 0 if call.seed is None else int(call.seed),
        "dropout": call.dropout,
    }


def _run(call: Arguments, tensors: dict[str, Tensor | None]) -> None:
    """Run the loop on further tensors, which it reads or fills."""
    _KERNEL.run(call.v.dtype, {**_fields(call), **tensors, "group_by_group": call.group_by_group})


def _packaged(call: Arguments) -> Tensor:
    """The output of the loop in a package, which decides by itself how it takes groups."""
    filled = {**_NO_GRADIENTS, "out": None, "sums": None, "group_by_group": False}
    return attention_between_points(call.v.dtype, {**_fields(call), **filled})


_operator = Operator(
    "points",
    Arguments,
    len(_LEAVES),
    Passes(_forward_pass, _backward_pass, _empty, _plainly),
)
