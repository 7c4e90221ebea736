"""Smooth envelopes of attention within a radius."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.geometry.neighbours import Neighbourhood


def polynomial_envelope(x: Tensor) -> Tensor:
    r"""The envelope of DimeNet with p = 6, of distances x from 0 to 1: 1 at 0, and with two derivatives 0 at 1.

    .. math:: u(x) = 1 - 28 x^6 + 48 x^7 - 21 x^8 = (1 - x)^3 \, (1 + 3x + 6x^2 + 10x^3 + 15x^4 + 21x^5)

    >>> polynomial_envelope(torch.tensor([0.0, 0.5, 1.0]))
    tensor([1.0000, 0.8555, 0.0000])

    Source: Gasteiger et al., "Directional Message Passing for Molecular Graphs", ICLR 2020.
    """
    # By the factor that vanishes: the sum of powers would be as wrong near 1 as its terms are rounded.
    rest = 1 + x * (3 + x * (6 + x * (10 + x * (15 + x * 21))))
    return (1 - x) ** 3 * rest


class Cutoff(torch.nn.Module):
    """A function of the distance of two points in units of the radius of a rule; negative values count as 0.

    >>> cutoff = Cutoff(polynomial_envelope, Neighbourhood(radius=2.0))
    >>> cutoff(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    tensor([0.8555, 0.0000])
    """

    def __init__(self, function: Callable[[Tensor], Tensor], rule: Neighbourhood):
        super().__init__()
        self.function = function
        self.rule = rule
        if rule.radius is None:
            raise ValueError("cutoff: got a rule without a radius, needed one with a radius")
        self.radius = rule.radius

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """The envelope ``(...)`` of points ``(..., d)`` that broadcast against each other."""
        query, key = (x.to(PRECISE[x.dtype]) for x in (query, key))
        square = self.rule.squares(query, key)
        # The root has no derivative at 0, where that of an even function of the distance is 0.
        still = square == 0
        distance = torch.where(still, 0.0, torch.where(still, 1.0, square).sqrt())
        # Rounding may take a point at the radius beyond it.
        x = (distance / self.radius).clamp(max=1.0)
        own = next((p.dtype for p in self.parameters() if p.is_floating_point()), x.dtype)
        return self.function(x.to(own)).to(x.dtype).clamp(min=0.0)

    @property
    def name(self) -> str:
        """The name of the function."""
        if self.function is polynomial_envelope:
            return "True"
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def extra_repr(self) -> str:
        return f"{self.name}, radius={self.radius}"
