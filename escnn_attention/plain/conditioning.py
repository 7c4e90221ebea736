"""Norms and gates of feature fields whose numbers depend on a condition, on plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.norms import LayerNorm

__all__ = ["ConditionedNorm", "Modulation"]


class Modulation(ExactBuffers):
    r"""A scale of every field and a shift of the invariant components, both linear in a condition c.

    .. math:: y = (o + W_s c + b_s)_\mathrm{field}\, x + V (W_t c + b_t)

    The linear maps are zero at first, so that the module multiplies by the offset :math:`o`.

    Args:
        field: ``(size,)``, the number of the field of each channel: a field has one scale.
        invariants: ``(size, k)``, the vectors V along which to shift; None for no shift.
        condition: the number of components of the condition.
        offset: o.
    """

    field: Tensor
    invariants: Tensor | None

    def __init__(self, field: np.ndarray, invariants: np.ndarray | None, condition: int, *, offset: float):
        super().__init__()
        self.offset = offset
        self.fields = int(field.max()) + 1
        shifts = 0 if invariants is None else invariants.shape[1]
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
        self.register_exact("invariants", invariants if shifts else None)
        self.linear = torch.nn.Linear(condition, self.fields + shifts)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition: Tensor, batch: Tensor | None = None) -> Tensor:
        """The features ``(B, size, *space)``, or ``(N, size)`` at points, scaled and shifted.

        Args:
            x: features.
            condition: ``(B, n)``, or ``(B, n, *space)`` for one at each position. At points one row for each cloud of
                ``batch``, one row for each point, or a single one for all.
            batch: ``(N,)``, the number of the cloud of each point.
        """
        numbers = self.linear(condition.movedim(1, -1) if condition.dim() > 2 else condition)
        if batch is not None and numbers.shape[0] != x.shape[0]:
            numbers = numbers.index_select(0, batch)
        scale = self.offset + numbers[..., : self.fields].index_select(-1, self.field)
        y = x * _over_channels(scale, x)
        if self.invariants is not None:
            y = y + _over_channels(numbers[..., self.fields :] @ self.invariants.T.to(numbers.dtype), x)
        return y

    def extra_repr(self) -> str:
        return f"offset={self.offset:g}"


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    """Values with the channels last, ``(B, size)`` or ``(B, *space, size)``, to be multiplied with features."""
    values = values.to(x.dtype)
    if values.dim() > 2:
        return values.movedim(-1, 1)
    return values.view(*values.shape, *[1] * (x.dim() - 2))


class ConditionedNorm(torch.nn.Module):
    """A norm without parameters, and a modulation of what it gives.

    Args:
        norm: the norm.
        modulation: the modulation.
    """

    def __init__(self, norm: LayerNorm, modulation: Modulation):
        super().__init__()
        self.norm = norm
        self.modulation = modulation

    def forward(self, x: Tensor, condition: Tensor, batch: Tensor | None = None) -> Tensor:
        """The arguments are those of :meth:`Modulation.forward`."""
        y: Tensor = self.modulation(self.norm(x), condition, batch)
        return y
