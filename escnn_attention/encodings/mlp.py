"""The encodings by networks of the offset."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_int
from escnn_attention.encodings.base import Encoding, Form, coordinate_mlp, last_linear


class MLPEncoding(Encoding):
    r""":math:`\rho(\delta, p) = \mathrm{MLP}(\delta) + E[p]`, the encoding of GSA-Nets and the default of the layers.

    For a continuous group E is an MLP of the same kind.

    Args:
        hidden: the width of the hidden layers.
        layers: the number of hidden layers.
        per_head: whether every head has an encoding of its own; otherwise they share one, as in the published code.
        normalize_hidden: whether to normalise the hidden features, as the published code of GSA-Nets does, with an
            epsilon of 1e-12. Biases start at zero, so that the encoding depends on little more than the sign of a
            coordinate, and gradients at 0 are of order 1e6: use it for parity only.

    Example:
        >>> from escnn_attention import GroupSelfAttention, MLPEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=5, encoding=MLPEncoding(hidden=32))

    Source: GSA-Nets (Romero and Cordonnier 2021), Section 3 and the published implementation.
    """

    form: Form | None = "features"

    def __init__(self, hidden: int = 16, layers: int = 1, *, per_head: bool = True, normalize_hidden: bool = False):
        super().__init__()
        self.hidden, self.layers = check_int("hidden", hidden), check_int("layers", layers)
        self.per_head, self.normalize_hidden = per_head, normalize_hidden
        self.mlp: torch.nn.Sequential | None = None

    @property
    def num_features(self) -> int:
        return self.hidden if self.form == "features" else self.channels

    def _build_offsets(self) -> None:
        outputs = self.table_heads * self.channels
        self.mlp = coordinate_mlp(self.dim, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        return coordinate_mlp(inputs, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.mlp is None else [last_linear(self.mlp)]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.mlp is None:
            return None
        rows = delta.reshape(-1, delta.shape[-1])
        values: Tensor = self.mlp(rows)
        return values.view(*delta.shape[:-1], self.table_heads, self.channels).movedim(-2, 0)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.mlp is None:
            return None
        *hidden, last = self.mlp
        if not isinstance(last, torch.nn.Linear) or cast(Tensor | None, last.bias) is not None:
            return None
        for layer in hidden:
            if isinstance(layer, torch.nn.Linear):
                weight, bias = layer.weight.expand(len(columns), -1, -1), cast(Tensor | None, layer.bias)
                columns = weight @ columns if bias is None else torch.baddbmm(bias.unsqueeze(-1), weight, columns)
            elif isinstance(layer, torch.nn.SiLU):
                columns = F.silu(columns, inplace=not torch.is_grad_enabled())  # the result of a linear map
            else:  # such as a norm, which acts on the last axis
                columns = layer(columns.transpose(1, 2)).transpose(1, 2)
        return columns, last.weight.unflatten(0, (self.table_heads, self.channels))

    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None:
        modules = [] if self.mlp is None else list(self.mlp)
        kinds = [torch.nn.Linear, torch.nn.SiLU, torch.nn.Linear]
        if type(self).features is not MLPEncoding.features or [*map(type, modules)] != kinds:
            return None  # Of other functions, or of more layers.
        first, last = (tuple(layer.parameters()) for layer in modules[::2])
        if len(first) != 2 or len(last) != 1:
            return None
        return *first, last[0].unflatten(0, (self.table_heads, self.channels))

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, per_head={self.per_head}"


class AbsoluteEncoding(MLPEncoding):
    r"""The MLP encoding of the positions themselves, relative to the centre of the grid.

    Queries and keys become :math:`q + \rho(h^{-1}x, h^{-1}\tilde h)` and :math:`k + \rho(h^{-1}x', h^{-1}\hat h)`. The
    layer stays equivariant to the fiber group acting about the centre, and gives up translations on purpose
    (Prop. 4.2). Coordinates are in units of half the extent of the grid.

    The options are those of :class:`MLPEncoding`.

    Example:
        >>> import torch
        >>> from escnn_attention import AbsoluteEncoding
        >>> AbsoluteEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=1).offsets(torch.randn(9, 2)).shape
        torch.Size([3, 9, 4])

    Source: GSA-Nets (Romero and Cordonnier 2021), Eq. 10 and Prop. 4.2.
    """

    absolute = True


class SeparableEncoding(MLPEncoding):
    r"""One MLP for each coordinate and a table over the poses, side by side:
    :math:`\rho(\delta, p) = [\mathrm{MLP}_1(\delta_1), \dots, \mathrm{MLP}_d(\delta_d), E[p]]`.

    Every coordinate gets ``channels // (d + 1)`` channels and the poses the rest; in lifting, where there are no poses,
    the coordinates get ``channels // d`` and the last one the rest. The options are those of :class:`MLPEncoding`.

    Raises:
        ValueError: on binding, when a head has fewer channels than there are parts.

    Example:
        >>> import torch
        >>> from escnn_attention import SeparableEncoding
        >>> SeparableEncoding().bind(dim=2, num_heads=3, channels=4, num_poses=1).offsets(torch.randn(9, 2)).shape
        torch.Size([3, 9, 4])

    Source: the published implementation of GSA-Nets (row and column encoders).
    """

    form = "offsets"

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
            coordinate_mlp(1, self.hidden, self.layers, self.table_heads * width, self.normalize_hidden)
            for width in self._widths
        )

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [last_linear(mlp) for mlp in self.coordinates] if self.dim else []

    def offsets(self, delta: Tensor) -> Tensor | None:
        if not self.dim:
            return None
        parts = [
            mlp(delta[..., i : i + 1]).unflatten(-1, (self.table_heads, width)).movedim(-2, 0)
            for i, (mlp, width) in enumerate(zip(self.coordinates, self._widths, strict=True))
        ]
        values = torch.cat(parts, dim=-1)
        return F.pad(values, (0, self.channels - values.shape[-1]))

    def _pose_channels(self) -> int:
        return self.channels - sum(self._widths)
