"""Scales: a stretch of the dilation group, and modules on the features of every scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from escnn.nn import EquivariantModule, FieldType, GeometricTensor

from escnn_attention._checks import check_int
from escnn_attention.nn.arguments import check_input, check_pointwise, check_shape, check_type
from escnn_attention.nn.module import GridModule, PlainModule
from escnn_attention.plain.dilation import PerScale as PlainPerScale
from escnn_attention.plain.dilation import ScalePooling as PlainScalePooling
from escnn_attention.plain.dilation import join_scales, split_scales

__all__ = ["PerScale", "ScalePooling", "Scales", "check_scales"]


@dataclass(frozen=True)
class Scales:
    r"""A stretch of the dilation group: the scales :math:`1, b, b^2, \dots, b^{n-1}`.

    Args:
        base: b, the ratio of neighbouring scales; more than 1.
        count: n, the number of scales.

    Raises:
        ValueError: a base that is not more than 1, or no scales.

    Example:
        >>> from escnn_attention import Scales
        >>> from escnn import gspaces, nn
        >>> scales = Scales(base=2, count=3)
        >>> scales.values
        (1.0, 2.0, 4.0)
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales.repeat(nn.FieldType(g, 8 * [g.regular_repr])).size
        96
    """

    base: float = 2.0
    count: int = 3

    def __post_init__(self) -> None:
        base: Any = self.base
        number = float(base) if not isinstance(base, bool) and isinstance(base, Real) else math.nan
        if not 1 < number < math.inf:
            raise ValueError(f"base: got {self.base!r}, needed a number above 1")
        check_int("count", self.count)

    @property
    def values(self) -> tuple[float, ...]:
        """The scales, from 1 on."""
        return tuple(float(self.base) ** i for i in range(self.count))

    def repeat(self, field_type: FieldType) -> FieldType:
        """The type of features that have fields of type ``field_type`` at every scale, one scale after the other.

        A tensor of it, ``(B, n · size, *space)``, can be viewed as ``(B, n, size, *space)``.
        """
        check_type("field_type", field_type)
        return FieldType(field_type.gspace, self.count * list(field_type.representations))

    def single(self, field_type: FieldType, name: str = "field_type") -> FieldType:
        """The type that ``field_type`` has at every scale; :meth:`repeat` backwards.

        Raises:
            TypeError: ``field_type`` is none.
            ValueError: the scales do not have the same fields.
        """
        check_type(name, field_type)
        fields = list(field_type.representations)
        of_first = fields[: len(fields) // self.count]
        if not of_first or self.count * of_first != fields:
            raise ValueError(
                f"{name}: got {field_type}, needed the same fields at each of {self.count} scales, as Scales.repeat "
                "gives them"
            )
        return FieldType(field_type.gspace, of_first)


def check_scales(scales: object) -> Scales:
    """``scales``, if they are some."""
    if not isinstance(scales, Scales):
        raise TypeError(f"scales: got {type(scales).__name__}, needed Scales")
    return scales


class PerScale(GridModule):
    """A module on every scale by itself, with the same parameters for all.

    A layer norm with the statistics of a position, or a batch norm, that knows nothing of scales mixes them, or learns
    parameters for each: where features move on to the next scale, from beyond the range come others, and the layer does
    not commute with that. This one does, exactly. (Nonlinearities that act on every channel by itself need no help.)

    Args:
        module: any module of escnn's, or of this package, on the fields of one scale.
        scales: the scales.

    Shape:
        ``(B, n · module.in_type.size, *space)`` to ``(B, n · module.out_type.size, *space)``, on the grid that the
        module gives.

    Raises:
        TypeError: ``module`` is not an equivariant module.

    Example:
        >>> import torch
        >>> from escnn_attention import FieldLayerNorm, PerScale, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields, scales = nn.FieldType(g, 2 * [g.regular_repr]), Scales(base=2, count=3)
        >>> norm = PerScale(FieldLayerNorm(fields), scales)
        >>> norm(norm.in_type(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 24, 5, 5])
    """

    def __init__(self, module: EquivariantModule, scales: Scales):
        if not isinstance(module, EquivariantModule):
            raise TypeError(f"module: got {type(module).__name__}, needed an escnn.nn.EquivariantModule")
        check_scales(scales)
        super().__init__(scales.repeat(module.in_type), scales.repeat(module.out_type))
        self.module = module
        self.scales = scales

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        """Apply the module to every scale.

        Args:
            input: features of type ``in_type`` on a grid.

        Returns:
            features of type ``out_type``.

        Raises:
            TypeError: ``input`` is not a GeometricTensor.
            ValueError: it has another gspace or type, or lies on scattered points.
        """
        x = check_input(input, self.in_type, self)
        each = self.module(GeometricTensor(split_scales(x.tensor, self.scales.count), self.module.in_type))
        return GeometricTensor(join_scales(each.tensor, self.scales.count), self.out_type)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        shape: Sequence[int] = self.module.evaluate_output_shape((batch, self.module.in_type.size, *space))
        return (batch, self.out_type.size, *shape[2:])

    def export(self) -> PlainPerScale:
        """A copy as a plain torch module in eval mode, on tensors."""
        self.eval()
        return PlainPerScale(self.module.export(), self.scales.count).eval()

    def extra_repr(self) -> str:
        return f"{self.scales}"


class ScalePooling(PlainModule):
    """The maximum over scales: what comes of a dilation is only that space is enlarged.

    Args:
        in_type: the type of the input: the same fields at every scale, with pointwise nonlinearities.
        scales: the scales.

    Attributes:
        out_type: the fields of one scale.

    Shape:
        ``(B, n · size, *space)`` to ``(B, size, *space)``.

    Raises:
        ValueError: fields that differ from scale to scale, or that do not allow the maximum.

    Example:
        >>> import torch
        >>> from escnn_attention import ScalePooling, Scales
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> scales = Scales(base=2, count=3)
        >>> pool = ScalePooling(scales.repeat(nn.FieldType(g, 2 * [g.regular_repr])), scales)
        >>> pool(pool.in_type(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 8, 5, 5])
    """

    plain: PlainScalePooling

    def __init__(self, in_type: FieldType, scales: Scales):
        check_scales(scales)
        check_pointwise("in_type", check_type("in_type", in_type), "ScalePooling")
        super().__init__(in_type, scales.single(in_type, "in_type"), PlainScalePooling(scales.count))
        self.scales = scales
