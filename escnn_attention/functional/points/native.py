"""Attention between points on the CPU, by a loop that is compiled for the machine.

``points.cpp`` takes the keys of a query as many at a time as a vector of the processor has lanes, reads keys and
values where they lie, and keeps no score but those of a few queries; the backward pass makes them again. What location
adds to the scores comes as functions that queries read, or as numbers: see
:class:`~escnn_attention.functional.points.attention.ScoreTerms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.functional.autograd import gradients_again
from escnn_attention.functional.native.build import FOLDER, Kernel

__all__ = ["Inputs", "Options", "attend", "why_not_served"]

_KERNEL = Kernel(
    FOLDER / "points.cpp",
    "attention between points",
    tensors=[
        *("q", "k", "v", "queries", "keys", "reads", "features", "pose", "extra", "log_measure", "out", "sums", "grad"),
        *(f"grad_{name}" for name in ("q", "k", "v", "reads", "features", "pose", "extra")),
        *("weights", "grad_scores"),
    ],
    integers=[
        *("heads", "points", "groups", "group_queries", "group_keys", "frames", "query_poses", "key_poses", "channels"),
        *("num_features", "feature_heads", "pose_heads", "poses", "extra_poses"),
        *("summed", "counted", "disjoint", "threads", "seed", "row"),
    ],
    numbers=["dropout"],
)
_LINE = 64  # The bytes of the longest vectors.
_MOST = 2**19  # The numbers of a group in the cache.
_SEVERAL = 8  # Groups. Not counted by threads: for any number of them the result is the same.


def why_not_served(q: Tensor) -> str | None:
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


@dataclass(frozen=True)
class Options:
    """The rest of a piece of attention.

    Attributes:
        queries: ``(G, A)``.
        keys: ``(G, K)``.
        log_measure: ``(points, P)`` or None.
        frames: H.
        query_poses: J.
        disjoint: whether no two groups have keys in common.
        padded: whether anything fills up.
        summed: whether all query poses contribute to every output pose.
        counted: whether weights are shares of scores instead of a softmax.
        dropout: the probability.
        plain: the same from :class:`Inputs` by operations that can be differentiated twice.
    """

    queries: Tensor
    keys: Tensor
    log_measure: Tensor | None
    frames: int
    query_poses: int
    disjoint: bool
    padded: bool
    summed: bool
    counted: bool
    dropout: float
    plain: Callable[..., Tensor]


@torch.compiler.disable
def attend(inputs: Inputs, options: Options) -> Tensor:
    """The output ``(M, G · A, H, C)``, in single precision at least."""
    seed = int(torch.randint(2**62, ())) if options.dropout else 0
    dtype = working_precision(inputs.v.dtype)
    if inputs.pose is not None:
        # Whole vectors.
        inputs = inputs._replace(pose=F.pad(inputs.pose, (0, -inputs.pose.shape[-1] % (_LINE // dtype.itemsize))))
    tensors = (None if t is None else t.to(dtype).contiguous() for t in inputs)
    out: Tensor = _Attention.apply(*tensors, options, seed)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, options, seed = arguments
        inputs = Inputs(*tensors)
        rows, scores = options.queries.numel(), options.frames * (options.query_poses if options.summed else 1)
        out = inputs.v.new_zeros(len(inputs.v), rows, options.frames, inputs.v.shape[-1])
        sums = inputs.v.new_empty(len(inputs.v), rows, scores)
        _run(inputs, options, seed, out=out, sums=sums)
        ctx.save_for_backward(*tensors, sums)
        ctx.rest = options, seed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sums = ctx.saved_tensors
        options, seed = ctx.rest
        needed = ctx.needs_input_grad[: len(tensors)]
        if torch.is_grad_enabled():
            if options.dropout:
                raise RuntimeError(
                    "backend 'native' has no second derivatives with dropout; needed backend='neighbours'"
                )
            return (*gradients_again(options.plain, tensors, needed, grad), None, None)
        inputs = Inputs(*tensors)
        # Every number of these is written, where nothing fills up.
        whole = () if options.padded else ("features", "extra")
        grads = [
            None if not need else torch.empty_like(t) if name in whole else torch.zeros_like(t)
            for name, t, need in zip(Inputs._fields, tensors, needed, strict=True)
        ]
        heads, rows = len(inputs.v), options.queries.numel()
        row, alone = _row(inputs, options), _one_by_one(inputs, options)
        scores = options.query_poses if options.summed else options.frames
        _run(
            inputs,
            options,
            seed,
            sums=sums,
            grad=grad.contiguous(),
            weights=None if alone else inputs.v.new_empty(heads, rows, options.frames, row),
            grad_scores=None if alone else inputs.v.new_empty(heads, rows, scores, row),
            **{f"grad_{name}": t for name, t in zip(Inputs._fields, grads, strict=True)},
        )
        return (*grads, None, None)


def _one_by_one(inputs: Inputs, options: Options) -> bool:
    """Whether groups are taken one by one: no keys in common, several for each thread, and each fits into the cache."""
    groups, queries = options.queries.shape
    rows = options.frames + (options.query_poses if options.summed else options.frames)
    scores = len(inputs.v) * options.frames * (options.query_poses if options.summed else 1)
    held = queries * max(rows * _row(inputs, options), scores * options.keys.shape[1])
    return options.disjoint and groups >= _SEVERAL and held <= _MOST


def _row(inputs: Inputs, options: Options) -> int:
    """The numbers of a row of scores: one vector more, since that at the end of a pose reaches beyond it."""
    width = _LINE // inputs.v.element_size()
    return (-(-inputs.v.shape[2] * options.keys.shape[1] // width) + 1) * width


def _run(inputs: Inputs, options: Options, seed: int, **tensors: Tensor | None) -> None:
    """Run the loop on further tensors, which it reads or fills."""
    v, features, pose, extra = inputs.v, inputs.features, inputs.pose, inputs.extra
    measure = options.log_measure
    indices = {
        "queries": options.queries.long().contiguous(),
        "keys": options.keys.long().contiguous(),
        "log_measure": None if measure is None else measure.to(v.dtype).contiguous(),
    }
    numbers = {
        "heads": len(v),
        "points": v.shape[1],
        "groups": len(options.queries),
        "group_queries": options.queries.shape[1],
        "group_keys": options.keys.shape[1],
        "frames": options.frames,
        "query_poses": options.query_poses,
        "key_poses": v.shape[2],
        "channels": v.shape[3],
        "num_features": 0 if features is None else features.shape[2],
        "feature_heads": 0 if features is None else len(features),
        "pose_heads": 0 if pose is None else len(pose),
        "poses": 0 if pose is None else pose.shape[3],
        "extra_poses": 0 if extra is None else extra.shape[2],
        "row": _row(inputs, options),
        "summed": options.summed,
        "counted": options.counted,
        "disjoint": _one_by_one(inputs, options),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "dropout": options.dropout,
    }
    _KERNEL.run(v.dtype, numbers, **inputs._asdict(), **indices, **tensors)
