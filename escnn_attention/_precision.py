"""The precision in which numbers are worked out that are kept in less."""

from __future__ import annotations

import torch


def working_precision(dtype: torch.dtype) -> torch.dtype:
    """The precision in which scores and phases are worked out: at least single."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
