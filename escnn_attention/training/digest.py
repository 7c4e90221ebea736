"""A digest inside of a zip file, which shows whether any bit of the file has changed since it was written.

It is the comment that a zip file may end in: the file stays one for every other reader, and the digest goes with it
wherever it is copied to.
"""

from __future__ import annotations

import hashlib
import os
from typing import IO

__all__ = ["append_digest", "has_changed"]

_START, _END = b"PK\x03\x04", b"PK\x05\x06"
_LAST_RECORD = 22  # bytes of the record that ends a zip file without a comment; its last two say how long one is
_MARK = b"sha256:"
_DIGITS = 64
_CHUNK = 1 << 20


def append_digest(file: IO[bytes]) -> None:
    """End a zip file without a comment in the digest of all that comes before the digits.

    Args:
        file: can be read and written.
    """
    file.seek(-2, os.SEEK_END)
    file.write((len(_MARK) + _DIGITS).to_bytes(2, "little") + _MARK)
    end = file.tell()
    digits = _digest(file, end)
    file.seek(end)
    file.write(digits)


def has_changed(file: IO[bytes]) -> bool:
    """Whether a file is a zip file that is not as it was written: damaged, or cut off.

    What is no zip file, and a zip file without a comment, such as :func:`torch.save` writes, has no digest: it is taken
    as it is.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _DIGITS - len(_MARK)))
    tail = file.read()
    if tail.startswith(_MARK) and len(tail) == len(_MARK) + _DIGITS:
        return tail[len(_MARK) :] != _digest(file, size - _DIGITS)
    file.seek(0)
    return file.read(len(_START)) == _START and not tail[-_LAST_RECORD:].startswith(_END)


def _digest(file: IO[bytes], length: int) -> bytes:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(_CHUNK, length)):
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest().encode()
