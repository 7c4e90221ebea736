"""Compile what the tests import, and all loops: ``python -m tests.compile``, a part of the set-up."""

import contextlib
import io
import sys
from threading import Thread

import pytest


class Loops:
    """Builds each loop for both precisions while tests are collected; a test says why one cannot be built."""

    def pytest_sessionstart(self) -> None:
        import torch

        from escnn_attention.functional import irreps
        from escnn_attention.functional.grid import native as grids
        from escnn_attention.functional.points import native as points
        from escnn_attention.functional.points import pair_mlp

        def build() -> None:
            for module in (grids, points, irreps, pair_mlp):
                for dtype in (torch.float64, torch.float32):
                    module.KERNEL.why_not_built(dtype)

        self._thread = Thread(target=build)
        self._thread.start()

    def pytest_sessionfinish(self) -> None:
        self._thread.join()


def main() -> int:
    """Collect the tests, which pytest rewrites and compiles."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(["-n", "0", "--collect-only", "--quiet"], plugins=[Loops()])
    if status:
        print(said.getvalue())
    return status


if __name__ == "__main__":
    sys.exit(main())
