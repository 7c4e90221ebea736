"""Libraries of the loops that came with the package, compiled for several kinds of processors.

A wheel has them, for a platform; a source tree has none, and there loops are compiled where they are first used
(:mod:`~escnn_attention.functional.native.build`). ``CMakeLists.txt`` makes them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import torch

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("shipped")
"""Where a wheel has its libraries."""

CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of processors by PyTorch's names; each includes all before it.

``DEFAULT`` is what every processor of a platform has: SSE2 on x86-64, NEON on ARM.
"""


def shipped_library(stem: str) -> ctypes.CDLL | None:
    """The library for the best instructions that the processor has, or None where none came with the package.

    PyTorch says what the processor has; where its variable ``ATEN_CPU_CAPABILITY`` asks for less, it is less.

    Args:
        stem: of a source and the type of its numbers, such as ``grids-float``.
    """
    found = torch.backends.cpu.get_cpu_capability()
    best = CAPABILITIES.index(found) if found in CAPABILITIES else 0
    for capability in reversed(CAPABILITIES[: best + 1]):
        path = FOLDER / f"{stem}-{capability}{'.dll' if os.name == 'nt' else '.so'}"
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # of another platform, or for a newer one
                _logger.info("%s came with the package and cannot be loaded: %s", path.name, error)
    return None
