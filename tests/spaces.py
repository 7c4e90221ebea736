"""The gspaces and field types that the tests run over, listed and drawn at random."""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from escnn import group, gspaces
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from hypothesis import strategies as st

from escnn_attention.groups.fibers import fibers

PLANE: dict[str, Callable[[], GSpace]] = {
    "trivial": gspaces.trivialOnR2,
    "flip": gspaces.flip2dOnR2,
    "flip about an odd axis": lambda: gspaces.flip2dOnR2(axis=0.3),
    "C2": lambda: gspaces.rot2dOnR2(2),
    "C3": lambda: gspaces.rot2dOnR2(3),
    "C4": lambda: gspaces.rot2dOnR2(4),
    "C8": lambda: gspaces.rot2dOnR2(8),
    "D3": lambda: gspaces.flipRot2dOnR2(3),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
    "D4 about an odd axis": lambda: gspaces.flipRot2dOnR2(4, axis=math.pi / 8),
    "D6": lambda: gspaces.flipRot2dOnR2(6),
}
VOLUME: dict[str, Callable[[], GSpace]] = {
    "trivial 3D": gspaces.trivialOnR3,
    "inversion": gspaces.invOnR3,
    "mirror": gspaces.mirOnR3,
    "C4 3D": lambda: gspaces.rot2dOnR3(4),
    "C3 3D": lambda: gspaces.rot2dOnR3(3),
    "dihedral 3D": lambda: gspaces.dihedralOnR3(2),
    "conical": lambda: gspaces.conicalOnR3(2),
    "cylindrical": lambda: gspaces.cylindricalOnR3(2),
    "full cylindrical": lambda: gspaces.fullCylindricalOnR3(2),
    "octahedral": gspaces.octaOnR3,
}
LARGE: dict[str, Callable[[], GSpace]] = {
    "full octahedral": gspaces.fullOctaOnR3,
    "icosahedral": gspaces.icoOnR3,
    "full icosahedral": gspaces.fullIcoOnR3,
}
POINT: dict[str, Callable[[], GSpace]] = {
    "D4 on a point": lambda: gspaces.no_base_space(group.dihedral_group(4)),
    "octahedral on a point": lambda: gspaces.no_base_space(group.octa_group()),
}
ALL = PLANE | VOLUME | POINT


def regular(gspace: GSpace, fields: int) -> FieldType:
    return FieldType(gspace, fields * [gspace.regular_repr])


def scalars(gspace: GSpace, fields: int) -> FieldType:
    return FieldType(gspace, fields * [gspace.trivial_repr])


def mixed(gspace: GSpace) -> FieldType:
    """Scalars, the last irrep twice and a regular field, out of order."""
    irrep = gspace.fibergroup.irreps()[-1]
    return FieldType(gspace, [irrep, gspace.trivial_repr, gspace.regular_repr, irrep])


def shape_of(gspace: GSpace, size: int) -> tuple[int, ...]:
    return (size,) * gspace.dimensionality


def random_field(
    field_type: FieldType, *space: int, batch: int = 2, dtype: torch.dtype = torch.float64
) -> GeometricTensor:
    return field_type(torch.randn(batch, field_type.size, *space, dtype=dtype))


def grid_elements(gspace: GSpace) -> list[group.GroupElement]:
    """The elements that map a grid onto itself."""
    if gspace.dimensionality == 0:
        return list(gspace.fibergroup.elements)
    matrices = {g: np.abs(gspace.basespace_action(g)) for g in gspace.fibergroup.elements}
    return [g for g, m in matrices.items() if np.allclose(m, m.round(), atol=1e-6)]


def generators(gspace: GSpace) -> list[group.GroupElement]:
    """Elements that generate the fiber group: whatever commutes with them commutes with their products, with all."""
    return gspace.fibergroup.generators or [gspace.fibergroup.identity]


