"""Loops in programs of ``torch.export``, and sizes that are only known when a program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from escnn_attention.exporting.mode import constant_result

_OLDEST = "2.13"
"""The version of PyTorch whose loops have gradients, and use tensors of sizes that are only known when they run."""

_NAMES = 64
"""More than there are sizes in a loop that are only known when a program runs."""


def why_no_loops() -> str | None:
    """Why no program can have a :func:`while_loop`, if that is so."""
    if torch.__version__ < _OLDEST:
        return f"got PyTorch {torch.__version__}, needed {_OLDEST} or later, for a loop in a program"
    return None


@constant_result  # Dynamo runs it, in place of following it, and so shows the message.
def _refuse_loops() -> NoReturn:
    raise NotImplementedError(f"torch.export of attention between points: {why_no_loops()}")


def name_sizes_apart() -> None:
    """Give later sizes, which are only known when a program runs, names that are in no :func:`while_loop`.

    Dynamo names sizes anew there, from the first on, and confuses the names of a tensor that has several.
    """
    mode = None if torch.compiler.is_dynamo_compiling() else torch._guards.detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        with mode.shape_env.ignore_fresh_unbacked_symbols():
            for _ in range(_NAMES):
                mode.shape_env.create_unbacked_symint()


def while_loop(
    condition: Callable[..., Tensor], body: Callable[..., tuple[Tensor, ...]], carried: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The last of ``carried`` in a loop that goes on while a condition of them holds: one loop in the program.

    The body makes the next of ``carried``, new tensors of the same shapes. It uses any other tensors, too, but no sizes
    that are only known when the program runs, other than those of tensors.
    """
    if why_no_loops():
        _refuse_loops()
    from torch._higher_order_ops.utils import _hop_compile_and_call
    from torch._higher_order_ops.while_loop import while_loop_op

    out: tuple[Tensor, ...]
    if torch.compiler.is_dynamo_compiling():
        out = while_loop_op(condition, body, carried, ())  # type: ignore[arg-type]
        return out

    def loop(*arguments: Any) -> Any:
        return while_loop_op(*arguments)

    # Code of its own: Dynamo would compare this loop with those of other programs, and cannot know whether their sizes
    # are the same.
    loop.__code__ = loop.__code__.replace()
    # Sizes that are free are so already, and those of tables are not.
    with torch._dynamo.config.patch(assume_static_by_default=True):
        out = _hop_compile_and_call(loop, (condition, body, carried, ()))
    return out
