"""The most memory that a stretch of a training held at once."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

__all__ = ["PeakMemory"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory above what is held when this object is made.

    On CUDA it is what torch has allocated. Elsewhere it is the resident memory of the process: Linux keeps the highest
    value since it was last told to forget it, other systems the highest value since the process started.

    Args:
        device: what is trained on.

    Example:
        >>> import torch
        >>> memory = PeakMemory(torch.device("cpu"))
        >>> memory.read() >= 0
        True
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._device = device
            self._before = torch.cuda.memory_allocated(device)
        else:
            _give_back()
            self._linux = _forget_peak()
            self._before = _status("VmRSS") if self._linux else _highest()

    def read(self) -> int:
        """The peak so far, in bytes."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._before
        # The kernel counts pages in batches, so that a peak can seem lower than what was there before.
        return max(0, (_status("VmHWM") if self._linux else _highest()) - self._before)


def _give_back() -> None:
    """Give what was freed back to the system where it can be, so that it does not hide what is needed from now on."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc


def _forget_peak() -> bool:
    """Start the kernel's record of the peak afresh; whether it can."""
    try:
        _RESET.write_text("5")
        _status("VmHWM")
    except (OSError, StopIteration):
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
