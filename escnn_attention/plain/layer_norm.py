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

__all__ = ["LayerNorm", "NormKind", "NormScope"]

NormScope = Literal["position", "sample", "pose"]
NormKind = Literal["layer", "rms", "fields"]


class LayerNorm(ExactBuffers):
    """Normalises ``(B, size, *space)`` over the channels, with ``scope="sample"`` over space too.

    With ``scope="pose"`` it normalises over the fields of each pose.

    Args:
        field: ``(size,)``, the number of the field of each channel: a field shares one scale.
        mean: ``(size,)``, 1 for the channels of fields from which a mean may be taken, 0 for the others.
        invariants: ``(size, k)``, the vectors along which a shift is learned.
        scope, kind, eps, affine: as in :class:`escnn_attention.FieldLayerNorm`.
        poses: with ``scope="pose"`` the number of poses of every field.
        alike: with ``kind="fields"`` ``(size,)``, the number of what each channel is a component of: equal for the
            same component of all fields of one representation.
    """

    field: Tensor
    mean: Tensor
    invariants: Tensor
    alike: Tensor | None
    counts: Tensor | None

    def __init__(
        self,
        field: np.ndarray,
        mean: np.ndarray,
        invariants: np.ndarray,
        *,
        scope: NormScope,
        eps: float,
        affine: bool,
        kind: NormKind = "layer",
        poses: int | None = None,
        alike: np.ndarray | None = None,
    ):
        super().__init__()
        self.scope = scope
        self.kind = kind
        self.poses = poses
        self.eps = eps
        self.centred = bool((mean == 1).all())
        sizes = np.bincount(field)
        self.equal_sizes = np.array_equal(field, np.repeat(np.arange(len(sizes)), sizes[0]))
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
        self.register_exact("mean", mean)
        self.register_exact("invariants", invariants)
        self.register_buffer("alike", None if alike is None else torch.as_tensor(alike), persistent=False)
        self.register_exact("counts", None if alike is None else np.bincount(alike).astype(float))
        self.weight = Parameter(torch.ones(int(field.max()) + 1)) if affine else None
        shifts = affine and kind != "rms" and invariants.shape[1]
        self.bias = Parameter(torch.zeros(invariants.shape[1])) if shifts else None

    def forward(self, x: Tensor) -> Tensor:
        # Statistics of half precision numbers are taken in single precision, as torch's own layer norm does.
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.poses is not None:
            return self._in_one_pass(y.unflatten(1, (-1, self.poses)), self.poses).flatten(1, 2).to(x.dtype)
        if self.scope == "position" and self.kind != "fields" and (self.centred or self.kind == "rms"):
            return self._in_one_pass(y, 1).to(x.dtype)
        if self.scope == "sample" and self.kind == "layer" and self.centred:
            weight, bias = self._of_channels(y, 1)
            return torch.group_norm(y, 1, weight, bias, self.eps).to(x.dtype)
        over = tuple(range(1, x.dim())) if self.scope == "sample" else (1,)
        shape = (-1,) + (1,) * (x.dim() - 2)
        if self.kind == "layer":
            has_mean = self.mean.to(y.dtype).view(shape)
            count = self.mean.to(y.dtype).sum() * (math.prod(y.shape[2:]) if self.scope == "sample" else 1)
            y = y - has_mean * ((y * has_mean).sum(over, keepdim=True) / count.clamp(min=1))
        elif self.alike is not None and self.counts is not None:
            total = y.new_zeros(y.shape[0], len(self.counts), *y.shape[2:]).index_add(1, self.alike, y)
            mean = total / self.counts.to(y.dtype).view(shape)
            if self.scope == "sample":
                mean = mean.mean(over[1:], keepdim=True)
            y = y - mean.index_select(1, self.alike)
        y = y * torch.rsqrt(y.square().mean(over, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.index_select(0, self.field).to(y.dtype).view(shape)
        if self.bias is not None:
            y = y + (self.invariants @ self.bias).to(y.dtype).view(shape)
        return y.to(x.dtype)

    def _in_one_pass(self, y: Tensor, step: int) -> Tensor:
        """What torch has in one pass: the norm over axis 1, whose entries are every so many channels.

        Channels last is what projections, which mostly follow, take without a copy.
        """
        rows, (weight, bias) = y.movedim(1, -1), self._of_channels(y, step)
        if self.kind == "rms":
            return F.rms_norm(rows, rows.shape[-1:], weight, self.eps).movedim(-1, 1)
        return F.layer_norm(rows, rows.shape[-1:], weight, bias, self.eps).movedim(-1, 1)

    def _of_channels(self, y: Tensor, step: int) -> tuple[Tensor | None, Tensor | None]:
        """The scale and the shift of every so many channels, in the precision of ``y``."""
        weight = bias = None
        if self.weight is not None and self.equal_sizes:
            # A view of the fields, whose gradient is one operation.
            weight = self.weight.unsqueeze(1).expand(-1, len(self.field) // len(self.weight) // step).flatten()
        elif self.weight is not None:
            weight = self.weight.index_select(0, self.field[::step])
        if self.bias is not None:
            bias = self.invariants @ self.bias
            bias = bias if step == 1 else bias[::step]
        return tuple(None if t is None else t.to(y.dtype) for t in (weight, bias))  # type: ignore[return-value]

    def extra_repr(self) -> str:
        kind = "" if self.kind == "layer" else f"kind={self.kind!r}, "
        return f"scope={self.scope!r}, {kind}eps={self.eps}, affine={self.weight is not None}"
