"""Layer normalisation over fields and poses, on plain tensors."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["LayerNorm", "NormScope"]

NormScope = Literal["position", "sample"]


class LayerNorm(ExactBuffers):
    """Normalises ``(B, size, *space)`` over the channels, and with ``scope="sample"`` over space too.

    Args:
        field: ``(size,)``, the number of the field of each channel: a field shares one scale.
        mean: ``(size,)``, 1 for the channels of fields from which a mean may be taken, 0 for the others.
        invariants: ``(size, k)``, the vectors along which a shift is learned.
        scope, eps, affine: as in :class:`escnn_attention.FieldLayerNorm`.
    """

    field: Tensor
    mean: Tensor
    invariants: Tensor

    def __init__(
        self,
        field: np.ndarray,
        mean: np.ndarray,
        invariants: np.ndarray,
        *,
        scope: NormScope,
        eps: float,
        affine: bool,
    ):
        super().__init__()
        self.scope = scope
        self.eps = eps
        self.centred = bool((mean == 1).all())
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
        self.register_exact("mean", mean)
        self.register_exact("invariants", invariants)
        self.weight = Parameter(torch.ones(int(field.max()) + 1)) if affine else None
        self.bias = Parameter(torch.zeros(invariants.shape[1])) if affine and invariants.shape[1] else None

    def forward(self, x: Tensor) -> Tensor:
        # Statistics of half precision numbers are taken in single precision, as torch's own layer norm does.
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.centred and self.scope == "position":
            # What torch has in one pass. Channels last is what projections, which mostly follow, take without a copy.
            weight = None if self.weight is None else self.weight.index_select(0, self.field).to(y.dtype)
            bias = None if self.bias is None else (self.invariants @ self.bias).to(y.dtype)
            return F.layer_norm(y.movedim(1, -1), y.shape[1:2], weight, bias, self.eps).movedim(-1, 1).to(x.dtype)
        over = tuple(range(1, x.dim())) if self.scope == "sample" else (1,)
        shape = (-1,) + (1,) * (x.dim() - 2)
        has_mean = self.mean.to(y.dtype).view(shape)
        count = self.mean.to(y.dtype).sum() * (math.prod(y.shape[2:]) if self.scope == "sample" else 1)
        y = y - has_mean * ((y * has_mean).sum(over, keepdim=True) / count.clamp(min=1))
        y = y * torch.rsqrt(y.square().mean(over, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.index_select(0, self.field).to(y.dtype).view(shape)
        if self.bias is not None:
            y = y + (self.invariants @ self.bias).to(y.dtype).view(shape)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"scope={self.scope!r}, eps={self.eps}, affine={self.weight is not None}"
