"""Where flags are true, and stretches of equal numbers, by operations of PyTorch and ONNX alone."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["stretches", "where"]


def where(flags: Tensor) -> Tensor:
    """The indices of the flags ``(N,)`` that are true.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.stretches import where
        >>> where(torch.tensor([True, False, True]))
        tensor([0, 2])
    """
    return flags.nonzero().squeeze(1)


def stretches(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """In which stretch of equal numbers each of the numbers ``(N,)`` is, ``(N,)``, and where all begin, ``(G,)``.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.stretches import stretches
        >>> stretches(torch.tensor([4, 4, 7, 5, 5]))
        (tensor([0, 0, 1, 2, 2]), tensor([0, 2, 3]))
    """
    place = torch.arange(numbers.shape[0], device=numbers.device)
    before = numbers.index_select(0, (place - 1).clamp(min=0))
    first = (numbers != before) | (place == 0)
    return first.cumsum(0) - 1, where(first)
