"""Complete spaces of equivariant kernels on a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, R2Conv, R3Conv
from torch import Tensor

from escnn_attention._checks import check_int, check_option
from escnn_attention.groups.fibers import fibers, is_regular, is_signed_permutation
from escnn_attention.plain.attentive import PoseKernel

BasisKind = Literal["auto", "complete", "bandlimited"]


class BasisOptions(TypedDict):
    """The arguments of escnn's convolutions that choose their basis."""

    rings: list[float]
    sigma: float
    frequencies_cutoff: Callable[[float], float]


def complete_basis(kernel_size: int, *, dilation: int = 1, dimensions: int = 2) -> BasisOptions:
    r"""The arguments with which escnn's ``R2Conv`` and ``R3Conv`` hold every equivariant kernel of a size.

    By default escnn limits the angular frequencies: of the 36 weights of a 3×3 kernel between regular fields of C4 it
    has 24. Here the rings are all the distinct radii r of the grid, of width :math:`\sigma = 0.4`, with frequencies up
    to :math:`2r + 1` in the plane and :math:`3r + 1` in space, in units of the step between the points of the kernel.
    For the groups that map the grid onto itself the basis spans all their discrete kernels, at every size from 1 to 7
    in the plane and from 1 to 4 in space. It is overcomplete: there are more weights than dimensions.

    For other groups, C8 for instance, high frequencies alias: the elements that take the grid between its points hold
    less exactly than with escnn's defaults.

    Args:
        kernel_size: the width of the kernel.
        dilation: of the convolution.
        dimensions: of the grid, 2 or 3.

    Returns:
        keyword arguments of ``R2Conv`` or ``R3Conv``: ``rings``, ``sigma`` and ``frequencies_cutoff``.

    Raises:
        TypeError, ValueError: an argument is not a positive integer, or ``dimensions`` is neither 2 nor 3.

    Example:
        >>> from escnn_attention import complete_basis
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 2 * [g.regular_repr])
        >>> convolution = nn.R2Conv(fields, fields, kernel_size=3, **complete_basis(3))
    """
    check_int("kernel_size", kernel_size)
    check_int("dilation", dilation)
    if check_int("dimensions", dimensions) not in (2, 3):
        raise ValueError(f"dimensions: got {dimensions}, needed 2 or 3")
    squares = np.unique(np.square(_places(kernel_size, dimensions)).sum(1).round(6))
    # Rounded down: escnn takes no ring beyond the corner of the grid, not even by a rounding error.
    return {
        "rings": [dilation * math.floor(math.sqrt(r) * 1e6) / 1e6 for r in squares],
        "sigma": 0.4 * dilation,
        "frequencies_cutoff": lambda radius: dimensions * radius / dilation + 1,
    }


