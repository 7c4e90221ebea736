"""One process at a time, in a folder or on a file."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import remove_temporaries

LOCK = ".lock"
"""The hidden file in a folder that one process writes to."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP}


@contextlib.contextmanager
def held(folder: Path, way_out: str, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from writing to ``folder``, which exists. The system lets go of it with the process.

    Args:
        folder: gets a hidden file.
        way_out: what else to do than wait, for the message.
        patience: the seconds in which another process may end.

    Raises:
        UserError: another process uses the folder.
    """
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"another process uses {folder}: wait for it, or {way_out}") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make ``path`` the business of one process, or thread, at a time; the others wait.

    What a process left beside ``path`` that was killed while it wrote it is removed.

    The lock is held on a hidden file beside ``path`` that is removed at the end. The system frees it with the process,
    in whatever way that ends. Where the file system knows no locks, nothing is held.

    Args:
        path: a file that need not exist; its folder must, and must allow new files.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with open(lock, "a") as file:
            _wait_for(file)
            if not _is_still(file, lock):
                continue  # its last holder removed it while this process waited: whoever comes now makes a new one
            try:
                remove_temporaries(path.parent, path.name)
                yield
            finally:
                with contextlib.suppress(OSError):  # Windows removes no open file
                    lock.unlink()
            return


def _wait_for(file: IO[str]) -> None:
    if os.name == "nt":
        import msvcrt

        while True:
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
                return
            except OSError:
                time.sleep(0.1)
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_still(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
