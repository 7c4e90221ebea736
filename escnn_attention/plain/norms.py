"""Layer and batch normalisation of feature fields, on plain tensors."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from escnn_attention.functional import launch, norms
from escnn_attention.functional.autograd import is_transformed
from escnn_attention.plain.buffers import ExactBuffers

NormScope = Literal["position", "sample", "pose"]
NormKind = Literal["layer", "rms", "fields"]


class LayerNorm(ExactBuffers):
    """Normalises ``(B, size, *space)`` over the channels, over space too, or over the fields of each pose.

    Args:
        field, group, alike: ``(size,)``, for each channel the number of its field, which has one scale; of its group,
            with statistics of its own; and, for ``kind="fields"``, of the component of a representation that it is.
        mean: ``(size,)``, 1 for the channels of fields from which a mean may be taken, 0 for the others.
        invariants: ``(size, k)``, the vectors along which a shift is learned.
        scope, kind, eps, affine: as in :class:`escnn_attention.FieldLayerNorm`.
        poses: with ``scope="pose"`` the number of poses of every field.
        varied: whether a group at a single position keeps its information.
    """

    field: Tensor
    mean: Tensor
    invariants: Tensor
    alike: Tensor | None
    counts: Tensor | None
    group: Tensor | None
    sizes: Tensor | None

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
        group: np.ndarray | None = None,
        varied: bool = True,
    ):
        super().__init__()
        self.groups = 1 if group is None else int(group.max()) + 1
        self.varied = varied
        self.scope = scope
        self.kind = kind
        self.poses = poses
        self.eps = eps
        self.centred = bool((mean == 1).all())
        sizes = np.bincount(field)
        self.equal_sizes = np.array_equal(field, np.repeat(np.arange(len(sizes)), sizes[0]))
        self.register_exact("field", field)
        self.register_exact("mean", mean)
        self.register_exact("invariants", invariants)
        if group is None:
            self.group = self.sizes = None
        else:
            # In front of buffers that are None, behind which torch.export misses others.
            self.register_exact("group", group)
            # How many channels of each group have a mean, and how many it has.
            self.register_exact("sizes", np.stack([np.bincount(group, mean), np.bincount(group)]))
        self.register_exact("alike", alike)
        self.register_exact("counts", None if alike is None else np.bincount(alike).astype(float))
        self.weight = Parameter(torch.ones(int(field.max()) + 1)) if affine else None
        shifts = affine and kind != "rms" and invariants.shape[1]
        self.bias = Parameter(torch.zeros(invariants.shape[1])) if shifts else None
        one_shift = np.array_equal(invariants != 0, field[:, None] == np.arange(len(sizes)))
        self.by_field = affine and self.equal_sizes and scope == "position" and group is None
        self.by_field &= kind == "rms" or (kind == "layer" and self.centred and one_shift)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_field and x.device.type in launch.DEVICES and norms.has_field_norm(x):
            assert self.weight is not None
            return norms.field_norm(x, self.weight, self.bias, self.invariants, self.eps, rms=self.kind == "rms")
        # Statistics of half precision numbers are taken in single precision, as torch's own layer norm does.
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.group is not None and not self.varied and math.prod(y.shape[2:]) == 1:
            raise ValueError(
                f"input: FieldLayerNorm got a single position, of which num_groups={self.groups} leaves zeros or "
                "signs; needed several positions, or fewer groups"
            )
        of_samples = self.scope == "sample" and self.kind == "layer" and self.centred
        if of_samples and (self.group is None or self.equal_sizes):
            # Its derivatives in forward mode and transforms of torch.func need tensors that are contiguous.
            if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
                y = y.contiguous()
            return torch.group_norm(y, self.groups, *self._of_channels(y, 1), self.eps).to(x.dtype)
        if self.group is not None:
            return self._in_groups(y, self.group).to(x.dtype)
        if self.poses is not None:
            return self._in_one_pass(y.unflatten(1, (-1, self.poses)), self.poses).flatten(1, 2).to(x.dtype)
        if self.scope == "position" and self.kind != "fields" and (self.centred or self.kind == "rms"):
            return self._in_one_pass(y, 1).to(x.dtype)
        over = tuple(range(1, x.dim())) if self.scope == "sample" else (1,)
        shape = (-1,) + (1,) * (x.dim() - 2)
        if self.kind == "layer":
            has_mean = self.mean.to(y.dtype).view(shape)
            count = self.mean.to(y.dtype).sum() * (math.prod(y.shape[2:]) if self.scope == "sample" else 1)
            y = y - has_mean * ((y * has_mean).sum(over, keepdim=True) / count.clamp(min=1))
        elif self.alike is not None and self.counts is not None:
            total = y.new_zeros(y.shape[0], len(self.counts), *y.shape[2:]).index_add(1, self.alike, y)
            mean = total / self.counts.to(y.dtype).view(shape)
            if self.scope == "sample" and x.dim() > 2:
                mean = mean.mean(over[1:], keepdim=True)
            y = y - mean.index_select(1, self.alike)
        y = y * torch.rsqrt(y.square().mean(over, keepdim=True) + self.eps)
        return self._affine(y, shape).to(x.dtype)

    def _affine(self, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The scale of each field, and the shift."""
        weight, bias = self._of_channels(y, 1)
        y = y if weight is None else y * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    def _in_groups(self, y: Tensor, group: Tensor) -> Tensor:
        """The norm with statistics of each group of fields."""
        assert self.sizes is not None
        shape = (-1,) + (1,) * (y.dim() - 2)
        permuted, all_channels = self.sizes.to(y.dtype).view(2, *shape)

        def mean(values: Tensor, counts: Tensor) -> Tensor:
            """Over the channels of a group that count, and with ``scope="sample"`` over space; for every channel."""
            total = values.new_zeros(values.shape[0], self.groups, *values.shape[2:]).index_add(1, group, values)
            if self.scope == "sample":
                total = total.mean(tuple(range(2, y.dim())), keepdim=True) if y.dim() > 2 else total
            return (total / counts.clamp(min=1)).index_select(1, group)

        if self.kind == "layer":
            has_mean = self.mean.to(y.dtype).view(shape)
            y = y - has_mean * mean(y * has_mean, permuted)
        return self._affine(y * torch.rsqrt(mean(y.square(), all_channels) + self.eps), shape)

    def _in_one_pass(self, y: Tensor, step: int) -> Tensor:
        """The norm over every so many channels, by one operation; projections take channels last without a copy."""
        rows, (weight, bias) = y.movedim(1, -1), self._of_channels(y, step)
        if self.kind == "rms":
            return F.rms_norm(rows, rows.shape[-1:], weight, self.eps).movedim(-1, 1)
        return norms.layer_norm(rows, weight, bias, self.eps).movedim(-1, 1)

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
            bias = (bias if step == 1 else bias[::step]).to(y.dtype)
        return None if weight is None else weight.to(y.dtype), bias

    def extra_repr(self) -> str:
        kind = "" if self.kind == "layer" else f"kind={self.kind!r}, "
        kind += "" if self.groups == 1 else f"num_groups={self.groups}, "
        return f"scope={self.scope!r}, {kind}eps={self.eps}, affine={self.weight is not None}"


