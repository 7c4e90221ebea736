"""The quadratic positional encoding, in which each head attends to a place."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_length
from escnn_attention.encodings.base import Encoding, spread_offsets

_MOST = 1e30  # With it products with channels and offsets are finite in single precision.


class QuadraticEncoding(Encoding):
    r"""Each head attends to a place: :math:`\rho(\delta, p) = \alpha\sqrt C\,(-\|\delta - c\|^2, 2\delta, 0) + E[p]`.

    The centre c and the sharpness :math:`\alpha` of each head are learned, and so is the table E over the poses. The
    offset adds to the score of a query whose first channels are :math:`(q_0, q_0 t) \in R^{1+d}`, up to a constant that
    is lost in the softmax,

    .. math::
        \langle q, \rho_x(\delta) \rangle / \sqrt C = -\alpha q_0 \|\delta - (c + t)\|^2 .

    The weights of a query :math:`(1, 0, \dots)` are a Gaussian of variance :math:`1/(2\alpha)` about c. The next d
    channels move the centre, by t in units of the window's reach, and the first one scales the sharpness. With sharp
    heads, one for each place and pose of a window, attention represents every group convolution
    (:func:`escnn_attention.attention_from_convolution`).

    Args:
        sharpness: the initial :math:`\alpha` of all heads. By default the score of a unit query has the same variance
            as with the other encodings.

    Attributes:
        centre: ``(num_heads, d)``, in units of the window's reach, drawn uniformly from its disc.
        sharpness: ``(num_heads,)``.

    Raises:
        ValueError: ``sharpness`` is not positive, or above 1e30; on binding, when a head has fewer than d + 1 channels.

    Example:
        >>> from escnn_attention import QuadraticEncoding
        >>> QuadraticEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=1).centre.shape
        torch.Size([3, 2])

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional Layers", ICLR
    2020, Lemma 2.
    """

    def __init__(self, *, sharpness: float | None = None):
        super().__init__()
        if sharpness is not None:
            check_length("sharpness", sharpness, "number", _MOST)
        self.initial_sharpness = sharpness
        self.centre: Parameter | None = None
        self.sharpness: Parameter | None = None

    def _build_offsets(self) -> None:
        if self.channels <= self.dim:
            raise ValueError(
                f"encoding: QuadraticEncoding needs {self.dim + 1} channels, one for the distance and {self.dim} that "
                f"move the centre, and a head has {self.channels}; set head_fields to {self.dim + 1} or more"
            )
        direction = F.normalize(torch.randn(self.num_heads, self.dim), dim=-1)
        self.centre = Parameter(direction * torch.rand(self.num_heads, 1) ** (1 / self.dim))
        self.sharpness = Parameter(torch.full((self.num_heads,), float(self.initial_sharpness or 1.0)))

    @torch.no_grad()
    def _calibrate(self, std: float) -> None:
        if self.sharpness is None or self.initial_sharpness is not None:
            return
        values = self.offsets(spread_offsets(self.dim))
        assert values is not None
        self.sharpness.mul_(std / values.var(dim=1, correction=0).mean(-1).sqrt())

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.centre is None or self.sharpness is None:
            return None
        heads = (self.num_heads, *[1] * (delta.dim() - 1))
        # The expanded square would cancel near a sharp centre.
        distance = (delta - self.centre.view(*heads, self.dim)).square().sum(-1, keepdim=True)
        values = torch.cat([-distance, 2 * delta.expand(self.num_heads, *delta.shape)], dim=-1)
        values = math.sqrt(self.channels) * self.sharpness.view(*heads, 1) * values
        return F.pad(values, (0, self.channels - values.shape[-1]))

    def extra_repr(self) -> str:
        return "" if self.initial_sharpness is None else f"sharpness={self.initial_sharpness}"
