"""Reports of how exactly a module commutes with its group."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from escnn.group import GroupElement, InsufficientIrrepsException
from escnn.gspaces import GSpace, GSpace2D, GSpace3D
from escnn.nn import (
    EquivariantModule,
    FieldType,
    GeometricTensor,
    R2Conv,
    R3Conv,
    RestrictionModule,
    SequentialModule,
)

from escnn_attention._escnn.bases import elements_of
from escnn_attention.equivariance.features import (
    features_on_grid,
    features_on_points,
    further_features,
    transformed_features,
)
from escnn_attention.equivariance.inspection import watch
from escnn_attention.groups.fibers import is_signed_permutation

WHOLE = "whole module"


@dataclass(frozen=True)
class EquivarianceRow:
    """The error of one layer under one element g: the difference of ``layer(g · x)`` and ``g · layer(x)``.

    Attributes:
        layer: the layer's name in its parent, with its class; ``"whole module"`` for all layers together.
        input_shape: the shape of the layer's input.
        element: the element g.
        exact: whether g maps the grid onto itself. Otherwise features are transformed by interpolation, whose error is
            part of the measured one.
        absolute: the largest absolute difference.
        mean: the mean absolute difference.
        scale: the largest absolute value of ``layer(x)``.
        relative: the norm of the difference divided by the norm of ``layer(x)``.

    Example:
        >>> from escnn_attention import SiLU, equivariance_report
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> row = equivariance_report(SiLU(nn.FieldType(g, [g.regular_repr])), (1, 4, 5, 5)).rows[1]
        >>> row.layer, row.input_shape, str(row.element), row.exact, row.relative < 1e-15
        ('whole module', (1, 4, 5, 5), '1[2pi/4]', True, True)
    """

    layer: str
    input_shape: tuple[int, ...]
    element: GroupElement
    exact: bool
    absolute: float
    mean: float
    scale: float
    relative: float


@dataclass(frozen=True)
class EquivarianceReport:
    """The errors of a module and its layers; printing it gives tables.

    Attributes:
        rows: one for each layer and element.
        tolerance: the relative error above which a layer counts as not equivariant.
        exact_sizes: for each layer that is not, the sizes of its input near the present one at which it is.
        convolution: for each interpolated element the relative error of one escnn convolution on the same features,
            whose kernels are steerable: the error due to interpolation and the grid alone.
        rolls: for a module with layers on a torus, the relative error under a roll along each axis, by its name: by the
            fewest positions, of those that divide the side, for which it is at most the tolerance; by one position
            where there are none. For points with a period, that under shifts of each point by whole periods.

    Example:
        >>> from escnn_attention import FieldLayerNorm, SiLU, equivariance_report
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> report = equivariance_report(nn.SequentialModule(FieldLayerNorm(fields), SiLU(fields)), (1, 4, 5, 5))
        >>> report.relative_error < 1e-12, report.layers, report.inexact_layers
        (True, ('0 (FieldLayerNorm)', '1 (SiLU)'), ())
    """

    rows: tuple[EquivarianceRow, ...]
    tolerance: float
    exact_sizes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    convolution: dict[GroupElement, float] = field(default_factory=dict)
    rolls: dict[str, float] = field(default_factory=dict)

    @property
    def absolute_error(self) -> float:
        """The largest absolute error of the whole module, over the elements that map the grid onto itself."""
        return max((r.absolute for r in self._whole()), key=_order, default=0.0)

    @property
    def relative_error(self) -> float:
        """The largest relative error of the whole module, over the elements that map the grid onto itself."""
        return max((r.relative for r in self._whole()), key=_order, default=0.0)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        return tuple(dict.fromkeys(r.layer for r in self.rows if r.layer != WHOLE))

    @property
    def inexact_layers(self) -> tuple[str, ...]:
        """The layers whose relative error is above the tolerance for an element that maps the grid onto itself."""
        return tuple(name for name in self.layers if not self._worst(name).relative <= self.tolerance)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "absolute_error": self.absolute_error,
            "relative_error": self.relative_error,
            "tolerance": self.tolerance,
            "inexact_layers": list(self.inexact_layers),
            "exact_sizes": {name: [list(s) for s in sizes] for name, sizes in self.exact_sizes.items()},
            "convolution": {str(g): error for g, error in self.convolution.items()},
            "rolls": self.rolls,
            "rows": [{**asdict(r), "element": str(r.element), "input_shape": list(r.input_shape)} for r in self.rows],
        }

    def __str__(self) -> str:
        wide = max(24, *(len(_label(row.element)) for row in self.rows))
        lines = [f"{'element':<{wide}} {'absolute':>10} {'relative':>10}"]
        for row in self.rows:
            if row.layer == WHOLE:
                note = "" if row.exact else "  interpolated"
                if row.element in self.convolution:
                    note += f"; one convolution: {self.convolution[row.element]:.1e}"
                lines.append(f"{_label(row.element):<{wide}} {row.absolute:>10.1e} {row.relative:>10.1e}{note}")
        lines += [f"{name:<{wide}} {'':>10} {error:>10.1e}" for name, error in self.rolls.items()]
        if self.layers:
            width = max(map(len, self.layers))
            lines += ["", f"{'layer':<{width}} {'input':>16} {'absolute':>10} {'relative':>10}"]
            for name in self.layers:
                worst = self._worst(name)
                size = _size(worst.input_shape[2:])
                lines.append(f"{name:<{width}} {size:>16} {worst.absolute:>10.1e} {worst.relative:>10.1e}")
        lines += ["", *self._findings()]
        return "\n".join(lines)

    def _findings(self) -> Iterator[str]:
        if self.relative_error <= self.tolerance:
            yield f"equivariant: relative error {self.relative_error:.1e}, at most {self.tolerance:.0e}"
        else:
            yield f"NOT equivariant: relative error {self.relative_error:.1e}, more than {self.tolerance:.0e}"
        if any(_order(error) > self.tolerance for error in self.rolls.values()):
            yield f"NOT equivariant to rolls: a layer is no torus (relative error {max(self.rolls.values()):.1e})"
        for name in self.inexact_layers:
            worst = self._worst(name)
            sizes = ", ".join(_size(s) for s in self.exact_sizes.get(name, ()))
            space = worst.input_shape[2:]
            fault = f"loses exactness at input size {_size(space)}" if space else "is not equivariant"
            yield (
                f"{name} {fault} (relative error {worst.relative:.1e} for {_label(worst.element)})"
                + (f"; exact at {sizes}" if sizes else "")
                + ("; HalvingPool and AntialiasedPool are exact at every size" if "Pool" in name else "")
            )

    def _whole(self) -> list[EquivarianceRow]:
        return [r for r in self.rows if r.layer == WHOLE and r.exact]

    def _worst(self, layer: str) -> EquivarianceRow:
        return max((r for r in self.rows if r.layer == layer and r.exact), key=lambda r: _order(r.relative))


def equivariance_report(
    module: EquivariantModule,
    input_shape: Sequence[int],
    *,
    layers: bool = True,
    tolerance: float = 1e-6,
    seed: int = 0,
    coords: torch.Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
    elements: Sequence[GroupElement] | None = None,
) -> EquivarianceReport:
    r"""Measure the equivariance error of a module, and of each layer of a sequential one, in float64.

    For every element g of the fiber group, a module m and features x the error is the difference of
    :math:`m(g \cdot x)` and :math:`g \cdot m(x)`. Elements that map the grid onto itself act exactly, on random
    features, and so does every element on scattered points. For the others escnn interpolates; they are measured on
    smooth features, marked, and left out of the verdict. For comparison the report gives the error of one convolution
    of escnn. The module is copied and not changed; the copy is in eval mode. For a continuous group escnn's testing
    elements are used, and in space all rotations of a cube. Where the module restricts its features to a subgroup, by a
    ``RestrictionModule``, the elements are those of the subgroup.

    Where some layers are on a torus (``padding_mode="circular"``), rolls are measured, too, and for points with a
    ``period`` shifts by whole periods; in a network all layers have to be on it. A network that halves the grid
    commutes with rolls by multiples of 2 or a power of 2 only: the report names the fewest positions.

    Strides and pooling keep equivariance at some sizes only. The report names each layer that is not exact, with its
    input size and nearby sizes at which it is exact. A module that is not sequential is named by its class, with the
    layers inside that are not exact.

    The layers of this package and convolutions on grids are exact to about 1e-15, escnn's point convolutions, whose
    bases are float32, to about 1e-7.

    Args:
        module: any of escnn's modules, or one that is composed of them.
        input_shape: the shape of the input, ``(B, in_type.size, *space)`` on a grid, or ``(N, in_type.size)`` for a
            cloud of N points.
        layers: whether to look at the layers of a sequential module one by one.
        tolerance: the relative error above which a layer counts as not equivariant.
        seed: of the random features.
        coords: ``(N, d)``, the points of a cloud; by default random ones, normally distributed.
        arguments: further arguments of the module by name, such as its ``memory`` or ``condition``: the group acts on
            those that are a GeometricTensor, and others are invariant. The module is then measured as a whole. Random
            ones stand for a ``memory``, ``condition``, ``edge_attr`` or ``keys`` that this package's module needs and
            is not given.
        elements: the elements that are measured; by default those above.

    Returns:
        the report; it prints as a table.

    Raises:
        TypeError: ``module`` is not an EquivariantModule.
        ValueError: ``input_shape`` does not fit ``module.in_type``, or no ``elements``, or some of another group.

    Example:
        >>> from escnn_attention import equivariance_report
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr])
        >>> strided = nn.SequentialModule(nn.ReLU(fields), nn.R2Conv(fields, fields, 3, padding=1, stride=2))
        >>> report = equivariance_report(strided, (1, 4, 8, 8))
        >>> report.inexact_layers, report.exact_sizes
        (('1 (R2Conv)',), {'1 (R2Conv)': ((7, 7), (9, 9))})

    Source: the condition on sizes is Appendix C of Romero et al., "Attentive Group Equivariant Convolutional
    Networks", ICML 2020.
    """
    shape, points = _checked(module, input_shape, coords)
    space: GSpace = module.in_type.gspace
    # escnn's layers keep expanded weights in eval mode: after train mode they are expanded again, in float64. They may
    # belong to a graph, which deepcopy refuses.
    expanded = {id(t): t.detach().clone() for t in module.buffers() if not t.is_leaf}
    module = copy.deepcopy(module, expanded).double().train().eval()
    for part in module.modules():
        if isinstance(part, EquivariantModule) and type(part).__module__.startswith("escnn."):
            part.register_forward_hook(_in_double)
    at = features_on_points(module, shape, seed, coords) if points else features_on_grid(module, shape, seed, False)
    measured, others = _elements(module, elements), _others(module, at, arguments, seed)
    layers = layers and not others
    grids = [] if points else [space]
    grids += [x.type.gspace for x in others.values() if isinstance(x, GeometricTensor) and x.coords is None]
    exact = {g: same for g, same in measured.items() if all(maps_grid(grid, g) for grid in grids)}
    interpolated = {g: same for g, same in measured.items() if g not in exact}
    rows = []
    exact_sizes = {}
    named = [(WHOLE, module), *(layers_of(module) if layers else ())]
    by_itself = layers and not isinstance(module, SequentialModule)
    for smooth, chosen in ((False, exact), (True, interpolated)):
        x = features_on_grid(module, shape, seed, smooth) if smooth and not points else at
        y = x
        for name, layer in named:
            layer_input = x if name == WHOLE else y
            new, output = _errors(name, layer, layer_input, chosen, not smooth, others)
            rows += new
            if name != WHOLE:
                y = output
            if smooth or not any(_order(r.relative) > tolerance for r in new):
                continue
            if by_itself:
                # The module itself is the layer to name.
                name = type(module).__name__
                rows += [replace(r, layer=name) for r in new]
            if name != WHOLE:
                inner = _inexact_inside(
                    layer, layer_input, "" if by_itself else f"{name.split()[0]}.", exact, tolerance
                )
                rows += [row for _, _, of_part in inner.values() for row in of_part]
                for label, (part, given, _) in {name: (layer, layer_input, []), **inner}.items():
                    if not points:
                        exact_sizes[label] = _exact_sizes(part, tuple(given.shape), exact, tolerance, seed)
    order = {name: place for place, (name, _) in enumerate(named)}
    rows.sort(key=lambda r: order.get(r.layer, len(order)))
    x = features_on_grid(module, shape, seed, smooth=True) if interpolated else None
    beside = None if x is None else convolution_beside(x, seed)
    found = () if x is None or beside is None else _errors("", beside, x, interpolated, False)[0]
    convolution = {r.element: r.relative for r in found}
    return EquivarianceReport(tuple(rows), tolerance, exact_sizes, convolution, _rolls(module, at, others, tolerance))


def assert_equivariant(
    module: EquivariantModule,
    input_shape: Sequence[int],
    tolerance: float = 1e-6,
    *,
    seed: int = 0,
    coords: torch.Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Assert that a module is equivariant, in a test.

    Args:
        module, input_shape, seed, coords, arguments: as in :func:`equivariance_report`.
        tolerance: the largest relative error in float64, over the elements that map the grid onto itself.

    Raises:
        AssertionError: the error is larger, or not a number; the message is the report.
        TypeError, ValueError: as in :func:`equivariance_report`.

    Example:
        >>> from escnn_attention import FieldLayerNorm, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> assert_equivariant(FieldLayerNorm(nn.FieldType(g, [g.regular_repr])), (1, 4, 5, 5), tolerance=1e-12)
    """
    report = equivariance_report(
        module, input_shape, tolerance=tolerance, seed=seed, coords=coords, arguments=arguments
    )
    if not report.relative_error <= tolerance:
        raise AssertionError(f"{type(module).__name__} is not equivariant\n{report}")