class InvariantNorm(torch.nn.LayerNorm):
    """PyTorch's layer norm of the last axis, with derivatives of every order."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return norms.layer_norm(x, self.weight, self.bias, self.eps)


class BatchNorm(ExactBuffers):
    """Normalises ``(B, size, *space)`` field by field, with tables as of :class:`LayerNorm`."""

    field: Tensor
    mean: Tensor
    invariants: Tensor
    sizes: Tensor
    running_mean: Tensor
    running_square: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        field: np.ndarray,
        mean: np.ndarray,
        invariants: np.ndarray,
        *,
        eps: float,
        momentum: float,
        affine: bool,
    ):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        fields = int(field.max()) + 1
        self.register_exact("field", field)
        self.register_exact("mean", mean)
        self.register_exact("invariants", invariants)
        self.register_exact("sizes", np.bincount(field).astype(float))
        self.register_buffer("running_mean", torch.zeros(fields))
        self.register_buffer("running_square", torch.ones(fields))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.weight = Parameter(torch.ones(fields)) if affine else None
        self.bias = Parameter(torch.zeros(invariants.shape[1])) if affine and invariants.shape[1] else None

    def forward(self, x: Tensor) -> Tensor:
        # Statistics of half precision numbers are taken in single precision, as torch's own batch norm does.
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        shape = (-1,) + (1,) * (x.dim() - 2)
        if self.training:
            mean, square = self._statistics(y, shape)
        else:
            mean, square = self.running_mean.to(y.dtype), self.running_square.to(y.dtype)
        gain = torch.rsqrt(square + self.eps)
        if self.weight is not None:
            gain = gain * self.weight.to(y.dtype)
        y = (y - self._of_channels(mean, shape)) * self._of_channels(gain, shape)
        if self.bias is not None:
            y = y + (self.invariants @ self.bias).to(y.dtype).view(shape)
        return y.to(x.dtype)

    def _statistics(self, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The mean of each field, and its mean square about that; those of a batch are remembered for eval mode."""
        rows = y.numel() // y.shape[1]
        if rows < 2:
            raise ValueError(
                f"input: FieldBatchNorm got {rows} position in training, needed at least two to standardise over"
            )
        if is_transformed(y):
            raise RuntimeError(
                "FieldBatchNorm remembers statistics in training, which transforms of torch.func forbid: call eval() "
                "first, or take FieldLayerNorm"
            )
        over = (0, *range(2, y.dim()))
        mean = self._of_fields(y.mean(over) * self.mean.to(y.dtype))
        square = self._of_fields((y - self._of_channels(mean, shape)).square().mean(over))
        with torch.no_grad():
            # As torch does: what is remembered is the estimate without bias, where a mean was taken.
            number = rows * self.sizes.to(y.dtype)
            centred = y.new_zeros(len(mean)).index_copy(0, self.field, self.mean.to(y.dtype))
            unbiased = square * number / (number - centred)
            for old, new in ((self.running_mean, mean), (self.running_square, unbiased)):
                old.lerp_(new.to(old.dtype), self.momentum)
            self.num_batches_tracked += 1
        return mean, square

    def _of_fields(self, values: Tensor) -> Tensor:
        """The means over the channels of each field, ``(F,)``, of values ``(size,)``."""
        sizes = self.sizes.to(values.dtype)
        return values.new_zeros(len(sizes)).index_add(0, self.field, values) / sizes

    def _of_channels(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        return values.index_select(0, self.field).view(shape)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"
