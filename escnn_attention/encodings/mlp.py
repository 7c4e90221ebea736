"""The encoding by a network of the offset."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._checks import check_int
from escnn_attention.encodings.base import Encoding
from escnn_attention.encodings.networks import coordinate_mlp, last_linear

__all__ = ["MLPEncoding"]


class MLPEncoding(Encoding):
    r""":math:`\rho(\delta, p) = \mathrm{MLP}(\delta) + E[p]`, the encoding of GSA-Nets and the default of the layers.

    For a continuous group E is an MLP of the same kind.

    Args:
        hidden: the width of the hidden layers.
        layers: the number of hidden layers.
        per_head: whether every head has an encoding of its own; otherwise they share one, as in the published code.
        normalize_hidden: normalise the hidden features, as the published code of GSA-Nets does, with an epsilon of
            1e-12. With the zero biases of its initialisation the encoding then sees little but the sign of a
            coordinate, and gradients at 0 are of order 1e6: for parity only.

    Example:
        >>> from escnn_attention import GroupSelfAttention, MLPEncoding
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=5, encoding=MLPEncoding(hidden=32))

    Source: GSA-Nets (Romero and Cordonnier 2021), Section 3 and the published implementation.
    """

    def __init__(self, hidden: int = 16, layers: int = 1, *, per_head: bool = True, normalize_hidden: bool = False):
        super().__init__()
        self.hidden, self.layers = check_int("hidden", hidden), check_int("layers", layers)
        self.per_head, self.normalize_hidden = per_head, normalize_hidden
        self.mlp: torch.nn.Sequential | None = None

    def _table_heads(self) -> int:
        return self.num_heads if self.per_head else 1

    def _build_offsets(self) -> None:
        outputs = self._table_heads() * self.channels
        self.mlp = coordinate_mlp(self.dim, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _pose_mlp(self, inputs: int, outputs: int) -> torch.nn.Sequential:
        return coordinate_mlp(inputs, self.hidden, self.layers, outputs, self.normalize_hidden)

    def _output_layers(self) -> list[torch.nn.Linear]:
        return [] if self.mlp is None else [last_linear(self.mlp)]

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.mlp is None:
            return None
        of_points: Tensor = self.mlp(delta.reshape(-1, delta.shape[-1]))
        return of_points.view(*delta.shape[:-1], self._table_heads(), self.channels).movedim(-2, 0)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.mlp is None:
            return None
        *hidden, last = self.mlp
        if not isinstance(last, torch.nn.Linear) or cast(Tensor | None, last.bias) is not None:
            return None
        for layer in hidden:
            if isinstance(layer, torch.nn.Linear):
                columns = _of_columns(layer, columns)
            elif isinstance(layer, torch.nn.SiLU):
                columns = F.silu(columns, inplace=not torch.is_grad_enabled())  # what a linear map has just made
            else:  # such as a norm, which acts on the last axis
                columns = layer(columns.transpose(1, 2)).transpose(1, 2)
        return columns, last.weight.unflatten(0, (self._table_heads(), self.channels))

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, layers={self.layers}, per_head={self.per_head}"


def _of_columns(layer: torch.nn.Linear, columns: Tensor) -> Tensor:
    """What the layer makes of ``(B, i, n)``."""
    weight = layer.weight.expand(len(columns), -1, -1)
    bias = cast(Tensor | None, layer.bias)
    return weight @ columns if bias is None else torch.baddbmm(bias.unsqueeze(-1), weight, columns)
