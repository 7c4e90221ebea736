"""The encoding by waves, which factorises."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.encodings.frequencies import FrequencyEncoding

__all__ = ["FourierEncoding"]


class FourierEncoding(FrequencyEncoding):
    r"""Waves of the offset: :math:`\rho(\delta, p) = W\,[\cos\Omega\delta, \sin\Omega\delta] + E[p]`.

    The encoding whose attention factorises: with it the scores are those of standard attention on widened vectors.

    Args:
        num_frequencies: the number of rows of :math:`\Omega`, which all heads share; W is each head's own.
        scale: the standard deviation of the entries of :math:`\Omega` at initialisation, in radians for each unit of
            the window's reach.
        learned: whether :math:`\Omega` is a parameter; otherwise it stays as drawn and is saved with the layer.

    Example:
        >>> from escnn_attention import FourierEncoding, GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(8)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, 2, kernel_size=None, encoding=FourierEncoding(learned=False))

    Source: random Fourier features (Rahimi and Recht 2007) as a relative encoding in the sense of GSA-Nets, Eq. 11.
    """

    def __init__(self, num_frequencies: int = 16, *, scale: float = math.pi, learned: bool = True):
        super().__init__(num_frequencies, scale, learned)
        self.readout: torch.nn.Linear | None = None

    def _build_offsets(self) -> None:
        assert self.num_frequencies is not None
        self._draw_frequencies(self.num_frequencies, self.dim)
        self.readout = torch.nn.Linear(2 * self.num_frequencies, self.num_heads * self.channels, bias=False)
        torch.nn.init.normal_(self.readout.weight, std=1 / math.sqrt(self.num_frequencies))

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.readout is None else [self.readout]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.readout is None:
            return None
        phase = F.linear(delta, self.frequencies)
        waves = torch.cat([phase.cos(), phase.sin()], dim=-1)
        return self.readout(waves).unflatten(-1, (self.num_heads, self.channels)).movedim(-2, 0)

    def waves(self) -> tuple[Tensor, Tensor] | None:
        if self.readout is None:
            return None
        return self.frequencies, self.readout.weight.unflatten(0, (self.num_heads, self.channels))
