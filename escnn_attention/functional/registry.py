"""Backends of an operator, the choice among them, and the memory that they may use, on grids and between points."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from escnn_attention.exporting.mode import exporting, packaging
from escnn_attention.functional.call import Call

_C = TypeVar("_C", bound=Call)


def _nothing(_: Any) -> None:
    """No reason."""


@dataclass(frozen=True, eq=False)
class Backend(Generic[_C]):
    """One way to compute the attention.

    The reasons depend on shapes, types, devices and modes of a call, and not on its numbers: they are asked once for
    each of these.

    Attributes:
        attention: the function of a call, folded where ``folds``; it gives ``(M, B, N, |H|, C)``.
        why_unsupported: why this backend cannot serve a call, or None if it can.
        isolates_nonfinite: whether it keeps values that are not finite from those who do not see them, without help.
        folds: whether the call is reduced first to terms that are added to the keys.
        why_not_first: why ``"auto"`` passes it over for a call that it can serve, or None.
        serves_two_sets: whether keys may have other positions than queries.
        counts: whether it serves ``normalization="count"``.

    Example:
        >>> from escnn_attention.functional import BACKENDS
        >>> reference = BACKENDS["reference"]
        >>> reference.folds, reference.serves_two_sets
        (False, True)
    """

    attention: Callable[[_C], Tensor]
    why_unsupported: Callable[[_C], str | None] = _nothing
    isolates_nonfinite: bool = False
    folds: bool = True
    why_not_first: Callable[[_C], str | None] = _nothing
    serves_two_sets: bool = False
    counts: bool = False


@dataclass(frozen=True)
class _Plan(Generic[_C]):
    """How calls of one kind are computed: by which backend, and after which reductions."""

    name: str
    backend: Backend[_C]
    folds: bool


_MOST_PLANS = 1024


class Registry(Generic[_C]):
    """The backends of one operator.

    Args:
        backends: by name; ``"reference"`` serves every call.
        preference: the names that ``"auto"`` tries on a type of device, the fastest first.
        fold: the attention to compute instead, and what makes of its output that of the call, None where both are one.
        exported: those of programs that PyTorch exports, which run on any machine; the first that serves the call.
        packaged: that of packages into which compiled loops are linked, where it serves the call.
        isolate: keeps values that are not finite from those who do not see them.

    Example:
        >>> from escnn_attention.functional import ON_GRIDS
        >>> list(ON_GRIDS.backends), ON_GRIDS.preference("cuda")
        (['reference', 'blocked', 'native', 'triton', 'dense', 'linear'], ('triton', 'dense', 'blocked', 'linear'))
    """

    def __init__(
        self,
        backends: Mapping[str, Backend[_C]],
        *,
        preference: Callable[[str], tuple[str, ...]],
        fold: Callable[[_C], tuple[_C, Callable[[Tensor], Tensor] | None]],
        exported: Sequence[Backend[_C]],
        packaged: Backend[_C],
        isolate: Callable[[_C], _C] | None = None,
    ):
        self.backends = dict(backends)
        self.preference, self.fold, self.isolate = preference, fold, isolate
        self.exported, self.packaged = exported, packaged
        self._plans: dict[Hashable, _Plan[_C]] = {}

    def check(self, backend: str) -> str:
        """``backend``, if there is one of this name.

        Raises:
            ValueError: there is none.
        """
        if backend != "auto" and backend not in self.backends:
            raise ValueError(f"backend: got {backend!r}, needed 'auto', {', '.join(map(repr, self.backends))}")
        return backend

    def compute(self, call: _C, backend: str = "auto") -> Tensor:
        """The attention of a call, by the backend that is named or by the fastest that serves it.

        Raises:
            ValueError: an unknown backend, or one that cannot serve this call (it says why), or poses that a mode does
                not have.
            MemoryError, torch.OutOfMemoryError: an allocation failed; it says what would fit.
        """
        plan, unfold = self._exported(call) if exporting() else self.plan(call, backend), None
        if plan.folds:
            call, unfold = self.fold(call)
        if self.isolate is not None and not plan.backend.isolates_nonfinite:
            call = self.isolate(call)
        try:
            out = plan.backend.attention(call)
            return out if unfold is None else unfold(out)
        except RuntimeError as error:
            if torch.compiler.is_compiling() or (explained := explain_shortage(error, call, plan.name)) is None:
                raise
            raise explained from error

    def plan(self, call: _C, backend: str) -> _Plan[_C]:
        """How to compute a call, which is worked out once for all calls of its kind."""
        key = None if torch.compiler.is_compiling() else call.key()
        if key is None:
            return self._choose(call, backend)
        # Whoever replaces a backend gets another plan.
        key = (backend, *self.backends.values(), key)
        try:
            plan = self._plans.get(key)
        except TypeError:  # sizes that a tracer keeps open cannot be looked up
            return self._choose(call, backend)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._choose(call, backend)
        return plan

    def forget(self) -> None:
        """Choose anew, where something other than the call has changed."""
        self._plans.clear()

    def _choose(self, call: _C, backend: str) -> _Plan[_C]:
        self.check(backend)
        _check_poses(call)
        names = (*self.preference(call.q.device.type), "reference") if backend == "auto" else (backend,)
        entries = [(name, self.backends[name]) for name in names]
        return self._first(call, entries, asks=backend == "auto")

    def _first(self, call: _C, entries: Sequence[tuple[str, Backend[_C]]], asks: bool = True) -> _Plan[_C]:
        """The plan of the first of some backends that serves a call, and where ``asks`` is as good as the next."""
        reason: str | None = None
        for name, entry in entries:
            if not entry.serves_two_sets and not call.one_set:
                reason = "keys have other positions than queries"
            elif not entry.counts and call.normalization == "count":
                reason = "it is for a softmax"
            else:
                with _nothing_saved():
                    left = self.fold(call)[0] if entry.folds else call
                reason = (entry.why_not_first(left) if asks else None) or entry.why_unsupported(left)
                if reason is None:
                    return _Plan(name, entry, left is not call)
        raise ValueError(f"backend: {entries[-1][0]!r} cannot serve this call: {reason}")

    def _exported(self, call: _C) -> _Plan[_C]:
        """How to compute a call in a program that PyTorch exports: for any machine, not for this one."""
        _check_poses(call)
        linked = [self.packaged] if packaging() and not call.dropout else []
        return self._first(call, [("exported", entry) for entry in (*linked, *self.exported)])


def _nothing_saved() -> AbstractContextManager[Any]:
    """Where nothing is saved for a backward pass: a checkpoint expects both of its passes to save the same."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # which know no such hooks
        return nullcontext()
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_nothing, torch.as_tensor)