def _checked(
    module: EquivariantModule, input_shape: Sequence[int], coords: torch.Tensor | None
) -> tuple[tuple[int, ...], bool]:
    """The shape of the input, and whether it is that of scattered points."""
    if not isinstance(module, EquivariantModule):
        given = " (give its as_fields())" if hasattr(module, "as_fields") else ""
        raise TypeError(f"module: got {type(module).__name__}{given}, needed an escnn.nn.EquivariantModule")
    dim, shape = module.in_type.gspace.dimensionality, tuple(int(n) for n in input_shape)
    points = len(shape) == 2 and dim > 0
    if len(shape) not in (2, 2 + dim) or shape[1] != module.in_type.size:
        raise ValueError(
            f"input_shape: got {shape}, needed (batch, {module.in_type.size}{', size' * dim})"
            f" or, for scattered points, (points, {module.in_type.size})"
        )
    if coords is not None and (not points or tuple(coords.shape) != (shape[0], dim)):
        needed = f"({shape[0]}, {dim})" if points else "None: input_shape is that of a grid"
        raise ValueError(f"coords: got shape {tuple(coords.shape)}, needed {needed}")
    return shape, points


def _in_double(_layer: Any, _input: Any, y: Any) -> Any:
    """The output of a layer of escnn in float64: that of its poolings, norms and gates is in float32."""
    return GeometricTensor(y.tensor.double(), y.type, y.coords) if isinstance(y, GeometricTensor) else y


