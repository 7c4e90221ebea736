"""The sum over the positions, as a field."""

from __future__ import annotations

from escnn.nn import FieldType

from escnn_attention.nn.arguments import check_shape, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.image_networks import PositionSum as PlainPositionSum

__all__ = ["PositionSum"]


class PositionSum(PlainModule):
    r"""Sums a field over all positions of a grid.

    .. math:: \mathrm{out}(h) = \sum_x f(x, h)

    As the last stage of an :class:`EquivariantClassifier` it makes a maximum over the poses of the sum over the
    positions, where there would be a mean over the positions of the maximum over the poses.

    Args:
        in_type: the type of the input and of the output.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, in_type.size, 1, ..., 1)``.

    Raises:
        TypeError: ``in_type`` is no field type.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PositionSum
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> PositionSum(fields)(fields(torch.ones(1, 4, 3, 5))).tensor.flatten()
        tensor([15., 15., 15., 15.])

    Source: the published implementation of GSA-Nets, which sums over the positions before the maximum over the poses.
    """

    def __init__(self, in_type: FieldType):
        super().__init__(check_type("in_type", in_type), in_type, PlainPositionSum())

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape: a single position."""
        batch, channels, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        return (batch, channels, *(1 for _ in space))
