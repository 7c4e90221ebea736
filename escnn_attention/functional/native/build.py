"""C++ of this package as libraries, built where they are first needed.

A library is built by the compiler that is there, for the processor that is there. It is kept in the folder that
``ESCNN_ATTENTION_CACHE`` names, ``~/.cache/escnn_attention`` without it, under a name that changes with the source, the
compiler and the processor. The compiler is ``CXX``, or the first of g++, clang++ and c++.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from escnn_attention.functional.native.fields import Fields

__all__ = ["FOLDER", "Kernel", "NotBuilt", "find_compiler", "library"]

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""Where the sources are."""

_OPTIONS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # what is not a number stays so
]
# What means the processor that is there; compilers differ in which they know, and without it take any of its kind.
_PROCESSORS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])


class NotBuilt(OSError):
    """There is no library, and why."""


class Kernel:
    """A loop in C++ for numbers of either precision, which is built where it is first asked for.

    The file defines ``int escnn_attention(const Arguments*)``, which gives 0 unless memory was short, for numbers of
    the type ``NUMBER``, and ``int64_t escnn_attention_size()``, which gives the size of ``Arguments``.

    Args:
        source: the file.
        purpose: what takes longer without it, for a warning.
        fields: of its ``Arguments``.
    """

    def __init__(self, source: Path, purpose: str, fields: Fields):
        self._source = source
        self._purpose = purpose
        self._names, self._optional = fields.names, fields.optional
        self._arguments = fields.structure()
        self._found: dict[torch.dtype, Callable[..., int] | NotBuilt] = {}

    def _function(self, dtype: torch.dtype) -> Callable[..., int] | NotBuilt:
        """The loop, or why there is none: what failed once is not tried at every call."""
        if dtype not in self._found:
            number = {torch.float32: "float", torch.float64: "double"}[dtype]
            try:
                self._found[dtype] = self._checked(library(self._source, f"NUMBER={number}"))
            except NotBuilt as reason:
                if not any(isinstance(found, NotBuilt) for found in self._found.values()):
                    _logger.warning("%s takes several times longer on the CPU: %s", self._purpose, reason)
                self._found[dtype] = reason
        return self._found[dtype]

    def _checked(self, built: ctypes.CDLL) -> Callable[..., int]:
        """The loop of a library that was built for the same arguments."""
        size_of = built.escnn_attention_size
        size_of.restype = ctypes.c_int64
        got, needed = size_of(), ctypes.sizeof(self._arguments)
        if got != needed:
            raise RuntimeError(f"{self._source.name}: got a library whose arguments have {got} bytes, needed {needed}")
        function: Callable[..., int] = built.escnn_attention
        return function

    def why_not_built(self, dtype: torch.dtype) -> str | None:
        """Why there is no loop for numbers of this type, if there is none."""
        function = self._function(dtype)
        return str(function) if isinstance(function, NotBuilt) else None

    def run(self, dtype: torch.dtype, values: Mapping[str, Tensor | float | None]) -> None:
        """Run the loop on contiguous tensors, which it reads or fills.

        Args:
            dtype: of the numbers.
            values: all fields by name; None for an optional tensor that there is not.

        Raises:
            TypeError: a field is missing, or is none of the loop's, or is None without being optional.
            RuntimeError: there is not enough memory, or the library was built for other arguments.
        """
        function = self._function(dtype)
        assert not isinstance(function, NotBuilt)
        given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items() if v is not None}
        if values.keys() != self._names or (len(given) < len(values) and self._names - given.keys() - self._optional):
            raise TypeError(self._what_is_wrong(values))
        if function(ctypes.byref(self._arguments(**given))):
            raise RuntimeError(f"native: can't allocate memory for {self._purpose}")

    def _what_is_wrong(self, values: Mapping[str, Tensor | float | None]) -> str:
        """Which fields are missing, are none of the loop's, or are None without being optional."""
        wrong = {
            "no": self._names - values.keys(),
            "unknown": values.keys() - self._names,
            "None for": {name for name, value in values.items() if value is None} & (self._names - self._optional),
        }
        got = " and ".join(f"{what} {', '.join(sorted(names))}" for what, names in wrong.items() if names)
        return f"{self._source.name}: got {got}, needed its fields, each once"


@cache
def library(source: Path, *definitions: str) -> ctypes.CDLL:
    """The library of a C++ file.

    Args:
        source: the file. It may include headers of its folder and of those in it.
        definitions: macros, ``NAME=VALUE``.

    Raises:
        NotBuilt: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    processor, target = _processor(compiler)
    options = [*_OPTIONS, *processor, *(f"-D{d}" for d in definitions)]
    files = [source, *sorted(source.parent.rglob("*.h"))]
    told = "\0".join([*(file.read_text(encoding="utf-8") for file in files), target, *compiler, *options])
    name = f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:32]}.so"
    try:
        folder = _folder()
        if not (folder / name).exists():
            _logger.info("compiling %s with %s, once on this machine", source.name, compiler[0])
            with tempfile.TemporaryDirectory(dir=folder) as building:
                built = Path(building, name)
                _run([*compiler, *options, str(source), "-o", str(built)])
                os.replace(built, folder / name)
        return ctypes.CDLL(str(folder / name))
    except NotBuilt:
        raise
    except OSError as error:
        raise NotBuilt(f"{source.name} could not be built: {error}") from error


def _folder() -> Path:
    """Where libraries are kept: where none can be, a folder of this process."""
    chosen = os.environ.get("ESCNN_ATTENTION_CACHE")
    folder = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "escnn_attention"))
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # the second where there is no home
        _logger.info("%s cannot be written to (%s): libraries are built for this process only", folder, error)
        return Path(_temporary_folder().name)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="escnn_attention")


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX``, or the first of g++, clang++ and c++.

    Raises:
        NotBuilt: there is none.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    raise NotBuilt("there is no C++ compiler: no g++, clang++ or c++, and CXX is not set")


def _processor(compiler: list[str]) -> tuple[list[str], str]:
    """The option that means this processor, and everything the compiler says of it and of itself."""
    for option in _PROCESSORS[:-1]:
        with suppress(NotBuilt):
            return option, _run([*compiler, *option, "-dM", "-E", "-x", "c++", os.devnull])
    return _PROCESSORS[-1], _run([*compiler, "-dM", "-E", "-x", "c++", os.devnull])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotBuilt(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise NotBuilt(f"{command[0]} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout
