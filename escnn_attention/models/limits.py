"""Limits on networks that are built from files: no larger than their weights."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from escnn_attention.models.description import DescriptionError

_ANY_SIZE = 1024
"""Every network may have numbers up to this one."""

_ORDER, _ORDER_OF_OTHERS = 128, 32
"""The largest number of a group of rotations in the plane or a field, and of any other group: escnn takes minutes."""

_EXTENT = 127
"""The largest extent of a kernel, a window or an image's patch, and the largest dilation."""

_SMALL, _TIMES = 1 << 27, 256
"""Tensors of a construction may have so many elements, and so many for each byte of weights: filters, tables, grids."""

_EXTENTS = ("stem", "kernel", "kernel_size", "attention_size", "patch_size", "dilation", "crops")


@contextlib.contextmanager
def within(description: Any, num_bytes: int, num_tensors: int) -> Iterator[None]:
    """A block that builds a network, and refuses to build one that is much larger than its weights.

    A kilobyte of JSON can ask for a billion channels, a million layers or a group of a million elements. The size of
    the weights bounds them: no number of channels, heads or classes exceeds the number of bytes, every layer has a
    tensor among the weights, and filters and tables are larger by a bounded factor. The numbers of the description are
    checked before the block runs. Tensors and parameters of this thread are counted while it runs.

    Raises:
        DescriptionError: a number is too large, before anything is built; or a tensor, or the sum of the registered
            tensors, before it is filled.

    >>> try:
    ...     with within({"widths": [10**9]}, num_bytes=4000, num_tensors=2):
    ...         torch.nn.Linear(1, 10**9)
    ... except DescriptionError as error:
    ...     print(error)
    widths: got 1000000000, needed at most 4000 for weights of 4000 bytes
    """
    check_numbers(description, num_bytes)
    most = _SMALL + _TIMES * num_bytes
    hooks = (
        register_module_parameter_registration_hook(_counter("parameters", 2 * num_tensors, 2 * num_bytes)),
        register_module_buffer_registration_hook(_counter("buffers", math.inf, most)),
    )
    try:
        with _Limited(most):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def check_numbers(description: Any, num_bytes: int) -> None:
    """Check that a description has no number that is too large for a network with weights of so many bytes."""
    _check_numbers(description, "", max(_ANY_SIZE, num_bytes), f"for weights of {num_bytes} bytes")


def _check_numbers(value: Any, name: str, most: int, why: str) -> None:
    if isinstance(value, int) and abs(value) > most:
        raise DescriptionError(f"{name}: got {value}, needed at most {most} {why}")
    if isinstance(value, Mapping):
        path = str(value.get("class_path"))
        if path.startswith("escnn.") or not {"irrep", "bl_regular"}.isdisjoint(value):
            others = path.startswith("escnn.") and not path.startswith(
                ("escnn.gspaces.rot2d", "escnn.group.cyclic", "escnn.nn.")
            )
            most, why = _ORDER_OF_OTHERS if others else _ORDER, "for a group"
        for key, part in value.items():
            extent = key in _EXTENTS or key.endswith(tuple(f"_{extent}" for extent in _EXTENTS))
            inner = (_EXTENT, "for an extent") if extent else (most, why)
            _check_numbers(part, name if key in ("init_args", "dict_kwargs") else f"{name}.{key}".lstrip("."), *inner)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_numbers(part, name, most, why)


def _counter(what: str, most: float, most_elements: float) -> Callable[..., None]:
    """A hook that counts the tensors that modules register in this thread."""
    thread, count, elements = threading.get_ident(), 0, 0

    def registered(_: torch.nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        nonlocal count, elements
        if tensor is None or threading.get_ident() != thread:
            return
        count, elements = count + 1, elements + tensor.numel()
        if count > most or elements > most_elements:
            raise DescriptionError(f"it has more {what} than belong to its weights")

    return registered


class _Limited(TorchDispatchMode):
    """Refuses tensors of more than ``most`` elements before they are made."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for size in args:
            if isinstance(size, (list, tuple)) and all(isinstance(n, int) for n in size):
                elements = math.prod(size)
                if elements > self.most:
                    raise DescriptionError(f"it has a tensor of {elements} elements, more than belong to its weights")
        return func(*args, **(kwargs or {}))
