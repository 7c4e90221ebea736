"""Attentive group convolutions, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_grid
from escnn_attention.functional.responses import attentive
from escnn_attention.functional.responses.convolution import convolve
from escnn_attention.plain.feature_attention import AttentionMaps
from escnn_attention.plain.kernels import PoseKernel

__all__ = ["AttentiveConv"]


class AttentiveConv(torch.nn.Module):
    """A group convolution whose partial responses attention modulates before they are summed.

    Args:
        kernel: from the input fields to the output fields.
        channel: the two layers of channel attention, from the input fields to the hidden ones and back, for each output
            field; or None.
        spatial: the kernel of spatial attention, from the two statistics to each output field, or None.
        bias: the number of output fields that get a bias.
        stride, padding, dilation: of the convolution.
        attention_dilation: of the kernel of spatial attention.
        residual: whether the maps are what is suppressed.
    """

    def __init__(
        self,
        kernel: PoseKernel,
        channel: tuple[PoseKernel, PoseKernel] | None,
        spatial: PoseKernel | None,
        *,
        bias: int,
        stride: int,
        padding: int,
        dilation: int,
        attention_dilation: int,
        residual: bool,
    ):
        super().__init__()
        self.kernel = kernel
        self.squeeze = None if channel is None else channel[0]
        self.excite = None if channel is None else channel[1]
        self.spatial = spatial
        self.bias = Parameter(torch.zeros(bias)) if bias else None
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.attention_dilation = attention_dilation
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        kernel = self.kernel()
        y: Tensor | None = None
        if self.residual or not self._attends:
            # The responses are linear: their plain sum needs none of them by itself.
            y = convolve(
                x,
                kernel.flatten(0, 1).flatten(1, 2),
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
            ).unflatten(1, kernel.shape[:2])
        if self._attends:
            attended = attentive.attended_sum(x, kernel, *self._attention(kernel), self._geometry)
            y = attended if y is None else y - attended
        assert y is not None
        if self.bias is not None:
            y = y + self.bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))
        return y.flatten(1, 2)

    def attention_maps(self, x: Tensor) -> AttentionMaps:
        """The maps of channel and of spatial attention.

        Of the shapes ``(B, out_fields, out_poses, in_fields, in_poses)`` and
        ``(B, out_fields, out_poses, in_poses, *space)``.
        """
        check_grid(x.shape[2:])
        kernel = self.kernel()
        return AttentionMaps(*attentive.attention_maps(x, kernel, *self._attention(kernel), self._geometry))

    @property
    def _attends(self) -> bool:
        return self.squeeze is not None or self.spatial is not None

    @property
    def _geometry(self) -> attentive.Geometry:
        return attentive.Geometry(self.stride, self.padding, self.dilation, self.attention_dilation)

    def _attention(self, kernel: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The parameters of attention, those of each output field together."""
        squeeze, excite = (
            None if m is None else m().unflatten(0, (len(kernel), -1)) for m in (self.squeeze, self.excite)
        )
        return squeeze, excite, None if self.spatial is None else self.spatial()

    def extra_repr(self) -> str:
        return (
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"attention_dilation={self.attention_dilation}, residual={self.residual}"
        )
