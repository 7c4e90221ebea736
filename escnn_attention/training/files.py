"""Files that are written completely or not at all, and locks on files and folders."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import glob
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import FileLock, Timeout

from escnn_attention.training.errors import UserError

LOCK = ".lock"
"""The hidden file by which a process locks a folder."""

_FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO") if hasattr(errno, name)}


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file opened for writing that takes the place of ``path`` once the block has ended without an error.

    The data goes to a temporary file in the same folder (``os.replace`` is atomic within one file system only), is
    flushed to the disk, and is renamed. If the block raises, the temporary file is removed and ``path`` is untouched.
    An :class:`OSError` of writing has ``path`` as its ``filename``.
    """
    temporary = None
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read; give them the mode of any other new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            name = "" if error.filename is None else Path(os.fsdecode(error.filename)).name
            # The error of a full disk names no file.
            if name.startswith(f".{path.name}.") or (not name and error.errno in _FULL):
                raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_temporaries(folder: Path, *names: str) -> None:
    """Remove what a killed process left of :func:`atomic_file` with these ``names``. No process may be writing."""
    for name in names:
        for stale in folder.glob(f".{glob.escape(name)}.????????.tmp"):
            stale.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process or thread at a time make ``path``; the others wait. A killed process frees its lock.

    Temporary files that a killed process left beside ``path`` are removed.
    """
    with FileLock(path.with_name(f".{path.name}{LOCK}")):
        remove_temporaries(path.parent, path.name)
        yield


@contextlib.contextmanager
def locked_folder(folder: Path, advice: str, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from writing to ``folder``, waiting ``patience`` seconds. A killed process frees its lock.

    If another process uses the folder, a :class:`UserError` ends with the ``advice`` what to do.
    """
    try:
        with FileLock(folder / LOCK, timeout=patience):
            yield
    except Timeout as error:
        raise UserError(f"another process uses {folder}: wait for it, or {advice}") from error


def keep_aside(path: Path) -> Path:
    """Rename the file or folder of another run: ``NAME.json`` to ``NAME.old-1.json`` or the next number. Say so."""
    names = (path.with_name(f"{path.stem}.old-{number}{path.suffix}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    print(f"{path} was of another run: it is kept as {aside.name}", file=sys.stderr)
    return aside


@functools.lru_cache(maxsize=8)
def content_of(text: str) -> Any:
    """The content of a file of YAML, not to be changed: a command needs that of its configuration more than once."""
    return yaml.safe_load(text)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN is an error: it is not JSON."""
    with atomic_file(path, "w") as file:
        json.dump(value, file, indent=2, allow_nan=False, ensure_ascii=False)
        file.write("\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows`` as CSV (:func:`as_csv`), atomically."""
    with atomic_file(path, "w") as file:
        file.write(as_csv(rows))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows (all with the keys of the first) as CSV with a header line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
