"""Whether and how kernels of Triton run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from escnn_attention.geometry.cache import constant_result

_T = TypeVar("_T")

_MOST_KEPT = 1024
"""How many results :func:`by_shapes` remembers of a function; the first ones give way."""


def interpreted() -> bool:
    """Whether Triton runs kernels by NumPy."""
    return os.environ.get("TRITON_INTERPRET") == "1"


DEVICES = frozenset({"cuda", "cpu"} if interpreted() else {"cuda"})
"""Where kernels replace PyTorch's operations: on the CPU where they are interpreted, to look into them."""


def has_kernels(device: torch.device) -> bool:
    """Whether kernels replace PyTorch's operations on a device."""
    return device.type in DEVICES and why_not_run(device.type) is None


@constant_result
def why_not_run(device: str) -> str | None:
    """Why kernels of Triton cannot run on a type of device."""
    if not _installed():
        return "it needs Triton"
    if interpreted():
        return None if device in ("cpu", "cuda") else f"it needs CPU or CUDA, got {device}"
    if device != "cuda":
        return f"it needs CUDA, got {device}"
    if not _has_compiler(os.environ.get("CC")):
        return "Triton needs a C compiler, and there is none"
    return None


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _has_compiler(chosen: str | None) -> bool:
    return any(shutil.which(name) for name in (chosen, "cc", "gcc", "clang") if name)


@cache
def kernels(module: str) -> ModuleType:
    """A module of kernels in :mod:`escnn_attention.functional`, which imports Triton."""
    return importlib.import_module(f"escnn_attention.functional.{module}")


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Where a launch goes to a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def by_shapes(function: Callable[..., _T]) -> Callable[..., _T]:
    """Remember what a function makes of its arguments, of which it reads the shapes and types of tensors alone.

    Before every launch of a kernel the host waits for it.
    """
    found: dict[Any, _T] = {}

    def look_up(*arguments: Any) -> _T:
        key = _shapes(arguments)
        result = found.get(key)
        if result is None:
            result = found[key] = function(*arguments)
            if len(found) > _MOST_KEPT:
                found.pop(next(iter(found)), None)
        return result

    return look_up


def _shapes(arguments: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(
        (a.shape, a.dtype, a.device) if isinstance(a, Tensor) else _shapes(a) if isinstance(a, (tuple, list)) else a
        for a in arguments
    )


def power_of_two(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, n - 1).bit_length()
