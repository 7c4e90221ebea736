"""Attentive group convolutions, on plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from escnn_attention.functional.memory import pieces_of
from escnn_attention.plain.feature_attention import AttentionMaps
from escnn_attention.plain.kernels import PoseKernel, convolve, patches

__all__ = ["AttentiveConv"]

# The parameters of some output fields: kernels, the two layers of channel attention, kernels of spatial attention.
_Part = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# The entries of a piece of the responses: beyond this, what is held grows and the time does not shrink.
_FASTEST = 2**20
# Tensors as large as its responses that the backward pass of a piece holds at once.
_COPIES = 6


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
        kernel = self.kernel()
        y: Tensor | None = None
        if self.residual or not self._attends:
            # The responses are linear: their plain sum needs none of them by itself.
            y = self._convolve(x, kernel.flatten(0, 1).flatten(1, 2)).unflatten(1, kernel.shape[:2])
        if self._attends:
            attended = self._attended(x, kernel)
            y = attended if y is None else y - attended
        assert y is not None
        if self.bias is not None:
            y = y + self.bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))
        return y.flatten(1, 2)

    def attention_maps(self, x: Tensor) -> AttentionMaps:
        """``(B, out_fields, out_poses, in_fields, in_poses)`` and ``(B, out_fields, out_poses, in_poses, *space)``."""
        channel, spatial = [], []
        for images, parts in self._pieces(x, self.kernel()):
            maps = [self._attend(images, *part)[1] for part in parts]
            channel.append([m.channel for m in maps if m.channel is not None])
            spatial.append([m.spatial for m in maps if m.spatial is not None])
        return AttentionMaps(
            None if self.squeeze is None else torch.cat([torch.cat(m, dim=3) for m in channel]).permute(0, 3, 4, 1, 2),
            None if self.spatial is None else torch.cat([torch.cat(m, dim=2) for m in spatial]).movedim(1, 3),
        )

    @property
    def _attends(self) -> bool:
        return self.squeeze is not None or self.spatial is not None

    def _attended(self, x: Tensor, kernel: Tensor) -> Tensor:
        """The sum of the responses times their attention: ``(B, out_fields, out_poses, *space)``.

        It is taken for a few images and output fields at a time. None depends on the others, and the backward pass
        computes the responses of each piece again.
        """
        rows = []
        for images, parts in self._pieces(x, kernel):
            row = []
            for part in parts:
                if torch.is_grad_enabled():
                    piece = checkpoint(self._sum, images, *part, use_reentrant=False, preserve_rng_state=False)
                    assert isinstance(piece, Tensor)
                    row.append(piece)
                else:
                    row.append(self._sum(images, *part))
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)

    def _pieces(self, x: Tensor, kernel: Tensor) -> Iterator[tuple[Tensor, list[_Part]]]:
        """Images, and the parameters of output fields: their kernels, the two layers, the spatial kernels."""
        responses = kernel[0].flatten(3)[..., 0].numel()
        for n in x.shape[2:]:
            responses *= max(1, (n + 2 * self.padding - self.dilation * (kernel.shape[-1] - 1) - 1) // self.stride + 1)
        number = pieces_of(_FASTEST, x, _COPIES) // responses
        fields = min(max(1, number), len(kernel))
        kernels = kernel.split(fields)
        attention: list[Sequence[Tensor | None]] = [
            [None] * len(kernels) if m is None else m().unflatten(0, (len(kernel), -1)).split(fields)
            for m in (self.squeeze, self.excite, self.spatial)
        ]
        parts: list[_Part] = list(zip(kernels, *attention, strict=True))
        return ((images, parts) for images in x.split(max(1, number // fields)))

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        return convolve(x, kernel, stride=self.stride, padding=self.padding, dilation=self.dilation)

    def _sum(
        self, x: Tensor, kernel: Tensor, squeeze: Tensor | None, excite: Tensor | None, spatial: Tensor | None
    ) -> Tensor:
        return self._attend(x, kernel, squeeze, excite, spatial)[0]

    def _attend(
        self, x: Tensor, kernel: Tensor, squeeze: Tensor | None, excite: Tensor | None, spatial: Tensor | None
    ) -> tuple[Tensor, AttentionMaps]:
        """Of some output fields the attended sum ``(B, out_fields, out_poses, *space)``, and the maps.

        These are ``(B, in_fields, in_poses, out_fields, out_poses)`` and ``(B, in_poses, out_fields, out_poses,
        *space)``.

        Args:
            x: ``(B, in_fields * in_poses, *space)``.
            kernel: ``(out_fields, out_poses, in_fields, in_poses, *kernel)``.
            squeeze: ``(out_fields, hidden, out_poses, in_fields, in_poses)``, or None.
            excite: ``(out_fields, in_fields, out_poses, hidden, in_poses)``, or None.
            spatial: ``(out_fields, 1, out_poses, 2, in_poses, *kernel)``, or None.
        """
        outs, poses, ins, in_poses, size, *_ = kernel.shape
        # Every input channel by itself into all output channels, as products of matrices: grouped convolutions are
        # several times slower, and most of all their derivatives.
        filters = kernel.flatten(4).permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1)
        seen = patches(x, size, stride=self.stride, padding=self.padding, dilation=self.dilation)
        places = seen.shape[3:]
        responses = (filters @ seen.flatten(3)).unflatten(1, (ins, in_poses)).unflatten(3, (outs, poses))

        channel = None
        if squeeze is not None:
            assert excite is not None
            statistics = torch.stack([responses.mean(-1), _Largest.apply(responses, -1)])
            # For each pair of poses by itself: only the input fields mix.
            hidden = torch.einsum("chpiq,sbiqcp->sbhqcp", squeeze, statistics).relu().sum(0)
            channel = torch.einsum("ciphq,bhqcp->biqcp", excite, hidden).sigmoid()
            responses = responses * channel.unsqueeze(-1)
        if spatial is None:
            return responses.sum((1, 2)).unflatten(-1, places), AttentionMaps(channel, None)

        mean, most = responses.mean(1), _Largest.apply(responses, 1)
        filters = spatial[:, 0].movedim(3, 0).flatten(0, 2).flatten(0, 1).unsqueeze(1)
        # Both statistics by themselves: PyTorch is fastest with one channel a group.
        scores = convolve(
            torch.stack([mean, most], dim=4).unflatten(-1, places).flatten(1, 4),
            filters,
            padding=self.attention_dilation * (filters.shape[-1] // 2),
            dilation=self.attention_dilation,
            groups=len(filters),
        )
        maps = scores.unflatten(1, (in_poses, outs, poses, 2)).sum(4).sigmoid()
        return (maps * mean.unflatten(-1, places)).sum(1) * ins, AttentionMaps(channel, maps)

    def extra_repr(self) -> str:
        return (
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"attention_dilation={self.attention_dilation}, residual={self.residual}"
        )


class _Largest(torch.autograd.Function):
    """``x.amax(axis)``, whose derivative in PyTorch takes three times as long on a CPU. Equal entries share it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        largest = x.amax(axis, keepdim=True)
        ctx.axis = axis
        ctx.save_for_backward(x, largest)
        return largest.squeeze(axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, largest = ctx.saved_tensors
        where = (x == largest).to(grad.dtype)
        return where * (grad.unsqueeze(ctx.axis) / where.sum(ctx.axis, keepdim=True)), None
