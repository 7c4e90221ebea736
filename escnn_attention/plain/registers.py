"""Registers: learned keys and values that are the same everywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Registers", "padded", "with_registers"]


class Registers(torch.nn.Module):
    """More keys and values for every position, the same for all positions and all output poses.

    They stand on the axis of the poses of the keys, behind those that there are.

    Args:
        num_heads: the number M of heads.
        channels: the channels C of each.
        number: the number R of registers.
    """

    def __init__(self, num_heads: int, channels: int, number: int):
        super().__init__()
        self.keys = Parameter(torch.randn(num_heads, number, channels))
        self.values = Parameter(torch.zeros(num_heads, number, channels))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``(M, B, N, P + R, C)`` of those ``(M, B, N, P, C)`` of the features."""
        return self._behind(keys, self.keys), self._behind(values, self.values)

    def _behind(self, x: Tensor, more: Tensor) -> Tensor:
        shape = (*x.shape[:3], more.shape[1], x.shape[4])
        return torch.cat([x, more.to(x.dtype)[:, None, None].expand(shape)], dim=3)

    def extra_repr(self) -> str:
        return str(self.keys.shape[1])


def with_registers(quotient: np.ndarray | None, number: int) -> np.ndarray | None:
    """The table ``(|H|, P)`` of the poses of keys, as output poses see them, with registers behind: from all alike.

    Example:
        >>> import numpy as np
        >>> from escnn_attention.plain.registers import with_registers
        >>> with_registers(np.array([[0, 1], [1, 0]]), 1)
        array([[0, 1, 2],
               [1, 0, 2]])
    """
    if quotient is None or not number:
        return quotient
    more = np.broadcast_to(quotient.shape[1] + np.arange(number), (len(quotient), number))
    return np.concatenate([quotient, more], axis=1)


def padded(table: np.ndarray | None, num_poses: int) -> np.ndarray | None:
    """A table of the poses of keys ``(|H|, P, F)``, or ``(P,)``, with zeros for registers behind them."""
    if table is None:
        return None
    axis = 1 if table.ndim > 1 else 0
    widths = [(0, num_poses - table.shape[axis] if i == axis else 0) for i in range(table.ndim)]
    return np.pad(table, widths)