Elements = Mapping[GroupElement, Mapping[str, GroupElement]]
"""Elements, and the same ones by the names of the fiber groups to which a module restricts its features."""


def _elements(module: EquivariantModule, elements: Sequence[GroupElement] | None) -> Elements:
    """The elements under which a module should be equivariant: those of the last subgroup to which it restricts."""
    space, path = module.in_type.gspace, []
    for part in module.modules():
        if isinstance(part, RestrictionModule) and part.in_type.gspace == space:
            path.append(space.restrict(part._id)[1])
            space = part.out_type.gspace
    if elements is not None and not len(elements):
        raise ValueError("elements: got none, needed at least one")
    found = {}
    for g in elements_of(space.fibergroup) if elements is None else elements:
        if g.group != space.fibergroup:
            raise ValueError(f"elements: got one of {g.group.name}, needed those of {space.fibergroup.name}")
        same = {g.group.name: g}
        for to_group in reversed(path):
            g = to_group(g)
            same[g.group.name] = g
        found[g] = same
    return found


def _transformed(x: GeometricTensor, same: Mapping[str, GroupElement]) -> GeometricTensor:
    """Features transformed by an element, whichever of the groups they are over."""
    name = x.type.fibergroup.name
    if name not in same:
        raise ValueError(f"module: got features over {name}, needed {' or '.join(same)}, or a RestrictionModule to it")
    return x.transform(same[name])


