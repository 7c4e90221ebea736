"""Batch normalisation of feature fields, on plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.functional.autograd import is_transformed
from escnn_attention.plain.buffers import ExactBuffers

__all__ = ["BatchNorm"]


class BatchNorm(ExactBuffers):
    """Normalises ``(B, size, *space)`` field by field, over the batch, the positions and the components of the field.

    Args:
        field: ``(size,)``, the number of the field of each channel.
        mean: ``(size,)``, 1 for the channels of fields from which a mean may be taken, 0 for the others.
        invariants: ``(size, k)``, the vectors along which a shift is learned.
        eps, momentum, affine: as in :class:`escnn_attention.FieldBatchNorm`.
    """

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
        self.register_buffer("field", torch.as_tensor(field), persistent=False)
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
