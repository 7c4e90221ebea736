import contextlib
import functools
import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class FileServer:
    """Serves files over HTTP, with ranges, and misbehaves when it is told to.

    Attributes:
        files: contents by path.
        answers: what is done to the next answers, in order: see ``Trick``.
        always: what is done when ``answers`` is empty.
        requests: the ``Range`` and ``If-Range`` headers that came, in order.
        sent: bytes of file content that were sent.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    answers: list["Trick"] = field(default_factory=list)
    always: "Trick" = field(default_factory=lambda: Trick())
    requests: list[tuple[str | None, str | None]] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    def put(self, path: str, content: bytes) -> tuple[str, str]:
        """Serve ``content``; its address and checksum."""
        self.files[path] = content
        return f"http://127.0.0.1:{self.port}/{path}", hashlib.md5(content).hexdigest()


@dataclass(frozen=True)
class Trick:
    """How one request is answered.

    Attributes:
        status: an error to answer with.
        cut: the connection is closed after so many bytes.
        ranges: whether a ``Range`` is honoured.
        tag: ``"etag"``, ``"weak"``, ``"date"`` or ``""``: how the version of the file is told.
        wrong_start: another range than the one asked for is sent.
        wait: called after ``cut`` bytes, with the connection open.
    """

    status: int | None = None
    cut: int | None = None
    ranges: bool = True
    tag: str = "etag"
    wrong_start: bool = False
    wait: Callable[[], object] | None = None


def _date(content: bytes) -> str:
    return f"Mon, 01 Jan 2024 00:00:{len(content) % 60:02} GMT"


@pytest.fixture
def server(monkeypatch) -> Iterator[FileServer]:
    state = FileServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            trick = state.answers.pop(0) if state.answers else state.always
            asked, version = self.headers.get("Range"), self.headers.get("If-Range")
            state.requests.append((asked, version))
            content = state.files.get(self.path.lstrip("/"))
            status = trick.status or (404 if content is None else None)
            if status is not None:
                self.send_error(status)
                return
            tags = {
                "etag": ("ETag", f'"{hashlib.md5(content).hexdigest()}"'),
                "weak": ("ETag", 'W/"1"'),
                "date": ("Last-Modified", _date(content)),
            }
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and trick.ranges else 0
            if version is not None and version not in {value for _, value in tags.values()}:
                start = 0  # the file is another one by now
            if start >= len(content) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                shown = start - 1 if trick.wrong_start else start
                self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
            if trick.tag:
                self.send_header(*tags[trick.tag])
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start:] if trick.cut is None else content[start : start + trick.cut]
            with contextlib.suppress(ConnectionError):  # of a client that was killed
                self.wfile.write(rest)
                self.wfile.flush()
                state.sent += len(rest)
            if trick.wait is not None:
                trick.wait()

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("escnn_attention.training.data.storage.download._PAUSE", 0.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.port = server.server_port
        threading.Thread(target=functools.partial(server.serve_forever, 0.01), daemon=True).start()
        yield state
        server.shutdown()


@pytest.fixture
def trick() -> type[Trick]:
    return Trick