@torch.no_grad()
def _errors(
    name: str,
    layer: EquivariantModule,
    x: GeometricTensor,
    elements: Elements,
    exact: bool,
    others: Mapping[str, Any] | None = None,
) -> tuple[list[EquivarianceRow], GeometricTensor]:
    arguments = others or {}
    output = layer(x, **arguments)
    scale, norm = output.tensor.abs().max().item(), output.tensor.norm().item()
    rows = []
    for g, same in elements.items():
        transformed = _transformed(output, same).tensor
        of_transformed = layer(_transformed(x, same), **transformed_features(arguments, g)).tensor
        if transformed.shape != of_transformed.shape:
            raise ValueError(
                f"{name}: for {g} the output of the transformed input has shape {tuple(of_transformed.shape)}, the "
                f"transformed output {tuple(transformed.shape)}"
            )
        difference = of_transformed - transformed
        rows.append(
            EquivarianceRow(
                layer=name,
                input_shape=tuple(x.shape),
                element=g,
                exact=exact,
                absolute=difference.abs().max().item(),
                mean=difference.abs().mean().item(),
                scale=scale,
                relative=difference.norm().item() / norm if norm else difference.norm().item(),
            )
        )
    return rows, output


def _others(
    module: EquivariantModule, x: GeometricTensor, arguments: Mapping[str, Any] | None, seed: int
) -> dict[str, Any]:
    """Further arguments of a module, in float64: those that are given, and random ones that it needs besides."""

    def doubled(value: Any) -> Any:
        if isinstance(value, GeometricTensor):
            coords = None if value.coords is None else value.coords.double()
            return GeometricTensor(value.tensor.double(), value.type, coords)
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    given = {name: doubled(value) for name, value in (arguments or {}).items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {**further_features(module, x, given), **given}


@torch.no_grad()
def _rolls(module: EquivariantModule, x: GeometricTensor, others: dict[str, Any], tolerance: float) -> dict[str, float]:
    """The relative errors under rolls of a module that has layers on a torus; none for another, or for two sets."""
    found: dict[str, float] = {}
    if any(isinstance(value, GeometricTensor) for value in others.values()):
        return {}
    if x.coords is not None:
        for period in (getattr(getattr(part, "relation", None), "period", None) for part in module.modules()):
            if period is not None:
                y = module(x, **others).tensor
                steps = torch.randint(-2, 3, x.coords.shape, generator=torch.Generator().manual_seed(0))
                shifts = steps * torch.as_tensor(period, dtype=x.coords.dtype)
                moved = module(GeometricTensor(x.tensor, x.type, x.coords + shifts), **others).tensor
                return {f"shift by {period}": float((moved - y).norm() / y.norm())}
        return {}
    windows = [getattr(part, "window", None) for part in module.modules()]
    modes = [getattr(part, "padding_mode", None) for part in module.modules()]
    if "circular" not in modes and not any(getattr(window, "circular", False) for window in windows):
        return {}
    y = module(x, **others).tensor
    first = int(any(getattr(window, "causal", False) for window in windows))  # time has an end
    for axis in range(first, x.tensor.dim() - 2):
        size, given = x.shape[axis + 2], y.shape[axis + 2]
        errors: dict[int, float] = {}
        for n in (n for n in range(1, size) if size % n == 0 and (given == 1 or n * given % size == 0)):
            rolled = module(GeometricTensor(x.tensor.roll(n, axis + 2), x.type), **others).tensor
            difference = rolled - y.roll(n * given // size, axis + 2)
            error = float(difference.norm() / (y.norm() or 1))
            if not errors or error <= tolerance:
                errors = {n: error}
            if error <= tolerance:
                break
        for n, error in errors.items():
            found[f"roll {f'by {n} ' if n > 1 else ''}along axis {axis}"] = error
    return found


def _inexact_inside(
    layer: EquivariantModule, x: GeometricTensor, prefix: str, elements: Elements, tolerance: float
) -> dict[str, tuple[EquivariantModule, GeometricTensor, list[EquivarianceRow]]]:
    """The layers inside another that are not exact, by name, with their inputs and rows."""
    found = {}
    for name, (part, given) in inner_layers(layer, x).items():
        rows, _ = _errors(f"{prefix}{name}", part, given, elements, True)
        if any(_order(r.relative) > tolerance for r in rows):
            found[f"{prefix}{name}"] = (part, given, rows)
    return found


def _exact_sizes(
    layer: EquivariantModule,
    shape: tuple[int, ...],
    elements: Elements,
    tolerance: float,
    seed: int,
) -> tuple[tuple[int, ...], ...]:
    """The nearest smaller and the nearest larger size at which a layer is exact, at most a few positions away."""
    found = []
    for sign in (-1, 1):
        for step in range(1, 9):
            size = tuple(n + sign * step for n in shape[2:])
            if not size or min(size) < 1:
                break
            try:
                rows, _ = _errors("", layer, features_on_grid(layer, (1, shape[1], *size), seed, False), elements, True)
            except (RuntimeError, ValueError, AssertionError):
                continue  # the layer cannot take this size at all
            if all(_order(r.relative) <= tolerance for r in rows):
                found.append(size)
                break
    return tuple(found)


def _label(element: GroupElement) -> str:
    """An element in one line; escnn writes rotations of space as a matrix."""
    return " ".join(str(element).split())


def _order(error: float) -> float:
    """NaN counts as the largest error."""
    return math.inf if math.isnan(error) else error


def _size(space: Sequence[int]) -> str:
    return "×".join(map(str, space)) or "-"


def convolution_beside(x: GeometricTensor, seed: int) -> EquivariantModule | None:
    """A convolution of escnn on features of a grid, ``R2Conv`` or ``R3Conv`` with random weights, in float64.

    Its output has one field of each representation of the features. None where there is neither a plane nor a space,
    or where escnn has no kernel, as of products of high frequencies.
    """
    space = x.type.gspace
    if not isinstance(space, (GSpace2D, GSpace3D)):
        return None
    kind = R2Conv if isinstance(space, GSpace2D) else R3Conv
    out_type = FieldType(space, list(dict.fromkeys(x.type.representations)))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # escnn makes kernels in no other
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # With recompute=True it shares no basis, and so no precision, with the networks that are measured.
            convolution: EquivariantModule = kind(x.type, out_type, 3, padding=1, bias=False, recompute=True)
    except InsufficientIrrepsException:
        return None
    finally:
        torch.set_default_dtype(default)
    return convolution.to(x.tensor.device).double().eval()


@torch.no_grad()
def inner_layers(module: EquivariantModule, x: GeometricTensor) -> dict[str, tuple[EquivariantModule, GeometricTensor]]:
    """The equivariant modules in a module that map one field to one field, and the first input of each.

    Modules with equivariant modules inside are left out, since the innermost is named. So are modules on another
    gspace, in which a network has left its group.

    They are by name and class, in the order in which they are called.
    """
    innermost: dict[str, EquivariantModule] = {}
    for name, layer in module.named_modules():
        inside = any(m is not layer and isinstance(m, EquivariantModule) for m in layer.modules())
        if name and not inside and isinstance(layer, EquivariantModule) and not isinstance(layer, SequentialModule):
            innermost[f"{name} ({type(layer).__name__})"] = layer
    found = {}
    for label, (given, named) in watch(lambda: module(x), innermost, inputs="all").items():
        field = given[0] if len(given) == 1 and not named else None
        if isinstance(field, GeometricTensor) and field.type.gspace == x.type.gspace:
            found[label] = (innermost[label], field)
    return found


def layers_of(module: EquivariantModule, prefix: str = "") -> Iterator[tuple[str, EquivariantModule]]:
    """The layers of a sequential module, through the sequential modules in it."""
    if isinstance(module, SequentialModule):
        for name, child in module.named_children():
            if isinstance(child, SequentialModule):
                yield from layers_of(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name} ({type(child).__name__})", child


def maps_grid(space: GSpace, element: GroupElement) -> bool:
    """Whether an element maps a grid onto itself."""
    if space.dimensionality == 0:
        return True
    return bool(is_signed_permutation(np.asarray(space.basespace_action(element))))
