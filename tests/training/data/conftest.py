import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class FileServer:
    """Serves files over HTTP, and misbehaves on request.

    Attributes:
        files: contents by path.
        answers: of the next requests, in order: a status, ``"cut"`` to close the connection after half of the file, or
            ``"wait"`` to send half of it, set ``waiting``, and wait for ``release``. Later requests get the file.
        requests: the paths that were asked for, in order.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    answers: list[int | str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def put(self, path: str, content: bytes) -> tuple[str, str]:
        """Serve ``content``; return its address and checksum."""
        self.files[path] = content
        return f"http://127.0.0.1:{self.port}/{path}", hashlib.md5(content).hexdigest()


@pytest.fixture
def server(monkeypatch) -> Iterator[FileServer]:
    state = FileServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.lstrip("/")
            state.requests.append(path)
            answer = state.answers.pop(0) if state.answers else 200
            content = state.files.get(path)
            if content is None or answer not in (200, "cut", "wait"):
                self.send_error(404 if content is None else int(answer))
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if answer == 200 else content[: len(content) // 2])
            self.wfile.flush()
            if answer == "wait":
                state.waiting.set()
                state.release.wait(100)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.port = server.server_port
        threading.Thread(target=functools.partial(server.serve_forever, 0.01), daemon=True).start()
        yield state
        server.shutdown()
