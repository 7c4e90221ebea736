"""No encoding."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.encodings.base import Encoding

__all__ = ["NoEncoding"]


class NoEncoding(Encoding):
    """No positions at all: the attention is equivariant to every permutation of the positions (Prop. 4.1).

    Ask for it by name, ``encoding="none"``. Poses are told apart no more than positions are.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None, encoding="none")
        >>> x = torch.randn(1, 8, 3, 3)
        >>> torch.allclose(layer(fields(x.roll(1, 2))).tensor, layer(fields(x)).tensor.roll(1, 2), atol=1e-5)
        True

    Source: GSA-Nets (Romero and Cordonnier 2021), Eqs. 3 and 8.
    """

    def _build(self) -> None:
        pass

    def _build_offsets(self) -> None:
        pass

    def offsets(self, delta: Tensor) -> Tensor | None:
        return None
