"""What is worked out of coordinates once for a whole network, such as who the neighbours of a point are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["cached", "shared_geometry"]

_T = TypeVar("_T")

_found: ContextVar[dict[Any, Any] | None] = ContextVar("found", default=None)


@contextmanager
def shared_geometry() -> Iterator[None]:
    """Within this context, such as one pass through a network, :func:`cached` remembers what it has made."""
    if _found.get() is not None:
        yield
        return
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


@torch.compiler.disable
def cached(make: Callable[..., _T], *arguments: Any) -> _T:
    """``make(*arguments)``, which is remembered within :func:`shared_geometry`.

    Tensors are the same if they are the same object: nobody changes one within a pass.
    """
    found = _found.get()
    if found is None:
        return make(*arguments)
    key = (make, *(id(a) if isinstance(a, Tensor) else a for a in arguments))
    if key not in found:
        # The arguments are held, so that no other tensor gets their identity.
        found[key] = make(*arguments), arguments
    result: _T = found[key][0]
    return result
