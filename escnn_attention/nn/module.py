"""Base classes of the equivariant modules on grids and between points, and checks of their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_grid, check_int
from escnn_attention.equivariance.features import further_features, transformed_features
from escnn_attention.equivariance.report import equivariance_report, maps_grid
from escnn_attention.geometry.cache import checked
from escnn_attention.geometry.neighbours import numbers_if_one, numbers_of
from escnn_attention.geometry.points import ranks
from escnn_attention.geometry.relations import Offset
from escnn_attention.nn.arguments import Subgroup, shown
from escnn_attention.nn.heads import shown_heads
from escnn_attention.plain.point_attention import PointAttention

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
    """An equivariant module on feature fields on a grid."""

    pointwise: bool = False
    """Whether positions are processed separately, so that features at scattered points are accepted too."""

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape."""
        shape = tuple(input_shape)
        if self.pointwise and len(shape) == 2 and shape[1] == self.in_type.size:
            return (shape[0], self.out_type.size)
        batch, _, *space = check_shape(input_shape, self.in_type, type(self).__name__)
        return (batch, self.out_type.size, *self._output_space(space))

    def _output_space(self, space: Sequence[int]) -> Sequence[int]:
        """The grid of the output for an input on a grid of this shape."""
        return space

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


class Wrapper(torch.nn.Module):
    """Base class of layers around a plain torch module, which computes on tensors.

    Attributes:
        plain: the torch module.
    """

    plain: torch.nn.Module

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, with the same arguments as tensors.

        Coordinates of points are the second argument, ``coords``; of a layer between two sets they are ``query_coords``
        and ``key_coords``. It gives the same values and needs no escnn, neither to run nor to be loaded.
        """
        self.eval()
        return copy.deepcopy(self.plain).eval()

    def __repr__(self) -> str:
        # One line, like escnn's layers; the plain module inside repeats what it says.
        return f"{type(self).__name__}({self.extra_repr()})"


class PlainModule(Wrapper, GridModule):
    """An equivariant module around a plain one, of ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``."""

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
        x = check_field(input, self.in_type, self, on_grid=not self.pointwise)
        if self.resizes:
            self.evaluate_output_shape(tuple(x.shape))
        return GeometricTensor(self.plain(x.tensor), self.out_type, x.coords)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), self.plain.extra_repr())))


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


def check_field(
    x: Any, in_type: FieldType, layer: torch.nn.Module, argument: str = "input", on_grid: bool = False
) -> GeometricTensor:
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
    if on_grid and x.coords is not None:
        raise ValueError(
            f"{argument}: {name} got scattered points (coords are set), needed features on a grid, of shape "
            f"(batch, {in_type.size}{', space' * in_type.gspace.dimensionality})"
        )
    return x


def check_no_batch(x: GeometricTensor, batch: Any, name: str = "batch") -> None:
    """Features on a grid have no numbers of clouds."""
    if x.coords is None and batch is not None:
        raise ValueError(f"{name}: got a {type(batch).__name__} for features on a grid; leave it at None")


check_input = partial(check_field, on_grid=True)
"""Check a feature field on a grid: see :func:`check_field`."""


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
    def _attend(part: Any, x: Tensor, coords: Tensor, *others: Tensor | None) -> Tensor:
        """Attention between points, which has the arguments of ``PointSelfAttention``, and perhaps no ``edge_attr``."""
        edge_index, batch, _, measure, *edge_attr = others
        known = {"edge_attr": edge_attr[0]} if edge_attr else {}
        y: Tensor = part(GeometricTensor(x, part.in_type, coords), edge_index, batch, measure=measure, **known).tensor
        return y


_NEEDED_TABLES = (
    "needed (edges, features) with edge_index, or without (clouds, points, points, features), of the points of each "
    "cloud in their order"
)


def check_edge_dim(edge_dim: int | None) -> int | None:
    """``edge_dim``, if it is a number of features of an edge, or None."""
    return None if edge_dim is None else check_int("edge_dim", edge_dim)


def check_cloud(
    coords: Tensor,
    edge_index: Any = None,
    batch: Any = None,
    mask: Any = None,
    measure: Any = None,
    edge_attr: Any = None,
) -> None:
    """Check that the arguments of a cloud fit together; points that a mask hides may hold anything."""
    number = len(coords)
    if number == 0:
        raise ValueError("input: got a cloud without points, needed at least one")
    others = {"edge_index": edge_index, "batch": batch, "mask": mask, "measure": measure}
    for name, value in {**others, "edge_attr": edge_attr}.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, needed a tensor or None")
    coords = numbers_of("coords", coords)
    edge_index, batch, mask, measure = (None if v is None else numbers_of(name, v) for name, v in others.items())
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (number,)):
        raise ValueError(f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, needed bool of shape ({number},)")
    if mask is not None and not bool(mask.any()):
        raise ValueError("mask: hides all points, needed at least one that is there")
    there = torch.ones(number, dtype=torch.bool, device=coords.device) if mask is None else mask
    _check_numbers(coords, edge_index, batch, there, measure)
    if edge_attr is not None:
        _check_features(edge_attr, coords, edge_index, batch, there)


def _check_numbers(
    coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, there: Tensor, measure: Tensor | None
) -> None:
    """Check the shapes, types and numbers of the arguments against the points, of which some are ``there``."""
    number = len(coords)
    if not bool((coords.isfinite().all(-1) | ~there).all()):
        raise ValueError("coords: got numbers that are not finite; leave points out by mask")
    if edge_index is not None:
        check_index("edge_index", edge_index, (2, edge_index.shape[-1] if edge_index.dim() else 0), number)
    if batch is not None:
        check_index("batch", batch, (number,), None)
        if edge_index is not None and bool((batch[edge_index[0]] != batch[edge_index[1]]).any()):
            raise ValueError("edge_index: got edges between points that belong to different clouds of batch")
    if edge_index is not None:
        _check_keys(edge_index, there)
    if measure is not None:
        if measure.shape != (number,):
            raise ValueError(f"measure: got shape {tuple(measure.shape)}, needed ({number},)")
        if not bool(((measure > 0) & measure.isfinite() | ~there).all()):
            raise ValueError("measure: got numbers that are not positive and finite; leave points out by mask")


def _check_features(
    edge_attr: Tensor, coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, there: Tensor
) -> None:
    """Features of edges are finite numbers, one row for each edge, or in tables that have room for all points."""
    needed = "needed (edges, features) with edge_index" if edge_index is not None else _NEEDED_TABLES
    got, number = tuple(edge_attr.shape), len(coords)
    if not edge_attr.dtype.is_floating_point:
        raise TypeError(f"edge_attr: got {edge_attr.dtype}, needed floating-point numbers")
    if edge_attr.device != coords.device:
        raise ValueError(f"edge_attr: got a tensor on {edge_attr.device}, needed one on {coords.device}, as coords are")
    features = numbers_if_one(edge_attr)  # which may differ from call to call of torch.vmap
    if edge_index is not None:
        if len(got) != 2 or got[0] != edge_index.shape[1]:
            raise ValueError(f"edge_attr: got shape {got} for {edge_index.shape[1]} edges, {needed}")
        needs = there[edge_index].all(0)
    else:
        cloud = torch.zeros(number, dtype=torch.long, device=coords.device) if batch is None else batch
        clouds, most = int(cloud.max()) + 1, int(cloud.bincount().max())
        if len(got) != 4 or got[0] < clouds or got[1] != got[2] or got[1] < most:
            raise ValueError(f"edge_attr: got shape {got} for {clouds} clouds of up to {most} points, {needed}")
        points = edge_attr.new_zeros(got[:2], dtype=torch.bool)
        points[cloud, ranks(batch, None, number, coords.device)] = there
        needs = points.unsqueeze(2) & points.unsqueeze(1)
    if features is not None and not bool((features.isfinite().all(-1) | ~needs).all()):
        raise ValueError("edge_attr: got numbers that are not finite; leave points out by mask")


def _check_keys(edge_index: Tensor, there: Tensor) -> None:
    """Every point that is there has a key."""
    without = there.clone()
    without[edge_index[1, there[edge_index[0]]]] = False
    if bool(without.any()):
        example, several, number = int(without.nonzero()[0]), int(without.sum()), len(there)
        raise ValueError(
            f"edge_index: no edge leads to point {example} ({several} such of {number} points), which then has nothing "
            "to attend to; give isolated points an edge to themselves, or leave them out by mask"
        )


def check_index(name: str, index: Tensor, shape: tuple[int, ...], number: int | None) -> None:
    """``index`` is of integers, of this shape, from 0 to ``number`` - 1."""
    if index.dtype != torch.long:
        raise TypeError(f"{name}: got {index.dtype}, needed a tensor of torch.long")
    if tuple(index.shape) != shape:
        needed = "(2, edges)" if name == "edge_index" else shape
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, needed {needed}")
    if index.numel() and (int(index.min()) < 0 or (number is not None and int(index.max()) >= number)):
        most = "" if number is None else f" to {number - 1}"
        raise ValueError(f"{name}: got {int(index.min())} to {int(index.max())}, needed numbers from 0{most}")


class PointModule(FieldModule):
    """An equivariant module on feature fields at scattered points, which leaves the points where they are."""

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape, ``(N, in_type.size)``."""
        shape = tuple(input_shape)
        if len(shape) != 2 or shape[1] != self.in_type.size:
            raise ValueError(f"input_shape: {type(self).__name__} got {shape}, needed (points, {self.in_type.size})")
        return (shape[0], self.out_type.size)

    def check_equivariance(self, atol: float = 1e-7, rtol: float = 1e-5) -> list[tuple[Any, float]]:
        """Check on a random cloud that the module commutes with all elements, as points are not resampled.

        The arguments, the result and the error are those of :meth:`GroupSelfAttention.check_equivariance`.
        """
        group = self.space.fibergroup
        why = "; samples are exact for the elements that permute them only" if group.continuous else ""
        coords = torch.randn(12, self.space.dimensionality, dtype=torch.float64)
        return check_at_points(self, coords, group.testing_elements(), atol, rtol, why)


