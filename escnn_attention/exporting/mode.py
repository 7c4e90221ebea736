"""Whether PyTorch is exporting, and what stands in a program in place of a function.

A program runs where this package is not, for any number of images or points: it has PyTorch's operators only, and no
decision that depends on a size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_for_package = False  # of the process: Dynamo, which follows what is in a loop, reads no context variable

_ALWAYS_EXPORTING = torch.__version__ < "2.12"
"""Whether ``is_exporting`` is True for all that Dynamo follows, exported or not."""


def constant_result(function: _F) -> _F:
    """Have compilers take what a function returns for a constant, as ``torch.compiler.assume_constant_result`` does.

    torch's own function imports the compiler, which takes longer than all else that is imported here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exporting() -> bool:
    """Whether ``torch.export``, what stands on it such as ``torch.onnx.export``, or ``torch.jit.trace`` is running."""
    if _ALWAYS_EXPORTING and torch.compiler.is_dynamo_compiling():
        return _dynamo_exports()
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


@constant_result
def _dynamo_exports() -> bool:
    """Whether what Dynamo follows is for a program."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return torch.compiler._is_exporting_flag or InstructionTranslator.current_tx().export


@contextmanager
def for_package() -> Iterator[None]:
    """Within this context programs are for packages, into which compiled loops are linked."""
    global _for_package
    before, _for_package = _for_package, True
    try:
        yield
    finally:
        _for_package = before


def packaging() -> bool:
    """Whether PyTorch is exporting a program for a package, into which compiled loops are linked."""
    return exporting() and _for_package


def in_programs(replacement: Callable[..., Any]) -> Callable[[_F], _F]:
    """Decorate a function that programs have a replacement of, with the same values."""
    return _replaced(exporting, replacement)


def in_packages(replacement: Callable[..., Any]) -> Callable[[_F], _F]:
    """Decorate a function that programs for packages have a replacement of: see :func:`in_programs`."""
    return _replaced(packaging, replacement)


def _replaced(asked: Callable[[], bool], replacement: Callable[..., Any]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (replacement if asked() else function)(*args, **kwargs)

        return cast(_F, choose)

    return decorate


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor as it is; in a program in the order of its axes, since there it may have any."""
    return x.clone(memory_format=torch.contiguous_format) if exporting() else x


def refuse_scripting(module: Any) -> NoReturn:
    """Say why there is no TorchScript of a module; ``torch.jit.script`` calls it as ``__prepare_scriptable__``.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"torch.jit.script: {type(module).__name__} is Python that TorchScript cannot read, and PyTorch retires it;"
        " needed torch.export.export, or torch.jit.trace"
    )
