"""Exports of escnn's modules in any precision and on any device."""

from __future__ import annotations

import itertools

import torch
from escnn.nn import EquivariantModule

__all__ = ["exported"]


def exported(module: EquivariantModule) -> torch.nn.Module:
    """``module.export()``, in the precision and on the device of the module.

    Some of escnn's exports make new modules in PyTorch's default precision, on the CPU, and copy numbers into them.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    like = next((t for t in tensors if t.is_floating_point()), None)
    if like is None:
        return module.export()
    default = torch.get_default_dtype()
    torch.set_default_dtype(like.dtype)
    try:
        with like.device:
            plain: torch.nn.Module = module.export()
    finally:
        torch.set_default_dtype(default)
    return plain
