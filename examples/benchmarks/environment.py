"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Hardware and versions, of this process."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "memory_bytes": _memory(), "gpu": gpu},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "escnn": _version("escnn"),
            "escnn_attention": _checkout_version(),
        },
        "system": platform.system(),
    }


def _cpu() -> str:
    """The model of the processor; the architecture where the system does not tell."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _memory() -> int | None:
    """The memory of the machine, where the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _checkout_version() -> str | None:
    """Of the checkout, which need not be what is installed, and is not imported: escnn takes its time."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    return match[1] if match else None