def _check_poses(call: Call) -> None:
    """Queries and keys have the poses that the modes need."""
    query_poses, key_poses = call.q.shape[3], call.k.shape[3]
    if call.query == "own" and query_poses != call.num_poses:
        raise ValueError(
            f"query: got 'own' for {query_poses} poses of queries, needed the {call.num_poses} poses of the output"
        )
    if call.keys == "own" and key_poses not in (1, query_poses):
        raise ValueError(
            f"keys: got 'own' for {key_poses} poses of keys, needed the {query_poses} poses of the queries"
        )


_limit: int | None = None


class working_memory(AbstractContextManager["working_memory"]):
    """Bound the memory that attention holds for scores and widened vectors, beyond its inputs and outputs.

    The backends work in chunks, and this decides how large they are: never larger than what is fastest, and never
    smaller than what belongs to one tile or one query. It is a setting of the process, which holds inside a ``with``
    statement, or until it is set again. Results differ by rounding only.

    By default chunks are as large as is fastest, 2 MB a thread for ``"native"``, 64 MB for ``"blocked"`` and
    ``"dense"``, and 1/64 of the GPU's memory for ``"triton"``, but at least 128 MB. ``"reference"`` works in one chunk,
    whatever is set.

    Args:
        num_bytes: the bound; None for the default.

    Raises:
        ValueError: it is not positive.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention, working_memory
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None)
        >>> x = fields(torch.randn(1, 8, 9, 9))
        >>> y = layer(x)
        >>> with working_memory(2**20):
        ...     same = layer(x)
        >>> torch.allclose(y.tensor, same.tensor, atol=1e-5)
        True
    """

    def __init__(self, num_bytes: int | None):
        if num_bytes is not None and not num_bytes > 0:
            raise ValueError(f"num_bytes: got {num_bytes!r}, needed a positive number of bytes or None")
        global _limit
        self._before = _limit
        _limit = num_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _limit
        _limit = self._before


def chunk_size(fastest: int, bytes_each: int, copies: int) -> int:
    """The entries of a chunk, where ``fastest`` is best and ``copies`` of a chunk are held at once.

    An entry takes ``bytes_each``, or four where it is worked on in single precision.
    """
    if _limit is None:
        return fastest
    return max(1, min(fastest, _limit // (copies * max(4, bytes_each))))


def refuse_the_impossible(call: Call) -> None:
    """Raise an error if all scores at once are more than the machine could hold."""
    device = call.q.device
    if device.type == "cpu":
        available = _physical_memory()
    elif device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = None
    if available is not None and _scores(call) > available:
        raise MemoryError(_advice(call, "reference"))


def explain_shortage(error: RuntimeError, call: Call, backend: str) -> Exception | None:
    """An error that says which settings would fit, if an allocation failed; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        # Of the same kind, so that what halves batches on it still does.
        return torch.OutOfMemoryError(f"{_advice(call, backend)}\n{error}")
    if "can't allocate memory" in str(error):
        return MemoryError(f"{_advice(call, backend)}\n{error}")
    return None


def _scores(call: Call) -> int:
    """The bytes of all scores."""
    heads, batch, positions, poses, _ = call.q.shape
    pairs = call.num_poses * (poses if call.query == "all" else 1)
    return batch * heads * pairs * positions * math.prod(call.k.shape[2:4]) * max(4, call.q.element_size())


def _advice(call: Call, backend: str) -> str:
    scores = _scores(call)
    linear = (3 * call.q.numel() + 3 * call.k.numel()) * call.q.element_size()
    _, batch, positions, poses, _ = call.q.shape
    advice = []
    if backend == "reference":
        advice.append(f'backend="auto" holds about {_readable(linear)} and chunks of the scores')
    else:
        advice.append("a bound for the chunks: escnn_attention.working_memory(2**24)")
    if call.query == "all" and poses > 1:
        own = scores // poses
        advice.append(f'query="own" has 1/{poses} of the scores, {_readable(own)}')
    if batch > 1:
        advice.append(f"one image instead of {batch} has {_readable(scores // batch)} of scores")
    advice.append('a smaller kernel_size, or keys="own", has fewer of them')
    return (
        f"attention: out of memory with backend {backend!r}: the scores of {batch} x {positions} positions are "
        f"{_readable(scores)}. What takes less: {'; '.join(advice)}."
    )


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _readable(num_bytes: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes = num_bytes / 1000  # type: ignore[assignment]
    return f"{num_bytes:.3g} TB"
