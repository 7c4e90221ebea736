"""Arguments of the compiled loops: one annotated list makes the Python arguments, the C structure and its header.

A loop has two named tuples: the arguments, and the results, which it fills or which its backward pass reads. Each field
that C++ reads is annotated, a tensor by an :class:`Array` and a number by what it means::

    class Arguments(NamedTuple):
        x: Annotated[Tensor, Array("rows, channels", gradient="void")]
        factor: Annotated[float, "of the output"]

    class Results(NamedTuple):
        out: Annotated[Tensor | None, Array("rows, channels")] = None

``struct Arguments`` in C++ has pointers to these arrays, ``grad_x``, the factor, and the sizes ``rows`` and
``channels``. The headers lie beside the sources, so that a compiler needs no Python. To write them again::

    python -m escnn_attention.functional.native.arguments

A test compares them with the lists, and a library whose structure has another size is an error where it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import operator
import struct
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from escnn_attention.functional.native import build
from escnn_attention.functional.native.build import NotBuilt
from escnn_attention.functional.native.shipped import shipped_library
from escnn_attention.geometry.cache import constant_result

_logger = logging.getLogger(__name__)

LOOPS = ("grid.native", "points.native", "points.pair_mlp", "irreps")
"""The modules of :mod:`escnn_attention.functional` that have a compiled loop, a ``KERNEL``."""

Arguments = TypeVar("Arguments", bound=tuple)  # type: ignore[type-arg]
Results = TypeVar("Results", bound=tuple)  # type: ignore[type-arg]


class Array(NamedTuple):
    """A contiguous tensor that a loop reads or fills.

    Attributes:
        axes: the sizes, by name. A name that stands alone is a member of the structure.
        meaning: of the numbers.
        element: the type of the numbers in C; ``void`` is single or double precision, whichever the loop is built for.
        gradient: the type of the numbers of its gradient, if it has one.
    """

    axes: str
    meaning: str = ""
    element: Literal["void", "int64_t"] = "void"
    gradient: Literal["", "void", "double"] = ""


class Members(NamedTuple):
    """The members of a structure: pointers, whole numbers, numbers, in the order in which they lie in memory."""

    arrays: list[Tensor | None]
    integers: list[int]
    numbers: list[float]


@constant_result
def num_threads() -> int:
    """How many threads a loop uses; compiled programs hold it as a constant."""
    return torch.get_num_threads()


class Structure(Generic[Arguments, Results]):
    """The C structure of a loop.

    Args:
        arguments: the named tuple of the arguments.
        results: the named tuple of what the loop fills, and of what its backward pass reads besides the arguments.

    Attributes:
        differentiable: the names of the arguments that have gradients.
    """

    def __init__(self, arguments: type[Arguments], results: type[Results]):
        self._source = arguments.__module__
        fields, filled = _annotated(arguments), _annotated(results)
        arrays = {name: field for name, field in fields.items() if isinstance(field[1], Array)}
        place = {name: i for i, name in enumerate(arguments._fields)}  # type: ignore[attr-defined]
        self.differentiable = tuple(name for name, (_, array) in arrays.items() if array.gradient)
        self._arrays = [place[name] for name in arrays]
        given = {name: hint for name, (hint, array) in fields.items() if not isinstance(array, Array)}
        integers = [name for name, hint in given.items() if hint in (int, bool)]
        doubles = [name for name, hint in given.items() if hint is float]
        self._integers, self._doubles = [place[name] for name in integers], [place[name] for name in doubles]
        # Where the sizes that are not given are read, from arrays that are always there first.
        sizes: dict[str, list[tuple[int, int]]] = {}
        for name, (_, array) in sorted(arrays.items(), key=lambda item: item[1][0] is not Tensor):
            for axis, size in enumerate(array.axes.split(", ")):
                if size.isidentifier() and size not in given:
                    sizes.setdefault(size, []).append((place[name], axis))
        self._sizes = list(sizes.values())
        self._no_gradients = [None] * len(self.differentiable)
        self.packed = struct.Struct(
            f"@{len(arrays) + len(filled) + len(self.differentiable)}P{len(integers) + len(sizes) + 1}q{len(doubles)}d"
        )
        self._lines = [
            *(_declared(name, *field, constant="const ") for name, field in arrays.items()),
            *(_declared(name, *field) for name, field in filled.items()),
            *(
                f"{array.gradient}* grad_{name};  // as {name}, or null"
                for name, (_, array) in arrays.items()
                if array.gradient
            ),
            *(f"int64_t {name};  // {fields[name][1]}" for name in integers),
            *(f"int64_t {name};" for name in sizes),
            "int64_t threads;",
            *(f"double {name};  // {fields[name][1]}" for name in doubles),
        ]

    @property
    def num_bytes(self) -> int:
        """The size of the structure."""
        return self.packed.size

    def members(
        self, arguments: Arguments, results: Results, gradients: Sequence[Tensor | None] | None = None
    ) -> Members:
        """The members of the structure.

        Args:
            arguments: the arguments.
            results: what is filled or read besides them.
            gradients: of the differentiable arguments, None for those that need none; without it, of none.
        """
        arrays = list(map(arguments.__getitem__, self._arrays))
        # Programs take no bool beside symbolic sizes: its positive is a whole number.
        integers = list(map(operator.pos, map(arguments.__getitem__, self._integers)))
        for places in self._sizes:
            for i, axis in places:
                if (array := arguments[i]) is not None:
                    integers.append(array.shape[axis])
                    break
            else:
                integers.append(0)
        integers.append(num_threads())
        arrays += results
        arrays += self._no_gradients if gradients is None else gradients
        return Members(arrays, integers, list(map(arguments.__getitem__, self._doubles)))

    def header(self) -> str:
        """The text of the C++ header: the structure, and a function that gives its size."""
        lines = [
            f"// Arguments of the loop, made of the lists in {self._source}. To write it again:",
            "//     python -m escnn_attention.functional.native.arguments",
            "",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "// Sizes without a comment are those of the arrays, or 0 where there is none.",
            'extern "C" struct Arguments {',
            *(f"    {line}" for line in self._lines),
            "};",
            "",
            'extern "C" int64_t escnn_attention_size() { return sizeof(Arguments); }',
            "",
        ]
        return "\n".join(lines)


class Kernel(Generic[Arguments, Results]):
    """A loop in C++ for numbers of either precision, which is loaded, or built, where it is first asked for.

    The file defines ``int escnn_attention(const Arguments*)``, which gives 0 unless memory was short, for numbers of
    the type ``NUMBER``, and ``int64_t escnn_attention_size()``, which gives the size of ``Arguments``.

    Args:
        source: the file.
        purpose: what takes longer without it, for a warning.
        arguments, results: the lists of its ``Arguments``
            (:class:`~escnn_attention.functional.native.arguments.Structure`).

    Attributes:
        header: the file of ``Arguments`` in C++.
    """

    def __init__(self, source: Path, purpose: str, arguments: type[Arguments], results: type[Results]):
        self.source, self._purpose = source, purpose
        self.header = source.with_suffix("") / "arguments.h"
        self.structure = Structure(arguments, results)
        self._found: dict[torch.dtype, Callable[..., int] | NotBuilt] = {}

    def _function(self, dtype: torch.dtype) -> Callable[..., int] | NotBuilt:
        """The loop, or why there is none: what failed once is not tried at every call."""
        if dtype not in self._found:
            number = {torch.float32: "float", torch.float64: "double"}[dtype]
            try:
                shipped = shipped_library(f"{self.source.stem}-{number}")
                self._found[dtype] = self._checked(shipped or build.library(self.source, f"NUMBER={number}"))
            except NotBuilt as reason:
                if not any(isinstance(found, NotBuilt) for found in self._found.values()):
                    _logger.warning("%s takes several times longer on the CPU: %s", self._purpose, reason)
                self._found[dtype] = reason
        return self._found[dtype]

    def _checked(self, built: ctypes.CDLL) -> Callable[..., int]:
        """The loop of a library that was built for the same arguments."""
        size_of = built.escnn_attention_size
        size_of.restype = ctypes.c_int64
        got, needed = size_of(), self.structure.num_bytes
        if got != needed:
            raise RuntimeError(f"{self.source.name}: got a library whose arguments have {got} bytes, needed {needed}")
        function: Callable[..., int] = built.escnn_attention
        return function

    def why_not_built(self, dtype: torch.dtype) -> str | None:
        """Why there is no loop for numbers of this type, if there is none."""
        function = self._function(dtype)
        return str(function) if isinstance(function, NotBuilt) else None

    def run(
        self,
        dtype: torch.dtype,
        arguments: Arguments,
        results: Results,
        gradients: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Run the loop on contiguous tensors.

        Args:
            dtype: of the numbers.
            arguments: the arguments.
            results: what the loop fills, or its backward pass reads.
            gradients: in the backward pass, those of the differentiable arguments; None for those that need none.

        Raises:
            RuntimeError: there is not enough memory.
        """
        function = self._found.get(dtype) or self._function(dtype)
        assert not isinstance(function, NotBuilt)
        arrays, integers, doubles = self.structure.members(arguments, results, gradients)
        pointers = [0 if t is None else t.data_ptr() for t in arrays]
        if function(self.structure.packed.pack(*pointers, *integers, *doubles)):
            raise RuntimeError(f"native: can't allocate memory for {self._purpose}")


def _annotated(kind: type) -> dict[str, tuple[Any, Any]]:
    """The type and the annotation of the fields that C++ reads."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is Annotated:
            found[name] = typing.get_args(hint)
    return found


def _declared(name: str, hint: Any, array: Array, constant: str = "") -> str:
    """The declaration of the pointer to an array."""
    meaning = f", {array.meaning}" if array.meaning else ""
    null = "" if hint is Tensor else ", or null"
    return f"{constant}{array.element}* {name};  // ({array.axes}){meaning}{null}"


if __name__ == "__main__":
    for module in LOOPS:
        kernel = importlib.import_module(f"escnn_attention.functional.{module}").KERNEL
        kernel.header.write_text(kernel.structure.header(), encoding="utf-8")
