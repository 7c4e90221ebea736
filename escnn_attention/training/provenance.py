"""The provenance of results: versions of packages, and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import escnn_attention

_PACKAGES = ("escnn", "torch", "lightning", "numpy", "scipy", "scikit-learn")


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
    # Without the locks with which git caches its comparisons.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
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
