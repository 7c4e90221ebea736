"""Norms and gates of feature fields whose numbers depend on a condition, on plain tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from escnn_attention._checks import check_int, check_length
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.norms import LayerNorm


class Modulation(ExactBuffers):
    r"""A scale of every field, at first o, and a shift along the invariants V ``(size, k)``, linear in a condition c.

    .. math:: y = (o + W_s c + b_s)_\mathrm{field}\, x + V (W_t c + b_t)
    """

    field: Tensor
    invariants: Tensor | None

    def __init__(self, field: np.ndarray, invariants: np.ndarray | None, condition: int, *, offset: float):
        super().__init__()
        self.offset = offset
        self.fields = int(field.max()) + 1
        shifts = 0 if invariants is None else invariants.shape[1]
        self.register_exact("field", field)
        self.register_exact("invariants", invariants if shifts else None)
        self.linear = torch.nn.Linear(condition, self.fields + shifts)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition: Tensor, batch: Tensor | None = None) -> Tensor:
        """Features ``(B, size, *space)``, or ``(N, size)`` at points, scaled and shifted.

        The condition is ``(B, n)`` or ``(B, n, *space)``; at points it has a row for each cloud or point, or one.
        """
        numbers = self.linear(condition.movedim(1, -1) if condition.dim() > 2 else condition)
        if batch is not None and numbers.shape[0] != x.shape[0]:
            numbers = numbers.index_select(0, batch)
        scale = self.offset + numbers[..., : self.fields].index_select(-1, self.field)
        y = x * _over_channels(scale, x)
        if self.invariants is not None:
            y = y + _over_channels(numbers[..., self.fields :] @ self.invariants.T.to(numbers.dtype), x)
        return y


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    """Values with the channels last, ``(B, size)`` or ``(B, *space, size)``, to be multiplied with features."""
    values = values.to(x.dtype)
    if values.dim() > 2:
        return values.movedim(-1, 1)
    return values.view(*values.shape, *[1] * (x.dim() - 2))


class ConditionedNorm(torch.nn.Module):
    """A norm without parameters, and a modulation of its output: see :meth:`Modulation.forward`."""

    def __init__(self, norm: LayerNorm, modulation: Modulation):
        super().__init__()
        self.norm = norm
        self.modulation = modulation

    def forward(self, x: Tensor, condition: Tensor, batch: Tensor | None = None) -> Tensor:
        """The arguments are those of :meth:`Modulation.forward`."""
        y: Tensor = self.modulation(self.norm(x), condition, batch)
        return y


class TimestepEmbedding(torch.nn.Module):
    r"""Vectors of n invariants for times: the condition of a diffusion or a flow.

    .. math:: c(t) = W_2\, \mathrm{SiLU}(W_1\, [\cos \omega t,\, \sin \omega t]), \qquad
        \omega_i = 10000^{-2i/n}, \quad i < n/2

    Args:
        n: the number of components, an even number.
        scale: by which times are multiplied first, such as 1000 for times between 0 and 1.

    Shape:
        ``(B,)`` to ``(B, n)``.

    Raises:
        TypeError: ``n`` is no integer.
        ValueError: ``n`` is odd or not positive, or times of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention import TimestepEmbedding
        >>> TimestepEmbedding(16)(torch.rand(5)).shape
        torch.Size([5, 16])

    Source: Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020; Peebles and Xie, "Scalable Diffusion
    Models with Transformers", ICCV 2023.
    """

    def __init__(self, n: int, scale: float = 1000.0):
        super().__init__()
        if check_int("n", n) % 2:
            raise ValueError(f"n: got {n}, needed an even number")
        self.n, self.scale = n, check_length("scale", scale, "number")
        self.layers = torch.nn.Sequential(torch.nn.Linear(n, n), torch.nn.SiLU(), torch.nn.Linear(n, n))

    def forward(self, times: Tensor) -> Tensor:
        """The vectors of times ``(B,)``."""
        if times.dim() != 1:
            raise ValueError(f"times: got shape {tuple(times.shape)}, needed (B,)")
        precision = next(self.parameters()).dtype
        exponents = torch.arange(0, self.n, 2, dtype=torch.float64, device=times.device) / self.n
        angles = self.scale * times.to(torch.float64).unsqueeze(1) * torch.exp(-math.log(10_000) * exponents)
        embedded: Tensor = self.layers(torch.cat([angles.cos(), angles.sin()], 1).to(precision))
        return embedded

    def extra_repr(self) -> str:
        return f"n={self.n}, scale={self.scale:g}"
