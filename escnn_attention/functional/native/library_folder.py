"""A folder of compiled libraries that nobody else can put one into, and from which no damaged one is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_S = 300.0
"""How long another process may take to build a library before this one builds its own."""

_BUILDING = "building-"


class LibraryFolder:
    """Libraries of one user, each under a name that ends in the digest of its bytes.

    The folder is opened once and belongs to this user, who alone can write to it. What is in it is checked, and loaded,
    through what was opened: to rename it, or a folder above it, changes neither.

    Args:
        path: of the folder, which is made if it is not there.

    Raises:
        OSError: there can be no such folder, or it is another's, or others can write to it.
    """

    def __init__(self, path: Path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if reason := _why_not_private(os.fstat(self._folder)):
            os.close(self._folder)
            raise PermissionError(f"{path}: {reason}; needed a folder of this user's alone (chmod go-w)")

    def __enter__(self) -> LibraryFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def load(self, stem: str, build: Callable[[Path], None]) -> ctypes.CDLL:
        """The library of a name, which is built if there is none that is whole.

        Args:
            stem: the name, which tells apart all that is to be told apart.
            build: makes the file of the library.

        Raises:
            OSError: nothing can be written to the folder, or loaded from it.
        """
        name = self._find(stem) or self._keep(stem, build)
        opened = Path("/proc/self/fd", str(self._folder))
        try:
            return ctypes.CDLL(str((opened if opened.exists() else self._path) / name))
        except OSError:
            os.unlink(name, dir_fd=self._folder)
            raise

    def read(self, stem: str, build: Callable[[Path], None]) -> bytes:
        """The bytes of the library of a name, for linkers: see :meth:`load`."""
        name = self._find(stem) or self._keep(stem, build)
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder), "rb") as file:
            return file.read()

    def _find(self, stem: str) -> str | None:
        """The file of a library that is whole; those that are not are removed."""
        for name in sorted(os.listdir(self._folder)):
            if name.startswith(f"{stem}-"):
                if name == f"{stem}-{self._digest(name)}.so":
                    return name
                os.unlink(name, dir_fd=self._folder)
        return None

    def _digest(self, name: str) -> str | None:
        """The digest of a file; None where there is no file that only this user can write to."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or _why_not_private(found):
                return None
            return hashlib.sha256(file.read()).hexdigest()

    def _keep(self, stem: str, build: Callable[[Path], None]) -> str:
        """The name of the library that is built, by this process or by another at the same time."""
        with self._alone() as alone:
            if alone:
                if name := self._find(stem):
                    return name
                for left in self._path.glob(f"{_BUILDING}*"):  # by processes that were killed
                    shutil.rmtree(left, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self._path))
            try:
                made = building / "library.so"
                build(made)
                made.chmod(0o700)
                name = f"{stem}-{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
                os.replace(made, self._path / name)
                return name
            finally:
                shutil.rmtree(building, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Wait until no other process builds anything here; False where one takes too long, or there are no locks."""
        import fcntl  # nothing is built where there is none

        held, until = False, time.monotonic() + _PATIENCE_S
        with suppress(OSError):
            while not held and time.monotonic() < until:
                try:
                    fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    time.sleep(0.1)
        try:
            yield held
        finally:
            if held:
                fcntl.flock(self._folder, fcntl.LOCK_UN)


def _why_not_private(found: os.stat_result) -> str | None:
    """Why another user could have put there what is found."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return None
