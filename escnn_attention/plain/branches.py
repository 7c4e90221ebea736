"""What a residual branch ends in, and what keeps its scores in bounds, on plain tensors."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

__all__ = ["DropPath", "LayerScale", "QueryKeyNorm"]


class LayerScale(torch.nn.Module):
    """Multiplies ``(B, size, *space)`` by a learned gain, one of each field.

    Args:
        field: ``(size,)``, the number of the field of each channel.
        initial: the gain at first.
    """

    field: Tensor

    def __init__(self, field: np.ndarray, initial: float):
        super().__init__()
        self.initial = initial
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
        self.gain = Parameter(torch.full((int(field.max()) + 1,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.index_select(0, self.field).to(x.dtype)
        return x * gain.view(-1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


class DropPath(torch.nn.Module):
    """In training, zero for some samples and the others divided by the probability of that.

    Args:
        p: the probability with which a sample is dropped.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, batch: Tensor | None = None, *, points: bool = False) -> Tensor:
        """The samples that are left of ``(B, size, *space)``; of ``(N, size)`` at points, by their cloud in ``batch``.

        Args:
            x: features.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud.
            points: whether rows are points of clouds, and not samples.
        """
        if not self.training or not self.p:
            return x
        number = len(x) if not points else 1 if batch is None else int(batch.max()) + 1 if len(batch) else 0
        kept = torch.rand(number, device=x.device) >= self.p
        if points:
            kept = kept.expand(len(x)) if batch is None else kept[batch]
        return x * (kept.to(x.dtype) / (1 - self.p)).view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class QueryKeyNorm(torch.nn.Module):
    r"""Queries and keys, each divided by its root mean square over the channels of a head, at each pose by itself.

    .. math:: \hat q(x, h) = \gamma_q \, q(x, h) \big/ \sqrt{\operatorname{mean}_c q_c(x, h)^2 + \epsilon}

    and so for keys. Elements of the group permute the poses, and with them what is divided by; the gains
    :math:`\gamma`, C numbers of each head, are the same for all poses.

    Args:
        num_heads: the number of heads.
        channels: the channels C of each.
        eps: added to the mean square.
    """

    def __init__(self, num_heads: int, channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.queries = Parameter(torch.ones(num_heads, channels))
        self.keys = Parameter(torch.ones(num_heads, channels))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised queries and keys ``(M, B, N, P, C)``."""
        return self._normalise(q, self.queries), self._normalise(k, self.keys)

    def _normalise(self, x: Tensor, gain: Tensor) -> Tensor:
        # The sum of squares of half precision numbers is taken in single precision.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = F.rms_norm(wide, wide.shape[-1:], None, self.eps) * gain.to(wide.dtype)[:, None, None, None]
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.queries.shape[0]}, {self.queries.shape[1]}, eps={self.eps:g}"