@functools.cache
def grid_generators(gspace: GSpace) -> list[group.GroupElement]:
    """Elements that generate those which map a grid onto itself."""
    elements = grid_elements(gspace)
    if len(elements) == gspace.fibergroup.order():
        return generators(gspace)
    found, reached = [], {gspace.fibergroup.identity}
    for g in elements:
        if g not in reached:
            found.append(g)
            reached = generated(found)
    return found or elements


def generated(some: list[group.GroupElement]) -> set[group.GroupElement]:
    """The group of all products of some elements."""
    waiting = [some[0].group.identity]
    reached = set(waiting)
    while waiting:
        h = waiting.pop()
        new = {g @ h for g in some} - reached
        reached |= new
        waiting += new
    return reached


def size_of(y: torch.Tensor) -> torch.Tensor:
    """The norm of an output. An output that the symmetry forces to vanish is compared with rounding errors of 1."""
    return y.norm().clamp(min=1e-3 * y.numel() ** 0.5)


def grid_error(module: EquivariantModule, x: GeometricTensor) -> float:
    """The largest relative equivariance error over generators of what maps the grid onto itself, turned by escnn."""
    elements = (grid_generators if x.type.gspace.dimensionality else generators)(x.type.gspace)
    return _error(module, x, elements, GeometricTensor.transform)


def fibers_error(module: EquivariantModule, x: GeometricTensor) -> float:
    """The largest relative equivariance error of a module that moves no position, of the action on fibers alone."""
    return _error(module, x, generators(x.type.gspace), GeometricTensor.transform_fibers)


@torch.no_grad()
def _error(module: EquivariantModule, x: GeometricTensor, elements: list[group.GroupElement], move: Callable) -> float:
    y = module(x)
    return max(((module(move(x, g)).tensor - move(y, g).tensor).norm() / size_of(y.tensor)).item() for g in elements)


def turned_error(module: EquivariantModule, x: GeometricTensor, on_grid: Callable[..., torch.Tensor]) -> float:
    """The largest relative equivariance error of elements of the fiber group, whether or not they keep the grid.

    An element that does not map the grid onto itself turns the grid too: the features g · x live on the turned grid,
    where no interpolation is needed, and the module must give there what g does to its output. Neighbourhoods turn with
    the grid; that they are invariant is to be tested apart.

    One element is drawn, and turned further by generators of the group: their products lead to all others.

    Args:
        module: the module.
        x: its input.
        on_grid: the module on values ``x`` whose grid is turned by a matrix.
    """
    tables, gspace = fibers(x.type.gspace), x.type.gspace

    def output(x: GeometricTensor, turned: group.GroupElement) -> GeometricTensor:
        matrix = tables.action[tables.elements.index(turned)]
        return GeometricTensor(on_grid(x.tensor, torch.tensor(matrix)), module.out_type)

    def error(x: GeometricTensor, y: GeometricTensor, g: group.GroupElement, turned: group.GroupElement) -> float:
        difference = output(x.transform_fibers(g), turned).tensor - y.transform_fibers(g).tensor
        return (difference.norm() / size_of(y.tensor)).item()

    with torch.no_grad():
        first = tables.elements[torch.randint(tables.order, ())]
        errors = [error(x, output(x, gspace.fibergroup.identity), first, first)]
        x = x.transform_fibers(first)
        y = output(x, first)
        return max(errors + [error(x, y, g, g @ first) for g in generators(gspace)])


@st.composite
def field_types(draw: st.DrawFn, gspace: GSpace, max_fields: int = 3) -> FieldType:
    """Any mixture of regular, trivial, irreducible and quotient fields."""
    candidates = [gspace.regular_repr, gspace.trivial_repr, *gspace.fibergroup.irreps()[-2:]]
    if isinstance(gspace.fibergroup, group.CyclicGroup) and gspace.fibergroup.order() % 2 == 0:
        candidates.append(gspace.quotient_repr(2))
    return FieldType(gspace, draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=max_fields)))
