"""Caches of index tables, and of geometry that follows from coordinates within one pass through a network."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from escnn_attention.exporting.mode import constant_result, exporting

_T = TypeVar("_T")

_MOST_BYTES = 2**25
"""How much memory all tables may take that are kept, besides those that were asked for last."""


_tables: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
"""The tables that are kept, and the bytes of each; those that were asked for last are the last ones."""

_lock = Lock()


def constant_tables(make: Callable[..., _T]) -> Callable[..., _T]:
    """Remember the tensors that a function makes of numbers, strings, types and devices alone.

    Compilers take them as the constants that they are, instead of tracing how they were made. They are plain tensors,
    in whatever mode they are first asked for: those of inference mode could not be saved for a backward pass later, and
    those of an export have no numbers.
    """

    @constant_result
    @wraps(make)
    def find(*arguments: Any) -> _T:
        key = make, arguments
        with _lock:
            if (known := _tables.get(key)) is not None:
                _tables.move_to_end(key)
        tables: _T = _make_apart(key) if known is None else known[0]
        if _recording is not None:
            _recording.found.append((arguments, tables))
        return _as_in_mode(tables) if is_in_torch_dispatch_mode() else tables

    return find


def _make_apart(key: tuple[Callable[..., _T], tuple[Any, ...]]) -> _T:
    """The tables of a function and its arguments, which are kept."""
    # Modes, transforms, default devices and autocast belong to the thread that is in them.
    with ThreadPoolExecutor(max_workers=1) as thread:
        result = thread.submit(key[0], *key[1]).result()
    held = sum(t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, Tensor))
    with _lock:
        _tables.setdefault(key, (result, held))
        total = sum(size for _, size in _tables.values())
        while total > _MOST_BYTES and len(_tables) > 1:
            total -= _tables.popitem(last=False)[1][1]
    return result


def _as_in_mode(tables: _T) -> _T:
    """The tables, or stand-ins without numbers where there is a mode that lets nothing else through."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, FakeTensorMode) and not mode.allow_non_fake_inputs:
            return tree_map_only(Tensor, mode.from_tensor, tables)
    return tables


