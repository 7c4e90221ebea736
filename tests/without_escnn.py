"""A Python where escnn is not installed, which runs exported networks, and other code."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.fresh_python import FreshPython

_PATIENCE_S = 120


class WithoutEscnn:
    """Calls networks and runs code in a process of its own, which all tests share."""

    def __init__(self, python: FreshPython) -> None:
        self._python = python
        self._process: BaseProcess | None = None
        self._connection: Any = None

    def __call__(self, network: torch.nn.Module, *arguments: Any, **named: Any) -> torch.Tensor:
        """What the network gives there, without gradients."""
        return self._ask(network, arguments, named)[0]

    def run(self, code: str) -> str:
        """What the code prints there."""
        return self._ask(code, (), {})[1]

    def _ask(self, *request: Any) -> tuple[Any, str]:
        if self._process is None:
            self._connection, theirs = self._python.pipe()
            self._process = self._python.start(_serve, theirs)
            theirs.close()
        self._connection.send_bytes(packed(request))
        assert self._connection.poll(_PATIENCE_S), "no answer"
        found, printed, error = unpacked(self._connection.recv_bytes())
        assert error is None, error
        return found, printed

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._connection.close()
            self._process.join(60)


def packed(content: Any, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def unpacked(content: bytes, *, weights_only: bool = False) -> Any:
    return torch.load(io.BytesIO(content), weights_only=weights_only)


def _serve(connection: Any) -> None:
    sys.modules["escnn"] = None  # type: ignore[assignment]
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(packed(_answer(request)))


def _answer(request: bytes) -> tuple[Any, str, str | None]:
    """What a network gives, or what code prints, or what went wrong."""
    printed = io.StringIO()
    try:
        network, arguments, named = unpacked(request)
        with torch.no_grad(), contextlib.redirect_stdout(printed):
            found = exec(network, {}) if isinstance(network, str) else network(*arguments, **named)
        assert not any(name.startswith("escnn.") for name in sys.modules)
    except Exception:
        return None, printed.getvalue(), traceback.format_exc()
    return found, printed.getvalue(), None
