"""Learned tables of positions, as fields."""

from __future__ import annotations

from escnn.nn import FieldType

from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.nn.patch_embedding import invariant_table
from escnn_attention.plain.invariant_table import PositionTable as PlainPositionTable

__all__ = ["PositionTable"]


class PositionTable(PlainModule):
    r"""Adds a learned field to features on a grid: the table of position embeddings of vision transformers, steerable.

    .. math:: y(x) = f(x) + p(x), \qquad p(h u) = \rho(h)\, p(u)

    for one position u of each orbit of the grid, where p is free, but for what the elements that leave u where it is
    make equal. So p is any field that the group leaves as it is, :math:`\rho(g)\,p(g^{-1}x) = p(x)`, and adding it
    commutes with the group. It tells positions apart, and does not commute with translations. On a grid of another size
    the table is interpolated, bicubically in the plane and linearly in space, which commutes with the group as well.
    :class:`PositionEmbedding` learns a continuous function instead, for any group, and at points too.

    Args:
        in_type: the type of the input and of the output: any fields.
        size: the positions along every axis of the table.

    Shape:
        ``(B, in_type.size, *space)`` to the same.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no grid, or a fiber group that does not map a square onto itself.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn_attention import PositionTable, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1, 1), g.trivial_repr])
        >>> for n in (6, 9):
        ...     assert_equivariant(PositionTable(fields, 6), (2, 11, n, n), tolerance=1e-12)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; Nordström et al., "Octic Vision
    Transformers", 2025, Section 4, for the symmetries of the square.
    """

    plain: PlainPositionTable

    def __init__(self, in_type: FieldType, size: int):
        table = invariant_table(check_type("in_type", in_type), size)
        super().__init__(in_type, in_type, PlainPositionTable(table))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.plain.table.shape[0]}"
