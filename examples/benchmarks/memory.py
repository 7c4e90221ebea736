"""The most memory that a stretch of a program held at once."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory above what is held when this object is made, in bytes.

    On CUDA it is what torch has allocated. On a CPU it is the resident memory of the process: Linux keeps the highest
    value since it was last told to forget it, other systems the highest value since the process started, which is
    right as long as nothing before held more.
    """

    def __init__(self, device: str):
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._linux = _forget_peak()
            self._before = _status("VmRSS") if self._linux else _highest()

    def read(self) -> int:
        """The peak so far."""
        if self._cuda:
            return torch.cuda.max_memory_allocated() - self._before
        return (_status("VmHWM") if self._linux else _highest()) - self._before


def _forget_peak() -> bool:
    """Start the kernel's record of the peak afresh; whether it can."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _status(entry: str) -> int:
    """An entry of the kernel's description of this process, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{entry}:"))
    return 1024 * int(line.split()[1])


def _highest() -> int:
    """The highest resident memory since the process started, which macOS counts in bytes and others in KiB."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else 1024 * highest
