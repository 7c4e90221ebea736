"""Complete spaces of equivariant kernels on a grid."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, R2Conv, R3Conv

from escnn_attention._checks import check_option
from escnn_attention.groups.fibers import fibers, is_regular, is_signed_permutation
from escnn_attention.plain.attentive import PoseKernel

BasisKind = Literal["auto", "complete", "bandlimited"]


def complete_basis(kernel_size: int, dimensions: int) -> dict[str, Any]:
    r"""The arguments with which escnn's ``R2Conv`` and ``R3Conv`` hold every equivariant kernel of a size.

    By default escnn limits the angular frequencies: of the 36 weights of a 3×3 kernel between regular fields of C4 it
    has 24. Here the rings are all the distinct radii r of the grid, of width :math:`\sigma = 0.4`, with frequencies up
    to :math:`2r + 1` in the plane and :math:`3r + 1` in space. For groups that map the grid onto itself the basis spans
    all kernels of sizes from 1 to 7 in the plane and to 4 in space. For others, C8 for instance, high frequencies
    alias: elements that take the grid between its points hold less exactly than with escnn's defaults.
    """
    squares = np.unique(np.square(_places(kernel_size, dimensions)).sum(1).round(6))
    # Rounded down: escnn takes no ring beyond the corner of the grid, not even by a rounding error.
    return {
        "rings": [math.floor(math.sqrt(r) * 1e6) / 1e6 for r in squares],
        "sigma": 0.4,
        "frequencies_cutoff": lambda radius: dimensions * radius + 1,
    }


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
    # The elements that map the grid of a kernel onto itself: all of them where it is a single place.
    for g in np.flatnonzero(is_signed_permutation(group.action) | (len(places) == 1)):
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
        options: Any = complete_basis(kernel_size, gspace.dimensionality) if basis == "complete" else {}
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


def _places(kernel_size: int, dimensions: int) -> np.ndarray:
    """``(places, d)``: the coordinates of the entries of a kernel, in their order. x runs along the last axis, upwards,
    y and z along those before, downwards.
    """
    axis = np.arange(kernel_size) - (kernel_size - 1) / 2
    steps = [-axis] * (dimensions - 1) + [axis]
    return np.array(list(itertools.product(*steps)))[:, ::-1]
