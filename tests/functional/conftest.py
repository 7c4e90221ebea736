from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def compiled(run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs code that compiles kernels of Triton for a GPU, and gives what it prints."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return run_python
