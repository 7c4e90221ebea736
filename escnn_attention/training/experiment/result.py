"""The file ``test.json``: a measurement, and everything that it depends on: weights, versions and the machine."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import escnn_attention
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.callbacks import EpochHistory
from escnn_attention.training.experiment.checkpoints import LAST, TEST, provenance_of, read_checkpoint, state_of
from escnn_attention.training.files import keep_aside, locked, write_json

_PACKAGES = ("escnn", "torch", "lightning", "numpy", "scipy", "scikit-learn")


def write_result(
    folder: Path, checkpoint: Path, metrics: Mapping[str, Any], facts: Mapping[str, Any], tested: Mapping[str, Any]
) -> None:
    """Write ``test.json``: measured ``metrics``, called ``test_NAME``, further ``facts``, and what they depend on.

    ``tested`` has the configuration, versions and hardware of the measurement. A file of another one is kept aside.
    """
    content = read_checkpoint(checkpoint)
    curve = state_of(_newest(content, checkpoint.parent / LAST), EpochHistory.__qualname__)
    result = {
        **{n.removeprefix("test_"): _number(v) for n, v in metrics.items() if n.startswith("test_")},
        "epoch": int(content["epoch"]) + 1,
        **{name: value if not isinstance(value, float) else _number(value) for name, value in facts.items()},
        "checkpoint": checkpoint.name,
        "weights_sha256": _digest(content["state_dict"]),
        "curve": [{k: _number(v) for k, v in row.items()} for row in (curve or {"rows": []})["rows"]],
        "trained": provenance_of(content),
        "tested": tested,
    }
    path = folder / TEST
    with locked(path):
        if path.exists() and _measured(path.read_bytes()) != _measured(json.dumps(result)):
            keep_aside(path)
        write_json(path, result)


def _newest(content: dict[str, Any], last: Path) -> dict[str, Any]:
    """The checkpoint with the whole curve, which continues after the best epoch; a measurement does not need it."""
    if not last.is_file():
        return content
    try:
        return read_checkpoint(last)
    except UserError as error:
        print(f"{error}. The curve in {TEST} ends with the epoch that was measured", file=sys.stderr)
        return content


def _measured(text: str | bytes) -> list[Any] | None:
    """The weights, the data and the computation of a result as JSON; None of anything else."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        result = json.loads(text)
        return [result["weights_sha256"], result["checkpoint"], result["tested"]["configuration"]]
    return None


def _number(value: Any) -> float | None:
    """A number as JSON can hold it, which has no NaN: None in its place."""
    return float(value) if value is not None and math.isfinite(value) else None


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest that is equal for equal weights, whatever else a checkpoint holds."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the results depend on; of this one as it is imported.

    In a checkout also ``"commit"``, as ``git describe --always --dirty`` has it: with ``-dirty`` where files that git
    knows have been changed since.
    """
    found = {"python": platform.python_version(), "escnn-attention": escnn_attention.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    commit = _commit(Path(escnn_attention.__file__).parents[1])
    return found if commit is None else {**found, "commit": commit}


def _commit(checkout: Path) -> str | None:
    """The output of ``git describe`` for a folder; None where it is no checkout, or git fails."""
    # A package that is installed somewhere below another repository is none of its files.
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # without the locks with which git caches its comparisons
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def hardware() -> dict[str, str | int]:
    """The properties of the machine that affect timings."""
    found: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # another system than Linux
    return platform.processor() or platform.machine()
