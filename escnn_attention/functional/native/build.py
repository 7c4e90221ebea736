"""C++ of this package as libraries: those that came with it, or else built where they are first needed.

A wheel brings libraries (:mod:`~escnn_attention.functional.native.shipped`). Where there is none, one is built by the
compiler that is there, for the processor that is there. It is kept in the folder that
``ESCNN_ATTENTION_CACHE`` names, ``~/.cache/escnn_attention`` without it, under a name that changes with the source, the
compiler and the processor. The compiler is ``CXX``, or the first of g++, clang++ and c++. A library is code: none is
loaded from a folder that others can write to (:mod:`~escnn_attention.functional.native.library_folder`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from escnn_attention.functional.native.library_folder import LibraryFolder

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""Where the sources are."""

_OPTIONS = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # what is not a number stays so
]
# What means the processor that is there; compilers differ in which they know, and without it take any of its kind.
_PROCESSORS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])

_PATIENCE_S = 300.0
"""How long a compiler may take."""


class NotBuilt(OSError):
    """There is no library, and why."""


@cache
def library(source: Path, *definitions: str) -> ctypes.CDLL:
    """The library of a C++ file.

    Args:
        source: the file. It may include headers of its folder and of those in it.
        definitions: macros, ``NAME=VALUE``.

    Raises:
        NotBuilt: there is no compiler, or it fails.
    """
    return _kept(LibraryFolder.load, source, ("-shared",), definitions)


@cache
def archive(source: Path, *definitions: str, include: tuple[str, ...] = ()) -> bytes:
    """A C++ file as a static library, for a linker.

    Args:
        source, definitions: as those of :func:`library`.
        include: folders of headers, besides the file's own and that of the loops.

    Raises:
        NotBuilt: there is no compiler or no ``ar``, or one of them fails.
    """
    folders = (str(FOLDER), *include)
    return _kept(LibraryFolder.read, source, ("-c", *(f"-I{folder}" for folder in folders)), definitions)


def _kept(
    take: Callable[[LibraryFolder, str, Callable[[Path], None]], _T],
    source: Path,
    kind: tuple[str, ...],
    definitions: tuple[str, ...],
) -> _T:
    """The result of a method of the folder of libraries, which holds the library of a C++ file from then on.

    Args:
        take: a method of the folder.
        source, definitions: as those of :func:`library`.
        kind: ``-shared``, or ``-c`` for a static library, and further options.
    """
    if os.name != "posix":
        raise NotBuilt(f"loops are compiled on Linux and macOS, not where os.name is {os.name!r}")
    compiler = find_compiler()
    processor, target = _processor(compiler)
    options = [*_OPTIONS, *kind, *processor, *(f"-D{d}" for d in definitions)]
    included = {*source.parent.rglob("*.h"), *FOLDER.rglob("*.h"), *FOLDER.glob("*.cpp")}
    files = [source, *sorted(included - {source})]
    told = "\0".join([*(file.read_text(encoding="utf-8") for file in files), target, *compiler, *options])
    stem = f"{source.stem}-{hashlib.sha256(told.encode(errors='surrogateescape')).hexdigest()[:32]}"

    def build(path: Path) -> None:
        _logger.warning(
            "compiling %s with %s, once on this machine: it may take half a minute", source.name, compiler[0]
        )
        made = path if "-shared" in kind else path.with_suffix(".o")
        # What the compiler leaves behind when it is killed goes with the folder.
        _run([*compiler, *options, str(source), "-o", str(made)], TMPDIR=str(path.parent))
        if made != path:
            _run(["ar", "rcs", str(path), str(made)])

    try:
        with LibraryFolder(_folder()) as folder:
            return take(folder, stem, build)
    except NotBuilt:
        raise
    except (OSError, RuntimeError) as error:  # the second where there is no home
        _warn_once(f"libraries are built for this process only: {error}")
    try:
        with LibraryFolder(Path(_temporary_folder().name)) as folder:
            return take(folder, stem, build)
    except NotBuilt:
        raise
    except OSError as error:
        raise NotBuilt(f"{source.name} could not be built: {error}") from error


@cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def _folder() -> Path:
    """Where libraries are to be kept."""
    chosen = os.environ.get("ESCNN_ATTENTION_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "escnn_attention")).expanduser()


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="escnn_attention")


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX``, or the first of g++, clang++ and c++.

    Raises:
        NotBuilt: there is none.
    """
    given = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(given)
    except ValueError as error:
        raise NotBuilt(f"CXX: got {given!r}, needed a command ({error})") from error
    if chosen:
        return chosen
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    raise NotBuilt("there is no C++ compiler: no g++, clang++ or c++, and CXX is not set")


def why_no_compiler() -> str | None:
    """Why there is no C++ compiler, if there is none."""
    try:
        find_compiler()
    except NotBuilt as reason:
        return str(reason)
    return None


def _processor(compiler: list[str]) -> tuple[list[str], str]:
    """The option that means this processor, and everything the compiler says of it and of itself."""
    for option in _PROCESSORS[:-1]:
        with suppress(_Failed):
            return option, _run([*compiler, *option, "-dM", "-E", "-x", "c++", os.devnull])
    return _PROCESSORS[-1], _run([*compiler, "-dM", "-E", "-x", "c++", os.devnull])


class _Failed(NotBuilt):
    """A compiler ran and did not do what it was asked for."""


def _run(command: list[str], **environment: str) -> str:
    """Output of a command, in any encoding, with further variables in its environment.

    Raises:
        NotBuilt: it does not run, or takes too long, or fails.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # A compiler starts others, which would outlive it.
        )
    except OSError as error:
        raise NotBuilt(f"{command[0]} does not run: {error}") from error
    with process:
        try:
            said, complaint = (out.decode(errors="replace") for out in process.communicate(timeout=_PATIENCE_S))
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NotBuilt(f"{command[0]} was given up on after {_PATIENCE_S:g} s") from error
            raise
    if process.returncode:
        how = "failed" if process.returncode > 0 else f"was killed by signal {-process.returncode}"
        raise _Failed(f"{command[0]} {how}: {complaint.strip()[-1000:]}")
    return said
