"""Whether PyTorch is writing down what is done, for a file that runs where this package is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch

__all__ = ["exporting", "packaging", "refuse_scripting", "with_loops"]

_with_loops: ContextVar[bool] = ContextVar("with_loops", default=False)


def exporting() -> bool:
    """Whether ``torch.export``, what stands on it such as ``torch.onnx.export``, or ``torch.jit.trace`` is following.

    What it writes down is to run anywhere, for any number of images: no operator but those of PyTorch, and no decision
    by that number.
    """
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


@contextmanager
def with_loops() -> Iterator[None]:
    """Within this context what is written down is for a package into which compiled loops are linked."""
    token = _with_loops.set(True)
    try:
        yield
    finally:
        _with_loops.reset(token)


def packaging() -> bool:
    """Whether what is written down is for a package into which compiled loops are linked."""
    # Dynamo, which strict exports go through, cannot read the variable; packages are made without it.
    return exporting() and not torch.compiler.is_dynamo_compiling() and _with_loops.get()


def refuse_scripting(module: Any) -> NoReturn:
    """Say why there is no TorchScript of a module; ``torch.jit.script`` asks it as ``__prepare_scriptable__``.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"torch.jit.script: {type(module).__name__} is Python that TorchScript cannot read, and PyTorch retires it;"
        " needed torch.export.export, or torch.jit.trace"
    )
