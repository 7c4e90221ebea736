"""Attention between points on the CPU, by a loop that is compiled for the machine.

``points.cpp`` takes the keys of a query as many at a time as a vector of the processor has lanes, reads keys and
values where they lie, and keeps no score but those of a few queries; the backward pass makes them again. What location
adds to the scores comes as functions that queries read, or as numbers: see
:class:`~escnn_attention.functional.points.bias.ScoreTerms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import recompute
from escnn_attention.functional.native.build import FOLDER, Kernel
from escnn_attention.functional.native.fields import FIELDS

__all__ = ["Inputs", "Options", "attend", "why_unsupported_grid"]

_KERNEL = Kernel(FOLDER / "points.cpp", "attention between points", FIELDS["points"])
_VECTOR_BYTES = 64  # Of the longest vectors.
_CACHED_NUMBERS = 2**19  # Of a group whose scores stay in the cache.
_FEWEST_GROUPS = 8  # To be shared among threads. For any number of these the result is the same, so they do not count.


def why_unsupported_grid(q: Tensor) -> str | None:
    """Why these queries cannot be served."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}"
    return _why_not_built(working_precision(q.dtype))


@torch.compiler.assume_constant_result
def _why_not_built(dtype: torch.dtype) -> str | None:
    return _KERNEL.why_not_built(dtype)


