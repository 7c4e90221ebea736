"""Base classes of the equivariant modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.report import equivariance_report
from escnn_attention.nn.arguments import check_field, check_input, check_mask, check_shape


class FieldModule(EquivariantModule):
    """An equivariant module between two types of feature fields on the same space.

    Attributes:
        in_type: the type of the input.
        out_type: the type of the output.
        space: the gspace of both.
    """

    in_type: FieldType
    out_type: FieldType

    def __init__(self, in_type: FieldType, out_type: FieldType):
        super().__init__()
        self.in_type = in_type
        self.out_type = out_type
        self.space = in_type.gspace


class GridModule(FieldModule):
    """An equivariant module on feature fields on a grid, whose output has the grid of its input."""

    pointwise: bool = False
    """Whether positions are processed separately, so that features at scattered points are accepted too."""

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape, with the same grid."""
        shape = tuple(input_shape)
        if self.pointwise and len(shape) == 2 and shape[1] == self.in_type.size:
            return (shape[0], self.out_type.size)
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        return (batch, self.out_type.size, *space)

    @property
    def shape_to_check(self) -> tuple[int, ...]:
        """The shape of random features for :meth:`check_equivariance`."""
        return (2, self.in_type.size, *[7] * self.in_type.gspace.dimensionality)

    def check_equivariance(self, atol: float = 1e-7, rtol: float = 1e-5) -> list[tuple[Any, float]]:
        """Check on random features that the module commutes with every element that maps the grid onto itself.

        Args:
            atol, rtol: the largest absolute error in float64, and that relative to the output.

        Returns:
            each element with the mean of its absolute errors.

        Raises:
            AssertionError: an error is too large.
        """
        report = equivariance_report(self, self.shape_to_check, layers=False)
        errors: list[tuple[GroupElement, float]] = []
        for row in report.rows:
            if row.exact:
                limit = atol + rtol * row.scale
                assert row.absolute <= limit, f"{row.element}: the error is {row.absolute:.2e}, more than {limit:.2e}"
                errors.append((row.element, row.mean))
        return errors

    def extra_repr(self) -> str:
        return f"{self.in_type} -> {self.out_type}" if self.out_type != self.in_type else f"{self.in_type}"


class PlainModule(GridModule):
    """An equivariant module around a plain torch module, which computes on tensors.

    Attributes:
        plain: the torch module, from ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.
    """

    resizes: bool = False
    """Whether the output has another grid; a grid that is too small for one raises an error."""

    def __init__(self, in_type: FieldType, out_type: FieldType, plain: torch.nn.Module):
        super().__init__(in_type, out_type)
        self.plain = plain

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        """Apply the module to a feature field.

        Args:
            input: features of type ``in_type`` on a grid, or at scattered points where each is treated by itself.

        Raises:
            TypeError: ``input`` is not a GeometricTensor, or of another precision than the parameters.
            ValueError: it has another gspace or type, or lies on scattered points and the module needs a grid.
        """
        check = check_field if self.pointwise else check_input
        x = check(input, self.in_type, self)
        if self.resizes:
            self.evaluate_output_shape(tuple(x.shape))
        return GeometricTensor(self.plain(x.tensor), self.out_type, x.coords)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, on tensors ``(B, in_type.size, *space)``.

        It gives the same values and needs no escnn, neither to run nor to be loaded.
        """
        self.eval()
        return copy.deepcopy(self.plain).eval()

    def __repr__(self) -> str:
        # One line, like escnn's layers; the plain module inside repeats what it says.
        return f"{type(self).__name__}({self.extra_repr()})"


class MaskedModule(PlainModule):
    """An equivariant module around a plain one that supports a mask of positions."""

    def forward(self, input: GeometricTensor, mask: Tensor | None = None) -> GeometricTensor:
        """Apply the module to a feature field.

        Args:
            input: features of type ``in_type`` on a grid.
            mask: ``(B, *space)``, False for positions that are not there, as around images of different sizes: they are
                not attended to, whatever they hold, and their output is zero. With windows the others have what they
                have on a grid of their own; global attention measures offsets by the size of the whole grid.
        """
        x = check_input(input, self.in_type, self)
        y = self.plain(x.tensor) if mask is None else self.plain(x.tensor, check_mask(mask, x.tensor))
        return GeometricTensor(y, self.out_type)
