"""The encoding by a network for each coordinate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.encodings.mlp import MLPEncoding
from escnn_attention.encodings.networks import coordinate_mlp, last_linear

__all__ = ["SeparableEncoding"]


class SeparableEncoding(MLPEncoding):
    r"""One MLP for each coordinate and a table over the poses, side by side:
    :math:`\rho(\delta, p) = [\mathrm{MLP}_1(\delta_1), \dots, \mathrm{MLP}_d(\delta_d), E[p]]`.

    Every coordinate gets ``channels // (d + 1)`` channels and the poses the rest; in lifting, where there are no poses,
    the coordinates get ``channels // d`` and the last one the rest. The options are those of :class:`MLPEncoding`.

    Raises:
        ValueError: on binding, when a head has fewer channels than there are parts.

    Example:
        >>> from escnn_attention import GroupSelfAttention, SeparableEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 6 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=None, encoding=SeparableEncoding())

    Source: the published implementation of GSA-Nets (row and column encoders).
    """

    def _build(self) -> None:
        parts = self.dim + self.has_poses
        if self.channels < parts:
            raise ValueError(
                f"encoding: SeparableEncoding divides the {self.channels} channels of a head among {parts} parts; "
                f"set head_fields to {parts} or more"
            )
        each = self.channels // max(parts, 1)
        self._widths = [each] * self.dim
        if self.dim and not self.has_poses:
            self._widths[-1] = self.channels - each * (self.dim - 1)
        super()._build()
        if self.pose_embedding is not None:
            # The same variance of the score from fewer channels.
            scale = math.sqrt(self.channels / self._pose_channels())
            self.pose_embedding = Parameter(scale * self.pose_embedding.detach()[..., -self._pose_channels() :].clone())

    def _build_offsets(self) -> None:
        self.coordinates = torch.nn.ModuleList(
            coordinate_mlp(1, self.hidden, self.layers, self._table_heads() * width, self.normalize_hidden)
            for width in self._widths
        )

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [last_linear(mlp) for mlp in self.coordinates] if self.dim else []

    def offsets(self, delta: Tensor) -> Tensor | None:
        if not self.dim:
            return None
        heads = self._table_heads()
        parts = [
            mlp(delta[..., i : i + 1]).unflatten(-1, (heads, width)).movedim(-2, 0)
            for i, (mlp, width) in enumerate(zip(self.coordinates, self._widths, strict=True))
        ]
        values = torch.cat(parts, dim=-1)
        return F.pad(values, (0, self.channels - values.shape[-1]))

    def _pose_channels(self) -> int:
        return self.channels - sum(self._widths)
