"""Attention on features before a convolution, on plain tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention._checks import check_grid
from escnn_attention.functional.responses.convolution import convolve
from escnn_attention.plain.kernels import PoseKernel

__all__ = ["AttentionMaps", "FeatureAttention", "excite"]


class AttentionMaps(NamedTuple):
    """The two factors of an attention map, None for one that is off.

    Attributes:
        channel: what depends on the fields and poses.
        spatial: what depends on the positions and poses.

    Example:
        >>> import torch
        >>> from escnn_attention import FeatureAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 3 * [g.regular_repr])
        >>> maps = FeatureAttention(fields).attention_maps(fields(torch.randn(2, 12, 9, 9)))
        >>> maps.channel.shape, maps.spatial.shape
        (torch.Size([2, 3, 4]), torch.Size([2, 4, 9, 9]))
    """

    channel: Tensor | None
    spatial: Tensor | None


def excite(first: PoseKernel, second: PoseKernel, statistics: Tensor) -> Tensor:
    r""":math:`\sigma(\sum_s W_2 [W_1 s]^+)` of statistics ``(s, B, fields, poses)``: one map for all statistics."""
    hidden = torch.einsum("cpfq,sbfq->sbcp", first(), statistics).relu().sum(0)
    return torch.einsum("cpfq,bfq->bcp", second(), hidden).sigmoid()


class FeatureAttention(torch.nn.Module):
    """Multiplies features ``(B, fields * poses, *space)`` by attention maps, or by what these leave.

    Args:
        poses: the poses of a field.
        channel: the two layers of channel attention, or None.
        spatial: the kernel of spatial attention, from two fields to one, or None. Where it has more poses than the
            features, the maximum over them is taken.
        statistics: of ``"mean"`` and ``"max"``.
        dilation: of the kernel of spatial attention.
        residual: whether the maps are what is suppressed.
    """

    def __init__(
        self,
        poses: int,
        channel: tuple[PoseKernel, PoseKernel] | None,
        spatial: PoseKernel | None,
        *,
        statistics: tuple[str, ...],
        dilation: int,
        residual: bool,
    ):
        super().__init__()
        self.poses = poses
        self.squeeze = None if channel is None else channel[0]
        self.excite = None if channel is None else channel[1]
        self.spatial = spatial
        self.statistics = statistics
        self.dilation = dilation
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        channel, spatial = self.attention_maps(x)
        alpha: Tensor | None = None
        if channel is not None:
            alpha = channel.unflatten(-1, (-1, *[1] * (x.dim() - 2)))
        if spatial is not None:
            alpha = spatial.unsqueeze(1) if alpha is None else alpha * spatial.unsqueeze(1)
        assert alpha is not None
        return (x.unflatten(1, (-1, self.poses)) * (1 - alpha if self.residual else alpha)).flatten(1, 2)

    def attention_maps(self, x: Tensor) -> AttentionMaps:
        """The maps of channel and spatial attention, ``(B, fields, poses)`` and ``(B, poses, *space)``."""
        check_grid(x.shape[2:])
        x = x.unflatten(1, (-1, self.poses))
        channel = spatial = None
        if self.squeeze is not None:
            assert self.excite is not None
            channel = excite(self.squeeze, self.excite, torch.stack(self._of(x.flatten(3), 3)))
            x = x * channel.unflatten(-1, (-1, *[1] * (x.dim() - 3)))
        if self.spatial is not None:
            kernel = self.spatial()
            padding = self.dilation * (kernel.shape[-1] // 2)
            scores = convolve(
                torch.cat(self._of(x, 1), dim=1),
                kernel.flatten(0, 1).flatten(1, 2),
                padding=padding,
                dilation=self.dilation,
            )
            spatial = (scores if kernel.shape[1] == self.poses else scores.amax(1, keepdim=True)).sigmoid()
        return AttentionMaps(channel, spatial)

    def _of(self, x: Tensor, axis: int) -> list[Tensor]:
        return [x.mean(axis) if s == "mean" else x.amax(axis) for s in self.statistics]

    def extra_repr(self) -> str:
        return f"statistics={self.statistics}, dilation={self.dilation}, residual={self.residual}"