class Recording:
    """What passes find that was made before, whose memory a CUDA graph of them reads, and so has to hold.

    Args:
        inputs: tensors whose numbers change from replay to replay: nothing that is made of them is remembered, and
            they are not checked. None where passes run without a graph.

    Attributes:
        found: the arguments and the results.
    """

    def __init__(self, inputs: Iterable[Tensor] | None = None):
        self.in_graph, self._changing = inputs is not None, frozenset(map(id, inputs or ()))
        self.found: list[tuple[tuple[Any, ...], Any]] = []

    def __enter__(self) -> Recording:
        global _recording
        self._outer, _recording = _recording, self
        return self

    def __exit__(self, *_: object) -> None:
        global _recording
        _recording = self._outer

    def indices_among(self, tensors: Sequence[Tensor]) -> list[int]:
        """Which of these tensors of integers something was made of."""
        asked = {id(a) for arguments, _ in self.found for a in arguments}
        return [i for i, t in enumerate(tensors) if id(t) in asked and not t.is_floating_point()]

    def changes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether any of the arguments has other numbers in another replay."""
        return any(id(a) in self._changing for a in arguments)


# Of the process: the backward pass has threads of its own.
_recording: Recording | None = None


def in_graph() -> bool:
    """Whether a CUDA graph is recorded, which cannot wait for numbers, or gets warm."""
    return _recording is not None and _recording.in_graph


_found: ContextVar[dict[Any, Any] | None] = ContextVar("found", default=None)


@contextmanager
def shared_geometry() -> Iterator[None]:
    """Within this context, such as one pass through a network, :func:`cached` remembers what it has made."""
    if _unreadable() or _found.get() is not None:
        yield
        return
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def cached(make: Callable[..., _T], *arguments: Any) -> _T:
    """``make(*arguments)``, which is remembered within :func:`shared_geometry`, by the identity of tensors."""
    look_up: Callable[..., _T] = _outside(_look_up) if torch.compiler.is_compiling() else _look_up
    return look_up(make, *arguments)


def kept(make: Callable[..., _T], *arguments: Any) -> _T:
    """``make(*arguments)``, which is remembered for as long as the tensors among the arguments live unchanged.

    For what has to wait for a GPU, such as the sizes of clouds: all layers of a network are given the same tensor, and
    often all steps are. A change is noticed as autograd notices it. The result must hold none of the tensors and no
    view of one, or they would live for good.
    """
    look_up: Callable[..., _T] = _outside(_look_up_kept) if torch.compiler.is_compiling() else _look_up_kept
    result = look_up(make, *arguments)
    if _recording is not None:
        _recording.found.append((arguments, result))
    return result


def checked(check: Callable[..., None], *arguments: Any) -> None:
    """Check arguments, unless they were :func:`kept`; not in a CUDA graph, which cannot tell anybody."""
    if _recording is None or not _recording.in_graph:
        (_outside(_look_up_kept) if torch.compiler.is_compiling() else _look_up_kept)(check, *arguments)


def _outside(look_up: Callable[..., _T]) -> Callable[..., _T]:
    """A function that compilers do not trace, but exports do."""
    # As a decorator it would import the compiler for those who have no use for one.
    return look_up if exporting() else torch.compiler.disable(look_up)


def _unreadable() -> bool:
    """Whether Dynamo follows all that is done, as in strict exports: it cannot read context variables."""
    return exporting() and torch.compiler.is_dynamo_compiling()


def _look_up(make: Callable[..., _T], *arguments: Any) -> _T:
    found = None if _unreadable() else _found.get()
    if found is None:
        return make(*arguments)
    key = (make, *(id(a) if isinstance(a, Tensor) else a for a in arguments))
    if key not in found:
        # The arguments are held, so that no other tensor gets their identity.
        found[key] = make(*arguments), arguments
    result: _T = found[key][0]
    return result


_of_tensors: dict[Any, tuple[list[Any], list[weakref.ref[Tensor]], Any]] = {}

_MOST_KEPT = 64
"""How many results :func:`kept` remembers; the first ones give way."""


def _look_up_kept(make: Callable[..., _T], *arguments: Any) -> _T:
    changes = _recording is not None and _recording.changes(arguments)
    if changes or exporting() or (is_in_torch_dispatch_mode() and torch._guards.detect_fake_mode() is not None):
        return _look_up(make, *arguments)
    tensors: list[Tensor] = []
    state: list[Any] = []
    named: list[Any] = [make]
    for a in arguments:
        if isinstance(a, Tensor):
            if not _counts_changes(a):
                return _look_up(make, *arguments)
            tensors.append(a)
            state.append((a._version, a.data_ptr(), a.shape))
        named.append(id(a) if isinstance(a, Tensor) else a)
    key = tuple(named)
    try:
        before, references, result = _of_tensors.get(key, ([], [], None))
    except TypeError:  # an argument cannot be looked up
        return make(*arguments)  # which says what is wrong with it
    if tensors and before == state:
        for tensor, reference in zip(tensors, references, strict=True):
            if reference() is not tensor:  # the identity of a tensor that is gone may be that of another
                break
        else:
            return result  # type: ignore[no-any-return]
    result = _look_up(make, *arguments)
    if tensors and not for_this_call():
        # Bound here, as names of modules are gone when the interpreter ends; a reference is called with itself.
        forget = partial(_of_tensors.pop, key)
        _of_tensors[key] = state, [weakref.ref(t, forget) for t in tensors], result
        if len(_of_tensors) > _MOST_KEPT:
            with suppress(RuntimeError, StopIteration):  # other threads change it meanwhile
                _of_tensors.pop(next(iter(_of_tensors)), None)
    return result


def for_this_call() -> bool:
    """Whether what is made now is of no use to later calls.

    Results of inference mode cannot be saved for a backward pass; those of a transform of ``torch.func`` end with it.
    """
    return torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active()


def _counts_changes(tensor: Tensor) -> bool:
    """Whether a tensor counts how often its numbers are changed, and no array or process shares them."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_inference() and tensor.untyped_storage().resizable()
