"""The profile of a training step.

torch's profiler times every operation. Forward operations run inside marks around the modules; backward operations
belong to the forward operation with their sequence number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from escnn_attention.functional import ON_GRIDS
from escnn_attention.plain.norms import LayerNorm
from escnn_attention.plain.projections import FromPoses, PoseLinear, Scalars, ToPoses

_KINDS = ("attention", "projections", "norms", "activations", "optimizer")
_MARKED = [(ON_GRIDS, "compute", "attention"), (LayerNorm, "forward", "norms")]
_MARKED += [(torch.nn.SiLU, "forward", "activations")]
_MARKED += [(layer, "in_parts", "projections") for layer in (ToPoses, Scalars)]
_MARKED += [(layer, "forward", "projections") for layer in (FromPoses, PoseLinear, torch.nn.Linear)]
_MARK = "benchmark: "

_Forward = dict[tuple[int | None, int], str | None]  # the kinds of forward operations, by thread and sequence number


def shares(step: Callable[[], object], device: str) -> dict[str, float]:
    """Seconds of one step by kind.

    Bookkeeping is the rest of the step's time: pooling, cropping, encodings, copies between layouts, checks, Python,
    and on CUDA waiting.
    """
    cuda = device == "cuda"
    with marks(), profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    events = list(profiler.events() or ())
    forward = forward_kinds(events)
    found = dict.fromkeys(_KINDS, 0.0)
    for event in events:
        if (kind := kind_of(event, forward)) is not None:
            found[kind] += 1e-6 * (event.self_device_time_total if cuda else event.self_cpu_time_total)
    return {**found, "bookkeeping": max(0.0, seconds - sum(found.values()))}


@contextmanager
def marks() -> Iterator[None]:
    """Marks around the modules of a kind and around the attention itself, for all modules of the process."""
    with ExitStack() as stack:
        for owner, name, kind in _MARKED:
            stack.enter_context(mock.patch.object(owner, name, _marked(getattr(owner, name), kind)))
        yield


def _marked(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(_MARK + kind):
            return function(*arguments, **options)

    return call


def forward_kinds(events: list[FunctionEvent]) -> _Forward:
    """The kind of forward operations."""
    kinds: _Forward = {}
    # An operation without gradients has the number of the next one that has them: the last one of a number counts.
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.sequence_nr >= 0 and not any(_is_backward(e) for e in _line(event)):
            kinds[event.thread, event.sequence_nr] = kind_of(event, {})
    return kinds


def kind_of(event: FunctionEvent, forward: _Forward) -> str | None:
    """The kind of an operation; recomputation inside a backward operation belongs to that operation."""
    for ancestor in _line(event):
        if ancestor.name.startswith("Optimizer.step"):
            return "optimizer"
        if ancestor.name.startswith(_MARK):
            return ancestor.name.removeprefix(_MARK)
        if _is_backward(ancestor):
            return forward.get((ancestor.fwd_thread, ancestor.sequence_nr))
    return None


def _is_backward(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def _line(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """An event and its enclosing events, from the inside out."""
    ancestor: FunctionEvent | None = event
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.cpu_parent
