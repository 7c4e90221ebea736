"""Whether PyTorch is writing down what is done, for a file that runs where this package is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._higher_order_ops import while_loop as loop_of_pytorch

__all__ = [
    "exporting",
    "name_sizes_apart",
    "packaging",
    "refuse_scripting",
    "while_loop",
    "why_no_loops",
    "with_loops",
]

_with_loops = False  # of the process: Dynamo, which follows what is in a loop, reads no context variable

_SAYS_SO_ALWAYS = torch.__version__ < "2.12"
"""Whether Dynamo has it that all that it follows is for a file."""

_OLDEST_WITH_LOOPS = "2.13"
"""The version of PyTorch whose loops have gradients, and use tensors of sizes that are only known when they run."""

_NAMES = 64
"""More than there are sizes in a loop that are only known when a program runs."""


def exporting() -> bool:
    """Whether ``torch.export``, what stands on it such as ``torch.onnx.export``, or ``torch.jit.trace`` is following.

    What it writes down is to run anywhere, for any number of images: no operator but those of PyTorch, and no decision
    by that number.
    """
    if _SAYS_SO_ALWAYS and torch.compiler.is_dynamo_compiling():
        return _followed_for_a_file()
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _followed_for_a_file() -> bool:
    """Whether what Dynamo follows is for a file."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return torch.compiler._is_exporting_flag or InstructionTranslator.current_tx().export


def _run_by_dynamo(function: Callable[..., Any]) -> None:
    """Have Dynamo run a function, in place of following what it does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_run_by_dynamo(_followed_for_a_file)


@contextmanager
def with_loops() -> Iterator[None]:
    """Within this context what is written down is for a package into which compiled loops are linked."""
    global _with_loops
    before, _with_loops = _with_loops, True
    try:
        yield
    finally:
        _with_loops = before


def packaging() -> bool:
    """Whether what is written down is for a package into which compiled loops are linked."""
    return exporting() and _with_loops


def name_sizes_apart() -> None:
    """Give the sizes that follow, which are only known when a program runs, names that are in no :func:`while_loop`.

    Dynamo names sizes anew there, from the first on, and confuses the names of a tensor that has several.
    """
    mode = None if torch.compiler.is_dynamo_compiling() else torch._guards.detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        with mode.shape_env.ignore_fresh_unbacked_symbols():
            for _ in range(_NAMES):
                mode.shape_env.create_unbacked_symint()


def why_no_loops() -> str | None:
    """Why no :func:`while_loop` can be written down, if that is so."""
    if torch.__version__ < _OLDEST_WITH_LOOPS:
        return f"got PyTorch {torch.__version__}, needed {_OLDEST_WITH_LOOPS} or later, for a loop in a program"
    return None


def _refuse_loops() -> NoReturn:
    raise NotImplementedError(f"torch.export of attention between points: {why_no_loops()}")


_run_by_dynamo(_refuse_loops)  # which would not tell the message of what it follows


def while_loop(
    condition: Callable[..., Tensor], body: Callable[..., tuple[Tensor, ...]], carried: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """What ``carried`` has become when the condition no longer holds, in a loop that is written down as one.

    Args:
        condition: of ``carried``.
        body: makes the next of ``carried``, new tensors of the same shapes. It uses any other tensors, too, but no
            sizes that are only known when the program runs, other than those of tensors.
        carried: at first.

    Raises:
        NotImplementedError: a PyTorch whose loops cannot be written down.
    """
    if why_no_loops():
        _refuse_loops()
    out: tuple[Tensor, ...]
    if torch.compiler.is_dynamo_compiling():
        out = loop_of_pytorch(condition, body, carried)
        return out
    # Dynamo would compare what it is to follow with what it has followed before, in other programs, of whose sizes it
    # cannot know whether they are the same.
    for code in loop_of_pytorch.__code__.co_consts:
        if isinstance(code, CodeType):
            torch._dynamo.eval_frame.remove_from_cache(code)
    # Sizes that are free are so already, and those of tables are not.
    with torch._dynamo.config.patch(assume_static_by_default=True):
        out = loop_of_pytorch(condition, body, carried)
    return out


def refuse_scripting(module: Any) -> NoReturn:
    """Say why there is no TorchScript of a module; ``torch.jit.script`` asks it as ``__prepare_scriptable__``.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"torch.jit.script: {type(module).__name__} is Python that TorchScript cannot read, and PyTorch retires it;"
        " needed torch.export.export, or torch.jit.trace"
    )