@torch.no_grad()
def fit_kernel(convolution: R2Conv | R3Conv, kernel: Tensor, *, tolerance: float = 1e-4) -> float:
    r"""Set the weights of a convolution of escnn such that its filter is a given kernel.

    The weights are the least-squares solution of least norm, :math:`\min_w \|\sum_b w_b K_b - K\|`, block by block of
    one input and one output field. The bias is left alone.

    Args:
        convolution: whose basis spans the kernel; see :func:`complete_basis`.
        kernel: ``(out_type.size, in_type.size / groups, *kernel)``, any floating-point tensor.
        tolerance: the largest distance of the filter from the kernel, relative to the norm of the kernel.

    Returns:
        that distance. escnn's bases are in single precision, so that about 1e-6 is as good as it gets.

    Raises:
        ValueError: the kernel has another shape, or is not in the span of the basis. The weights are then unchanged.

    Example:
        >>> import torch
        >>> from escnn_attention import complete_basis, fit_kernel
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, fields = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, [g.regular_repr])
        >>> convolution = nn.R2Conv(image, fields, kernel_size=3, **complete_basis(3))
        >>> psi = torch.randn(3, 3)
        >>> kernel = torch.stack([torch.rot90(psi, i) for i in range(4)]).unsqueeze(1)
        >>> fit_kernel(convolution, kernel) < 1e-5
        True
    """
    if not isinstance(convolution, (R2Conv, R3Conv)):
        raise TypeError(f"convolution: got {type(convolution).__name__}, needed an R2Conv or R3Conv")
    expansion, weights = convolution.basisexpansion, convolution.weights
    in_type = convolution.in_type.index_select(list(range(len(convolution.in_type) // convolution.groups)))
    shape = (convolution.out_type.size, in_type.size, *[convolution.kernel_size] * convolution.d)
    if not isinstance(kernel, Tensor) or not kernel.is_floating_point() or tuple(kernel.shape) != shape:
        got = tuple(kernel.shape) if isinstance(kernel, Tensor) else type(kernel).__name__
        raise ValueError(f"kernel: got {got}, needed a floating-point tensor of shape {shape}")
    target = kernel.detach().to(device=weights.device, dtype=torch.float64).flatten(2)

    blocks: dict[tuple[int, int], list[int]] = {}
    for i, info in enumerate(expansion.get_basis_info()):
        blocks.setdefault((info["out_field_position"], info["in_field_position"]), []).append(i)
    solution = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device)
    solvers: dict[tuple[Any, Any], Tensor] = {}
    for (o, i), members in blocks.items():
        block = (_channels(convolution.out_type, o), _channels(in_type, i))
        pair = convolution.out_type.representations[o], in_type.representations[i]
        key = (id(pair[0]), id(pair[1]))
        if key not in solvers:
            elements = _elements(expansion, weights, members)[:, block[0], block[1]].flatten(1).T
            solvers[key] = torch.linalg.pinv(elements.double(), rtol=1e-6)
        solution[members] = solvers[key] @ target[block].flatten()
    got = expansion(solution.to(weights.dtype)).reshape(target.shape).double()
    error = ((got - target).norm() / target.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
    if not error <= tolerance:
        raise ValueError(
            f"kernel: the nearest filter of the basis is {error:.1e} away (relative to its norm), more than the "
            f"tolerance {tolerance:.0e}; needed an equivariant kernel, and a basis that spans it (see complete_basis)"
        )
    weights.copy_(solution)
    if not convolution.training:
        convolution.train().eval()  # expands the filter again
    return error


def _channels(field_type: FieldType, field: int) -> slice:
    return slice(field_type.fields_start[field], field_type.fields_end[field])


def _elements(expansion: torch.nn.Module, weights: Tensor, members: Sequence[int]) -> Tensor:
    """``(members, out, in, places)``: the elements of the basis that belong to some of the weights."""
    ones = torch.zeros(len(members), len(weights), dtype=weights.dtype, device=weights.device)
    ones[torch.arange(len(members)), torch.as_tensor(members)] = 1
    return torch.stack([expansion(one).flatten(2) for one in ones])


# ----------------------------------------------------------------------------------------------- kernels between poses


def poses_of(name: str, field_type: FieldType, layer: str) -> int:
    """The poses of the fields of a type: :math:`|H|` for regular fields, 1 for trivial ones; others are refused."""
    check_finite(name, field_type.gspace, layer)
    order = fibers(field_type.gspace).order
    if all(is_regular(r) for r in field_type.representations):
        return order
    if all(r.is_trivial() for r in field_type.representations):
        return 1
    names = ", ".join(sorted({r.name for r in field_type.representations}))
    raise ValueError(f"{name}: {layer} needs regular fields only, or trivial fields only; got {names}")


def check_finite(name: str, gspace: GSpace, layer: str) -> None:
    """The fiber group is finite."""
    group = gspace.fibergroup
    if group.continuous:
        raise NotImplementedError(
            f"{name}: {layer} needs a finite fiber group, got {group.name}, which is continuous; restrict the gspace "
            "to a finite subgroup, for example gspaces.rot2dOnR2(8) for gspaces.rot2dOnR2(-1)"
        )


def check_grid(name: str, gspace: GSpace, layer: str) -> None:
    """There is a base space of two or three dimensions to convolve over."""
    if gspace.dimensionality not in (2, 3):
        raise ValueError(
            f"{name}: {layer} needs a grid of 2 or 3 dimensions, got {gspace.name} with {gspace.dimensionality}"
        )


def kernel_orbits(gspace: GSpace, out_poses: int, in_poses: int, kernel_size: int | None) -> np.ndarray:
    r"""Which entries of a kernel the group makes equal: ``(out_poses, in_poses, *kernel)`` of orbit numbers.

    A kernel is equivariant where :math:`K(gx)[gh, g\tilde h] = K(x)[h, \tilde h]`, for all elements that map its grid
    onto itself. Orbits are numbered by their first entry, so that between regular fields number :math:`(p, x)` is
    the entry :math:`K(x)[e, p]`, and the weights of a complete kernel are :math:`\psi(x, p)`. Without a
    ``kernel_size`` the map has no places.
    """
    group = fibers(gspace)
    places = np.zeros((1, group.dimension)) if kernel_size is None else _places(kernel_size, group.dimension)
    entries = np.arange(out_poses * in_poses * len(places)).reshape(out_poses, in_poses, len(places))
    # The identity, which not all of escnn's groups have in front, gives the first entry of every orbit.
    identity = group.index(gspace.fibergroup.identity)
    if out_poses > 1:
        entries = entries[_first(identity, out_poses)]
    elif in_poses > 1:
        entries = entries[:, _first(identity, in_poses)]
    products = np.stack([group.quotient[group.inverse[g]] for g in range(group.order)])  # products[g, h] = gh
    orbits = entries
    for g in _grid_elements(gspace, len(places)):
        moved = places @ group.action[g].T
        to = np.isclose(moved[:, None], places, atol=1e-6).all(-1).argmax(-1)
        poses = [products[g] if n > 1 else np.zeros(1, dtype=int) for n in (out_poses, in_poses)]
        orbits = np.minimum(orbits, entries[np.ix_(*poses, to)])
    numbers = np.unique(orbits, return_inverse=True)[1].reshape(entries.shape)
    return numbers.reshape(out_poses, in_poses, *[kernel_size] * (0 if kernel_size is None else group.dimension))


def pose_kernel(
    gspace: GSpace,
    out_fields: int,
    out_poses: int,
    in_fields: int,
    in_poses: int,
    kernel_size: int | None,
    *,
    basis: BasisKind = "auto",
    gain: float,
) -> PoseKernel:
    """A learned equivariant kernel between regular or trivial fields; ``kernel_size=None`` is a map without space.

    ``basis`` is as of :class:`AttentiveConv`, ``gain`` the expected sum of squares of the entries of an output channel.
    """
    check_option("basis", basis, ("auto", "complete", "bandlimited"))
    orbits = kernel_orbits(gspace, out_poses, in_poses, kernel_size)
    all_elements = kernel_size is None or kernel_size == 1 or fibers(gspace).preserves_square
    elements = None
    if kernel_size is not None and not (all_elements and basis != "bandlimited"):
        options: Any = complete_basis(kernel_size, dimensions=gspace.dimensionality) if basis == "complete" else {}
        elements = _sampled(gspace, out_poses, in_poses, kernel_size, options, orbits)
    return PoseKernel(out_fields, in_fields, orbits, elements, gain)


@torch.no_grad()
def _sampled(
    gspace: GSpace, out_poses: int, in_poses: int, kernel_size: int, options: Any, orbits: np.ndarray
) -> np.ndarray:
    """``(m, orbits)``: escnn's basis, of which each orbit takes the mean: it is in single precision."""
    types = [FieldType(gspace, [gspace.regular_repr if n > 1 else gspace.trivial_repr]) for n in (in_poses, out_poses)]
    make = {2: R2Conv, 3: R3Conv}[gspace.dimensionality]
    try:
        # Without recompute=True the basis is that of all convolutions that are alike, in the precision that the last of
        # them was given.
        convolution = make(*types, kernel_size, bias=False, initialize=False, recompute=True, **options)
    except ValueError as error:
        raise ValueError(
            f"kernel_size: got {kernel_size}, at which escnn's band-limited basis is empty; needed another size or "
            'basis="complete"'
        ) from error
    # Of one pair of representations, whose expansion vmap can follow: for large groups that saves seconds.
    ones = torch.eye(len(convolution.weights), dtype=torch.float64)
    elements = torch.func.vmap(convolution.basisexpansion.double(), chunk_size=64)(ones).flatten(1).numpy()
    where = orbits.flatten()
    return np.stack([np.bincount(where, e) / np.bincount(where) for e in elements])


def _first(index: int, number: int) -> np.ndarray:
    """The places of ``number`` things in a row once the one at ``index`` has moved to the front."""
    return np.argsort([index, *(i for i in range(number) if i != index)])


def _grid_elements(gspace: GSpace, places: int) -> Iterable[int]:
    """The elements that map the grid of a kernel onto itself: all of them where it is a single place."""
    group = fibers(gspace)
    return np.flatnonzero(is_signed_permutation(group.action) | (places == 1))


def _places(kernel_size: int, dimensions: int) -> np.ndarray:
    """``(places, d)``: the coordinates of the entries of a kernel, in their order. x runs along the last axis, upwards,
    y and z along those before, downwards.
    """
    axis = np.arange(kernel_size) - (kernel_size - 1) / 2
    steps = [-axis] * (dimensions - 1) + [axis]
    return np.array(list(itertools.product(*steps)))[:, ::-1]
