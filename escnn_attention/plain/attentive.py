"""Attentive group convolutions and attention on features, on plain tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_grid
from escnn_attention.functional.responses import attentive
from escnn_attention.functional.responses.convolution import convolve
from escnn_attention.plain.buffers import ExactBuffers


class PoseKernel(ExactBuffers):
    """A kernel ``(out fields, out poses, in fields, in poses, *kernel)``, of one number for each orbit.

    Args:
        out_fields, in_fields: the number of fields on either side.
        orbits: ``(out poses, in poses, *kernel)``, the number of the orbit of each entry.
        basis: ``(m, orbits)``, the kernels to combine; None for a weight of its own for each orbit.
        gain: the expected sum of squares of all entries that make one output channel, at initialisation.
    """

    orbits: Tensor
    basis: Tensor | None

    def __init__(self, out_fields: int, in_fields: int, orbits: np.ndarray, basis: np.ndarray | None, gain: float):
        super().__init__()
        self.register_exact("orbits", orbits)
        # In the state, as escnn has it: weights mean nothing without the basis that they were learned in.
        self.register_buffer("basis", None if basis is None else torch.as_tensor(basis).to(torch.get_default_dtype()))
        size = int(orbits.max()) + 1 if basis is None else len(basis)
        self.weight = Parameter(torch.empty(out_fields, in_fields, size))
        energy = 1.0 if basis is None else float(np.square(basis).sum(0)[orbits].mean())
        torch.nn.init.normal_(self.weight, std=math.sqrt(gain / (in_fields * orbits[0].size * energy)))

    def forward(self) -> Tensor:
        values = self.weight if self.basis is None else self.weight @ self.basis.to(self.weight.dtype)
        kernel = values.index_select(2, self.orbits.flatten()).unflatten(2, self.orbits.shape)
        return kernel.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{tuple(self.orbits.shape)}, weight={tuple(self.weight.shape)}, basis={self.basis is not None}"


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
    """Multiplies features ``(B, fields * poses, *space)`` by attention maps, or, ``residual``, by what these leave.

    Args:
        channel: the two layers of channel attention, or None.
        spatial: the kernel of spatial attention, from the ``statistics`` to one field, or None; the maximum over
            its poses is taken where the features have none.
        dilation, circular: of that kernel; whether it is on a torus.
    """

    def __init__(
        self,
        poses: int,
        channel: tuple[PoseKernel, PoseKernel] | None,
        spatial: PoseKernel | None,
        *,
        statistics: tuple[str, ...],
        dilation: int,
        circular: bool,
        residual: bool,
    ):
        super().__init__()
        self.poses = poses
        self.squeeze = None if channel is None else channel[0]
        self.excite = None if channel is None else channel[1]
        self.spatial = spatial
        self.statistics = statistics
        self.dilation, self.circular = dilation, circular
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        channel, spatial = self.attention_maps(x)
        alpha = None if channel is None else channel.unflatten(-1, (-1, *[1] * (x.dim() - 2)))
        if spatial is not None:
            alpha = spatial.unsqueeze(1) if alpha is None else alpha * spatial.unsqueeze(1)
        assert alpha is not None
        return (x.unflatten(1, (-1, self.poses)) * (1 - alpha if self.residual else alpha)).flatten(1, 2)

    def attention_maps(self, x: Tensor) -> AttentionMaps:
        """The maps of channel and spatial attention, ``(B, fields, poses)`` and ``(B, poses, *space)``."""
        check_grid(x.shape[2:])
        x = x.unflatten(1, (-1, self.poses))
        channel = spatial = None
        if self.squeeze is not None and self.excite is not None:
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
                circular=self.circular,
            )
            spatial = (scores if kernel.shape[1] == self.poses else scores.amax(1, keepdim=True)).sigmoid()
        return AttentionMaps(channel, spatial)

    def _of(self, x: Tensor, axis: int) -> list[Tensor]:
        return [x.mean(axis) if s == "mean" else x.amax(axis) for s in self.statistics]

    def extra_repr(self) -> str:
        return f"statistics={self.statistics}, dilation={self.dilation}, residual={self.residual}"


class PoseAttention(torch.nn.Module):
    """Multiplies ``(B, fields * poses, *space)`` by one map for each pose, or, ``residual``, by what it leaves."""

    def __init__(self, poses: int, weight: PoseKernel, residual: bool):
        super().__init__()
        self.poses = poses
        self.weight = weight
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.attention_maps(x).unsqueeze(1)
        return (x.unflatten(1, (-1, self.poses)) * (1 - alpha if self.residual else alpha)).flatten(1, 2)

    def attention_maps(self, x: Tensor) -> Tensor:
        """The attention to each pose at each position, ``(B, poses, *space)``."""
        weight = self.weight()[0].flatten(1)
        return torch.einsum("pi,bi...->bp...", weight, x).sigmoid()

    def extra_repr(self) -> str:
        return f"residual={self.residual}"


class AttentiveConv(torch.nn.Module):
    """A group convolution whose partial responses attention modulates before they are summed.

    Args:
        kernel: from the input fields to the output fields.
        channel: the layers of channel attention, to hidden fields and back, for each output field; or None.
        spatial: the kernel of spatial attention, from two statistics to each output field, or None.
        bias: the number of output fields that have a bias.
        geometry: how both kernels move over the grid.
        residual: whether the maps are what is suppressed.
    """

    def __init__(
        self,
        kernel: PoseKernel,
        channel: tuple[PoseKernel, PoseKernel] | None,
        spatial: PoseKernel | None,
        *,
        bias: int,
        geometry: attentive.Geometry,
        residual: bool,
    ):
        super().__init__()
        self.kernel = kernel
        self.squeeze = None if channel is None else channel[0]
        self.excite = None if channel is None else channel[1]
        self.spatial = spatial
        self.bias = Parameter(torch.zeros(bias)) if bias else None
        self.geometry = geometry
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x.shape[2:])
        kernel = self.kernel()
        y: Tensor | None = None
        if self.residual or not self._attends:
            # The responses are linear: their plain sum needs none of them by itself.
            stride, padding, dilation, _, circular = self.geometry
            y = convolve(
                x,
                kernel.flatten(0, 1).flatten(1, 2),
                stride=stride,
                padding=padding,
                dilation=dilation,
                circular=circular,
            ).unflatten(1, kernel.shape[:2])
        if self._attends:
            attended = attentive.attended_sum(x, kernel, *self._attention(kernel), self.geometry)
            y = attended if y is None else y - attended
        assert y is not None
        if self.bias is not None:
            y = y + self.bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))
        return y.flatten(1, 2)

    def attention_maps(self, x: Tensor) -> AttentionMaps:
        """Maps of fields, poses and their inputs: see :meth:`escnn_attention.AttentiveConv.attention_maps`."""
        check_grid(x.shape[2:])
        kernel = self.kernel()
        return AttentionMaps(*attentive.attention_maps(x, kernel, *self._attention(kernel), self.geometry))

    @property
    def _attends(self) -> bool:
        return self.squeeze is not None or self.spatial is not None

    def _attention(self, kernel: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The parameters of attention, those of each output field together."""
        squeeze, excite = (
            None if m is None else m().unflatten(0, (len(kernel), -1)) for m in (self.squeeze, self.excite)
        )
        return squeeze, excite, None if self.spatial is None else self.spatial()

    def extra_repr(self) -> str:
        return f"{self.geometry}, residual={self.residual}"
