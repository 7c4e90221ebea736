"""A Python where escnn is not installed, which runs exported networks, and other code."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SERVE = """
import sys
sys.modules["escnn"] = None
import contextlib
import io
import traceback
import torch

for line in sys.stdin:
    file = line.strip()
    printed = io.StringIO()
    try:
        network, arguments, named = torch.load(file, weights_only=False)
        with torch.no_grad(), contextlib.redirect_stdout(printed):
            found = exec(network, {}) if isinstance(network, str) else network(*arguments, **named)
        assert not any(name.startswith("escnn.") for name in sys.modules)
        error = None
    except Exception:
        found, error = None, traceback.format_exc()
    torch.save((found, printed.getvalue(), error), file)
    print("done", flush=True)
"""


class WithoutEscnn:
    """Calls networks and runs code in a process of its own, which all tests share: to start one takes seconds."""

    def __init__(self, start_python: Callable[..., subprocess.Popen], folder: Path) -> None:
        self._start, self._file = start_python, folder / "call.pt"
        self._process: subprocess.Popen | None = None

    def __call__(self, network: torch.nn.Module, *arguments: Any, **named: Any) -> torch.Tensor:
        """What the network gives there, without gradients."""
        return self._ask(network, arguments, named)[0]

    def run(self, code: str) -> str:
        """What the code prints there."""
        return self._ask(code, (), {})[1]

    def _ask(self, *request: Any) -> tuple[Any, str]:
        if self._process is None:
            self._process = self._start(_SERVE)
        torch.save(request, self._file)
        self._process.stdin.write(f"{self._file}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "done\n", self._process.stderr.read()
        found, printed, error = torch.load(self._file, weights_only=False)
        assert error is None, error
        return found, printed

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=60)
