"""Processes of Python where neither the package nor escnn is imported yet, and what escnn imports is already."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE_S = 120


class Done(NamedTuple):
    """What a process printed, and how it ended."""

    output: str
    errors: str
    status: int | None


class FreshPython:
    """Starts processes: where there are forks, those of one that has imported what takes escnn seconds to import.

    Args:
        folder: where processes look for modules first, and what they print is kept.
    """

    def __init__(self, folder: Path) -> None:
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload(["torch", "joblib", "scipy.stats", "sklearn.utils.extmath"])
        self._folder = folder
        self._started = 0

    def start(self, function: Any, *arguments: Any, files: Sequence[Path] = ()) -> BaseProcess:
        """Start a function of a module that the tests can import, with the variables of this process.

        Kernels of Triton are compiled there.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        process = self._context.Process(
            target=_begin, args=(environment, self._folder, files, function, arguments), daemon=True
        )
        process.start()
        return process

    def run(self, code: str, *arguments: object) -> Done:
        """Run code as ``python -c`` does, with ``sys`` imported."""
        self._started += 1
        files = [self._folder / f"{self._started}-{name}" for name in ("output", "errors")]
        process = self.start(_run, code, *arguments, files=files)
        process.join()
        return Done(*(file.read_text(encoding="utf-8") for file in files), process.exitcode)


def _begin(
    environment: Mapping[str, str], folder: Path, files: Sequence[Path], function: Any, arguments: Sequence[Any]
) -> None:
    """Have these variables and print to these files, as if started so."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    function(*arguments)


def _run(code: str, *arguments: object) -> None:
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)  # What hangs tells where.
    sys.argv = ["-c", *map(str, arguments)]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "sys": sys})