class Inputs(NamedTuple):
    """The tensors that there are gradients for.

    Attributes:
        q, k: ``(M, G · A, J, C)``, scaled, and ``(M, points, P, C)``; None where their products are not in the scores.
        v: ``(M, points, P, C)``.
        reads, features: ``(M, G · A, J, F)`` and ``(M or 1, H, F, G, A, K)``, or None.
        pose: ``(M or 1, H, C, P)``, what a pose of the keys is worth to a query, or None.
        extra: ``(M, S, P or 1, G, A, K)``, with S = H, or H · J where all query poses contribute; None without.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    reads: Tensor | None
    features: Tensor | None
    pose: Tensor | None
    extra: Tensor | None


_GRADIENTS = [f"grad_{name}" for name in Inputs._fields]
_NO_GRADIENTS = dict.fromkeys(("grad", *_GRADIENTS, "weights", "grad_scores"))


@dataclass(frozen=True)
class Options:
    """The other arguments of the attention of a chunk.

    Attributes:
        queries: ``(G, A)``.
        keys: ``(G, K)``.
        log_measure: ``(points, P)`` or None.
        num_poses: H, of the output.
        query_poses: J.
        exclusive_keys: whether no two groups have keys in common.
        padded: whether anything fills up.
        sum_query_poses: whether all query poses contribute to every output pose.
        normalize_by_count: whether scores are divided by the measure of the keys, instead of a softmax.
        dropout: the probability.
        plain: the same from :class:`Inputs` by operations that can be differentiated twice.
    """

    queries: Tensor
    keys: Tensor
    log_measure: Tensor | None
    num_poses: int
    query_poses: int
    exclusive_keys: bool
    padded: bool
    sum_query_poses: bool
    normalize_by_count: bool
    dropout: float
    plain: Callable[..., Tensor]

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


@torch.compiler.disable
def attend(inputs: Inputs, options: Options) -> Tensor:
    """The output ``(M, G · A, H, C)``, in single precision at least."""
    seed = int(torch.randint(2**62, ())) if options.dropout else 0
    dtype = working_precision(inputs.v.dtype)
    if inputs.pose is not None:
        # Whole vectors.
        inputs = inputs._replace(
            pose=F.pad(inputs.pose, (0, -inputs.pose.shape[-1] % (_VECTOR_BYTES // dtype.itemsize)))
        )
    tensors = (None if t is None else t.to(dtype).contiguous() for t in inputs)
    out: Tensor = _Attention.apply(*tensors, options, seed)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, options, seed = arguments
        inputs = Inputs(*tensors)
        heads, queries = len(inputs.v), options.queries.numel()
        out = inputs.v.new_zeros(heads, queries, options.num_poses, inputs.v.shape[-1])
        log_sums = inputs.v.new_empty(heads, queries, options.score_rows)
        _run(inputs, options, seed, {**_NO_GRADIENTS, "out": out, "log_sums": log_sums})
        ctx.save_for_backward(*tensors, log_sums)
        ctx.rest = options, seed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, log_sums = ctx.saved_tensors
        options, seed = ctx.rest
        needed = ctx.needs_input_grad[: len(tensors)]
        if torch.is_grad_enabled():
            if options.dropout:
                raise RuntimeError(
                    "backend 'native' has no second derivatives with dropout; needed backend='neighbours'"
                )
            return (*recompute(options.plain, tensors, needed, grad), None, None)
        inputs = Inputs(*tensors)
        # Every number of these is written, where nothing fills up.
        whole = () if options.padded else ("features", "extra")
        grads = [
            None if not need else torch.empty_like(t) if name in whole else torch.zeros_like(t)
            for name, t, need in zip(Inputs._fields, tensors, needed, strict=True)
        ]
        weights = grad_scores = None
        if not _group_by_group(inputs, options):
            heads, queries, stride = len(inputs.v), options.queries.numel(), _row_stride(inputs, options)
            weights = inputs.v.new_empty(heads, queries, options.num_poses, stride)
            grad_scores = inputs.v.new_empty(heads, queries, options.grad_rows, stride)
        tensors = {"out": None, "log_sums": log_sums, "grad": grad.contiguous()}
        tensors |= {"weights": weights, "grad_scores": grad_scores, **dict(zip(_GRADIENTS, grads, strict=True))}
        _run(inputs, options, seed, tensors)
        return (*grads, None, None)


def _group_by_group(inputs: Inputs, options: Options) -> bool:
    """Whether the keys of a group get their gradients right after its queries.

    Then no two groups have keys in common, there are several for each thread, and the scores of one fit into the cache.
    """
    groups, queries = options.queries.shape
    rows = options.num_poses + options.grad_rows
    scores = len(inputs.v) * options.score_rows
    held = queries * max(rows * _row_stride(inputs, options), scores * options.keys.shape[1])
    return options.exclusive_keys and groups >= _FEWEST_GROUPS and held <= _CACHED_NUMBERS


def _row_stride(inputs: Inputs, options: Options) -> int:
    """The numbers of a row of scores: one vector more, since that at the end of a pose reaches beyond it."""
    width = _VECTOR_BYTES // inputs.v.element_size()
    return (-(-inputs.v.shape[2] * options.keys.shape[1] // width) + 1) * width


def _run(inputs: Inputs, options: Options, seed: int, tensors: dict[str, Tensor | None]) -> None:
    """Run the loop on further tensors, which it reads or fills."""
    v, features, pose, extra = inputs.v, inputs.features, inputs.pose, inputs.extra
    measure = options.log_measure
    values: dict[str, Any] = {
        **inputs._asdict(),
        **tensors,
        "queries": options.queries.long().contiguous(),
        "keys": options.keys.long().contiguous(),
        "log_measure": None if measure is None else measure.to(v.dtype).contiguous(),
        "heads": len(v),
        "points": v.shape[1],
        "groups": len(options.queries),
        "group_queries": options.queries.shape[1],
        "group_keys": options.keys.shape[1],
        "num_poses": options.num_poses,
        "query_poses": options.query_poses,
        "key_poses": v.shape[2],
        "channels": v.shape[3],
        "num_features": 0 if features is None else features.shape[2],
        "feature_heads": 0 if features is None else len(features),
        "pose_heads": 0 if pose is None else len(pose),
        "padded_key_poses": 0 if pose is None else pose.shape[3],
        "extra_poses": 0 if extra is None else extra.shape[2],
        "row_stride": _row_stride(inputs, options),
        "sum_query_poses": options.sum_query_poses,
        "normalize_by_count": options.normalize_by_count,
        "group_by_group": _group_by_group(inputs, options),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "dropout": options.dropout,
    }
    _KERNEL.run(v.dtype, values)