def check_at_points(
    module: PointModule, coords: Tensor, elements: Iterable[GroupElement], atol: float, rtol: float, why: str = ""
) -> list[tuple[GroupElement, float]]:
    """The mean errors of elements for random features at points, each error below its limit: else it says why."""
    module = copy.deepcopy(module).double().eval()
    features = torch.randn(len(coords), module.in_type.size, dtype=coords.dtype)
    x = GeometricTensor(features, module.in_type, coords if coords.numel() else None)
    arguments, errors = further_features(module, x), []
    others = (y for y in arguments.values() if isinstance(y, GeometricTensor))
    grids = [y.type.gspace for y in others if y.coords is None]
    with torch.no_grad():
        y = module(x, **arguments)
        limit = atol + rtol * float(y.tensor.abs().max())
        for element in elements:
            if not all(maps_grid(grid, element) for grid in grids):
                continue
            moved = module(x.transform(element), **transformed_features(arguments, element)).tensor
            error = (moved - y.transform_fibers(element).tensor).abs()
            assert error.max() <= limit, f"{element}: the error is {error.max():.2e}, more than {limit:.2e}{why}"
            errors.append((element, float(error.mean())))
    return errors


class PointLayer(Wrapper, PointModule):
    """Base class of the attention layers on points, around a ``plain`` module: the call and its checks."""

    plain: PointAttention
    poses: Subgroup = None

    def __init__(self, in_type: FieldType, out_type: FieldType, plain: PointAttention, head_fields: int):
        super().__init__(in_type, out_type)
        self.plain = plain
        self.num_heads = plain.num_heads
        self.head_fields = head_fields

    @property
    def edge_dim(self) -> int | None:
        """The number of features of an edge; None without."""
        return self.plain.edge_dim

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the layer to features at points.

        Args:
            x: features ``(N, in_type.size)`` of type ``in_type`` with ``coords`` ``(N, d)``. The output can be
                differentiated by both.
            edge_index: ``(2, E)``, the edges from keys (first row) to queries (second row), as in PyTorch Geometric and
                escnn's point convolutions. A point attends to itself only if there is such an edge, and every point
                that is there needs an edge to it. Without edges the layer searches neighbours by ``radius`` and
                ``num_neighbours``, or takes all points of the cloud.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud. Edges need none, and with
                one stay within clouds.
            mask: ``(N,)``, False for points that are not there: they are not attended to, and their output is zero.
            measure: ``(N,)``, the positive measure of each point: one of measure 2 counts as two points. Quadrature
                weights make attention that of the continuous field that the points sample.
            edge_attr: the features of edges, of a layer with an ``edge_dim`` F: ``(E, F)``, those of each edge of
                ``edge_index``; or without edges ``(B, n, n, F)``, tables of what query i sees of key j (second and
                third axis) for the points of each of B clouds in their order, of which a cloud may have fewer than n.

        Raises:
            TypeError: ``x`` is not a GeometricTensor, what comes with it no tensor, or an index not of integers.
            ValueError: no points, no coordinates or such that are not finite, a point that does not exist or to which
                no edge leads, edges between clouds, or for a layer that has a ``radius`` or ``num_neighbours``,
                features of edges that are missing, not finite or not for this layer.
        """
        points = self._check(x, edge_index, batch, mask, measure, edge_attr)
        y = self.plain(points.tensor, points.coords, edge_index, batch, mask, measure, edge_attr)
        return GeometricTensor(y, self.out_type, x.coords)

    def _check(self, x: Any, edge_index: Any, batch: Any, mask: Any, measure: Any, edge_attr: Any) -> GeometricTensor:
        """The features, if all arguments fit the layer and each other."""
        name = type(self).__name__
        x = check_points(x, self.in_type, self)
        rule = self.plain.neighbourhood
        if edge_index is not None and not rule.is_global:
            raise ValueError(
                f"edge_index: {name} got edges and searches neighbours itself ({rule}); leave out one of the two"
            )
        checked(check_cloud, x.coords, edge_index, batch, mask, measure, edge_attr)
        return x

    def extra_repr(self) -> str:
        core = self.plain
        rule = core.neighbourhood
        parts = [f"{self.in_type} -> {self.out_type}", f"num_heads={self.num_heads}", f"head_fields={self.head_fields}"]
        parts += shown(radius=(rule.radius, None), num_neighbours=(rule.num_neighbours, None))
        parts += [] if core.cutoff is None else [f"cutoff={core.cutoff.name}"]
        parts += [*shown(period=(core.relation.period, None), poses=(self.poses, None)), *shown_heads(core)]
        parts += [] if isinstance(core.relation, Offset) else [f"relation={core.relation}"]
        parts += shown(length_scale=(core.length_scale, rule.length))
        parts += shown(edge_dim=(core.edge_dim, None))
        return ", ".join(parts)
