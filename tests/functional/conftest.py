from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional.machine_code import Launch

_MAIN = "from tests.functional.machine_code import main; main()"


@pytest.fixture
def compiled(
    run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[Launch]]:
    """Compiles the kernels that both passes of an operator launch, and gives what these need of a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def launches(operator: str, arguments: tuple[Any, ...], chip: int = 90) -> list[Launch]:
        found = [Launch(*row) for row in json.loads(run_python(_MAIN, operator, pickle.dumps(arguments).hex(), chip))]
        assert found
        return found

    return launches
