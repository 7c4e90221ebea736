"""Downloads that go on where they broke off, and that are checked before they are used."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file
from escnn_attention.training.locking import locked

_CHUNK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte
_TRIES = 4  # transfers in a row that brought nothing new
_PAUSE = 1.0  # seconds before the second of them; each further pause is twice as long
_WORTH_KEEPING = 1 << 20  # bytes: less than this is fetched again sooner than it is cleared away by hand
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # answers of a server that may be another one in a moment

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that have arrived and the bytes expected (``None`` where the server does not say)."""


class _BrokenTransferError(Exception):
    """A transfer that another try may bring to its end."""


class _UnreachableError(_BrokenTransferError):
    """A server that did not answer at all."""


def download(url: str, path: Path, md5: str, *, way_out: str, progress: Progress | None = None) -> None:
    """Download ``url`` to ``path``, unless ``path`` exists.

    What arrives goes to ``NAME.part`` beside ``path``; once all of it is there and has the checksum, it is renamed. A
    transfer that breaks off is taken up again a few times. A part of 1 MiB or more outlives the process, whatever ended
    it, and the next call asks the server for the rest only (the entity tag, kept in ``NAME.part.tag``, makes sure that
    it is the rest of the same file). Several processes may ask for the same file: one downloads it, the others wait.

    Args:
        url: the address.
        path: the file to write, in an existing folder.
        md5: the expected checksum, 32 hexadecimal digits.
        way_out: one sentence for the error messages: what to do when the download cannot work.
        progress: called after each piece.

    Raises:
        UserError: the address cannot be reached, the transfer keeps breaking off, the checksum is another one (then the
            part is removed), or the folder cannot be written.
    """
    try:
        with locked(path):
            if path.exists():  # another process was faster
                return
            part = _Part(path)
            try:
                _transfer(url, part, way_out, progress)
                found = part.md5()
                if found != md5:
                    part.clear()
                    raise UserError(
                        f"what {url} holds is not the expected file: md5 {found} in place of {md5}; what was received"
                        f" is removed. {way_out}"
                    )
                part.finish()
            except BaseException:
                if part.size < _WORTH_KEEPING:
                    part.clear()
                raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. {way_out}") from error


class _Part:
    """The part of a file that has arrived.

    Attributes:
        size: its bytes.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._tag = target.with_name(f"{target.name}.part.tag")
        self.size = self.path.stat().st_size if self.path.exists() else 0

    @property
    def tag(self) -> str | None:
        """What the server called the version of the file that this is a part of."""
        try:
            return self._tag.read_text(encoding="ascii").strip() or None
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def start(self, tag: str | None) -> None:
        """Begin again, with a version of the file that the server calls ``tag``."""
        self.clear()
        if tag is not None:
            with atomic_file(self._tag, "w") as file:
                file.write(tag)

    def append(self) -> IO[bytes]:
        return open(self.path, "ab")

    def clear(self) -> None:
        for path in (self.path, self._tag):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self.size = 0

    def md5(self) -> str:
        digest = hashlib.md5(usedforsecurity=False)  # the published checksum; it guards against damage, not malice
        with open(self.path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    def finish(self) -> None:
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path, self.target)
        self.clear()


def _transfer(url: str, part: _Part, way_out: str, progress: Progress | None) -> None:
    """Receive all of ``url``, in as many transfers as bring something new."""
    before = furthest = part.size
    tries = 0
    while True:
        try:
            return _receive(url, part, way_out, progress)
        except _BrokenTransferError as error:
            if isinstance(error, _UnreachableError) and part.size == before:
                raise UserError(f"cannot download {url}: {error}. Is this machine offline? {way_out}") from error
            tries = 1 if part.size > furthest else tries + 1
            furthest = max(furthest, part.size)
            if tries >= _TRIES:
                raise UserError(
                    f"the download of {url} failed {tries} times in a row: {error}. Try again later; or else: {way_out}"
                ) from error
            time.sleep(_PAUSE * 2 ** (tries - 1))


def _receive(url: str, part: _Part, way_out: str, progress: Progress | None) -> None:
    """One transfer, of what ``part`` lacks."""
    try:
        response = urllib.request.urlopen(_request(url, part), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and part.size:  # nothing lies beyond the part
            if error.headers.get("Content-Range", "").strip() == f"bytes */{part.size}":
                return
            part.clear()
            raise _BrokenTransferError("what had arrived is no part of the file that the server has now") from error
        if error.code in _PASSING:
            raise _BrokenTransferError(f"the server answers {error.code} {error.reason}") from error
        raise UserError(f"cannot download {url}: the server answers {error.code} {error.reason}. {way_out}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise _UnreachableError(str(getattr(error, "reason", None) or error or type(error).__name__)) from error
    with response:
        total = _place(response, part)
        with part.append() as file:
            while chunk := _read(response):
                file.write(chunk)
                part.size += len(chunk)
                if progress is not None:
                    progress(part.size, total)
    if total is not None and part.size != total:
        raise _BrokenTransferError(f"it broke off after {part.size} of {total} bytes")


def _request(url: str, part: _Part) -> urllib.request.Request:
    request = urllib.request.Request(url, headers={"User-Agent": "escnn-attention"})
    if part.size:
        request.add_header("Range", f"bytes={part.size}-")
        if part.tag is not None:
            request.add_header("If-Range", part.tag)
    return request


def _place(response: http.client.HTTPResponse, part: _Part) -> int | None:
    """Make ``part`` what the content of ``response`` is to be appended to. Returns the size of the whole file."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if match is None or int(match[1]) != part.size:
            part.clear()
            raise _BrokenTransferError("the server sent another part of the file than it was asked for")
        return None if match[3] == "*" else int(match[3])
    tag = response.headers.get("ETag")
    if tag is None or tag.startswith("W/"):  # a weak tag says too little to join parts by
        tag = response.headers.get("Last-Modified")
    part.start(tag)
    length = response.headers.get("Content-Length")
    return None if length is None else int(length)


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenTransferError(str(error) or type(error).__name__) from error


def report_progress(name: str) -> Progress:
    """Says on stderr how far the download of ``name`` is, at each tenth of it."""
    said = -1

    def progress(received: int, total: int | None) -> None:
        nonlocal said
        tenth = received // (100 << 20) if total is None else 10 * received // max(total, 1)
        if tenth > said:
            said = tenth
            of = "" if total is None else f" of {total / 1e6:,.1f}"
            print(f"downloading {name}: {received / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)

    return progress
