"""The encoding of the positions themselves."""

from __future__ import annotations

from escnn_attention.encodings.mlp import MLPEncoding

__all__ = ["AbsoluteEncoding"]


class AbsoluteEncoding(MLPEncoding):
    r"""The MLP encoding of the positions themselves, relative to the centre of the grid.

    Queries and keys become :math:`q + \rho(h^{-1}x, h^{-1}\tilde h)` and :math:`k + \rho(h^{-1}x', h^{-1}\hat h)`. The
    layer stays equivariant to the fiber group acting about the centre, and gives up translations on purpose
    (Prop. 4.2). Coordinates are in units of half the extent of the grid.

    The options are those of :class:`MLPEncoding`.

    Example:
        >>> from escnn_attention import AbsoluteEncoding, GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, kernel_size=None, encoding=AbsoluteEncoding())

    Source: GSA-Nets (Romero and Cordonnier 2021), Eq. 10 and Prop. 4.2.
    """

    absolute = True
