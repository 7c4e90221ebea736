"""Base classes of the equivariant modules, and checks of their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_grid
from escnn_attention.equivariance.report import equivariance_report

_T = TypeVar("_T")


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


def check_field(x: Any, in_type: FieldType, layer: torch.nn.Module, argument: str = "input") -> GeometricTensor:
    """``x``, if it is a feature field of type ``in_type``, on a grid or at points, in the precision of a layer."""
    name = type(layer).__name__
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"{argument}: {name} got {type(x).__name__}, needed an escnn.nn.GeometricTensor")
    if x.type is not in_type and x.type.gspace != in_type.gspace:
        raise ValueError(
            f"{argument}: {name} got a tensor on the gspace {x.type.gspace.name}, needed one on {in_type.gspace.name}"
        )
    if x.type is not in_type and x.type != in_type:
        raise ValueError(f"{argument}: {name} got a tensor of type {x.type}, needed {in_type}")
    if x.coords is None and 0 in x.tensor.shape:
        check_grid(x.tensor.shape[2:])
    _check_precision(x, layer, argument)
    return x


def _check_precision(x: GeometricTensor, layer: torch.nn.Module, argument: str) -> None:
    """The layer has parameters of the precision of ``x``, or none, or autocast chooses the precision."""
    other: torch.dtype | None = None
    left: list[torch.nn.Module | None] = [layer]
    # In the order of layer.parameters(), which takes longer to find the first one, and this is asked at every call.
    while left:
        if (module := left.pop()) is None:
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                if parameter.dtype == x.tensor.dtype:
                    return
                other = parameter.dtype if other is None and parameter.is_floating_point() else other
        left += reversed(module._modules.values())
    if other is not None and not torch.is_autocast_enabled(x.tensor.device.type):
        got, needed = (str(dtype).removeprefix("torch.") for dtype in (x.tensor.dtype, other))
        layer_instead = f", or the layer with .to(torch.{got})" if x.tensor.is_floating_point() else ""
        raise TypeError(
            f"{argument}: {type(layer).__name__} got a tensor of {got}, but its parameters are {needed}; convert the "
            f"tensor with .to(torch.{needed}){layer_instead}"
        )


def check_points(x: Any, in_type: FieldType, layer: torch.nn.Module) -> GeometricTensor:
    """``x``, if it is a feature field at points; see :func:`check_field`. Coordinates may have no numbers."""
    x = check_field(x, in_type, layer)
    if x.coords is None and in_type.gspace.dimensionality == 0:
        # Of features that torch.vmap goes over, new_zeros would make such coordinates, too.
        nowhere = torch.zeros(len(x.tensor), 0, dtype=x.tensor.dtype, device=x.tensor.device)
        return GeometricTensor(x.tensor, in_type, nowhere)
    if x.coords is None:
        raise ValueError(
            f"input: {type(layer).__name__} got features on a grid, of shape {tuple(x.tensor.shape)}, needed scattered "
            f"points: GeometricTensor(features, type, coords) with coords (points, {in_type.gspace.dimensionality})"
        )
    return x


def check_input(x: Any, in_type: FieldType, layer: torch.nn.Module) -> GeometricTensor:
    """``x``, if it is a feature field of type ``in_type`` on a grid; see :func:`check_field`."""
    x = check_field(x, in_type, layer)
    if x.coords is not None:
        raise ValueError(
            f"input: {type(layer).__name__} got scattered points (coords are set), needed features on a grid, of shape "
            f"(batch, {in_type.size}{', space' * in_type.gspace.dimensionality})"
        )
    return x


def check_mask(mask: Any, x: Tensor, name: str = "mask") -> Tensor:
    """``mask``, if it says of every position of features ``(B, C, *space)`` whether it is there."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: got {got}, needed a tensor of torch.bool")
    if mask.shape != (x.shape[0], *x.shape[2:]):
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, needed {(x.shape[0], *x.shape[2:])}")
    return mask


def check_shape(input_shape: Any, in_type: FieldType, layer: str) -> tuple[int, ...]:
    """``input_shape``, if it is the shape of a feature field of type ``in_type`` on a grid."""
    shape = tuple(input_shape)
    if len(shape) != 2 + in_type.gspace.dimensionality or shape[1] != in_type.size:
        raise ValueError(
            f"input_shape: {layer} got {shape}, needed (batch, {in_type.size}"
            f"{', size' * in_type.gspace.dimensionality})"
        )
    return shape


def check_memory(
    block: EquivariantModule,
    attends: Any,
    memory: Any,
    key_padding_mask: Tensor | None,
    batch: Tensor | None,
) -> tuple[Any, ...]:
    """What the cross-attention of a block takes of a memory, if it needs one and got one."""
    name = type(block).__name__
    if attends is None and not memory is key_padding_mask is batch is None:
        raise ValueError(f"memory: {name} got one and has no cross-attention; leave it out")
    if attends is not None and memory is None:
        raise ValueError(f"memory: {name} got None, needed the features that its cross-attention attends to")
    return () if attends is None else (memory, key_padding_mask, batch)


def on_tensors(
    module: torch.nn.Module, computation: Callable[..., _T], *arguments: Any, coords: Tensor | None = None
) -> _T:
    """The result of a method of a plain module, with the equivariant parts of ``module`` in place of its own.

    The computation, such as ``plain.blocks.TransformerBlock.forward``, asks of ``self`` its parts, which get the
    coordinates ``(N, d)`` of points as part of a GeometricTensor.
    """
    return computation(_Parts(module, coords), *arguments)


class _Parts:
    """The parts of a module as functions of tensors."""

    def __init__(self, module: torch.nn.Module, coords: Tensor | None):
        self._module, self._coords = module, coords

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._module, name)
        if isinstance(part, torch.nn.ModuleList):
            return [partial(self._call, p) if isinstance(p, EquivariantModule) else p for p in part]
        if not isinstance(part, EquivariantModule):
            return part
        return partial(self._attend if name == "attention" and self._coords is not None else self._call, part)

    def _call(self, part: Any, x: Tensor, *others: Any) -> Tensor:
        y: Tensor = part(GeometricTensor(x, part.in_type, self._coords), *others).tensor
        return y

    @staticmethod
    def _attend(
        part: Any,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        mask: Tensor | None,
        measure: Tensor | None,
        *edge_attr: Tensor,
    ) -> Tensor:
        """Attention between points, which has the arguments of ``PointSelfAttention``, and perhaps no ``edge_attr``."""
        known = {"edge_attr": edge_attr[0]} if edge_attr else {}
        y: Tensor = part(GeometricTensor(x, part.in_type, coords), edge_index, batch, measure=measure, **known).tensor
        return y
