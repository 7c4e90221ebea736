"""Downloads that are checked before they are used."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import IO

from escnn_attention.training.errors import UserError

_CHUNK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that have arrived and the bytes expected (``None`` where the server does not say)."""


def download(url: str, file: IO[bytes], md5: str, *, way_out: str, progress: Progress | None = None) -> None:
    """Stream ``url`` into ``file`` and verify it.

    Args:
        url: the address.
        file: an open binary file; it is left at its end. After an error its content is of no use.
        md5: the expected checksum, 32 hexadecimal digits.
        way_out: one sentence for the error messages: what to do when the download cannot work.
        progress: called after each piece.

    Raises:
        UserError: the address cannot be reached, the transfer broke off, or the checksum is another one.
    """
    digest = hashlib.md5(usedforsecurity=False)  # the published checksum; it guards against damage, not malice
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length is not None else None
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                if progress is not None:
                    progress(received, total)
    except urllib.error.HTTPError as error:
        raise UserError(f"cannot download {url}: the server answers {error.code} {error.reason}. {way_out}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise UserError(f"cannot download {url}: {reason}. Is this machine offline? {way_out}") from error
    if total is not None and received != total:
        raise UserError(
            f"the download of {url} broke off after {received} of {total} bytes. Try again; or else: {way_out}"
        )
    if digest.hexdigest() != md5:
        raise UserError(
            f"what {url} holds is not the expected file: md5 {digest.hexdigest()} in place of {md5}. {way_out}"
        )
