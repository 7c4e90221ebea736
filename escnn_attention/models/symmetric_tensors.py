"""Symmetric matrices as a field: polarizabilities, stresses, moments of inertia."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from escnn.group import Group, IrreducibleRepresentation, Representation
from escnn.gspaces import GSpace

from escnn_attention.plain.point_network import symmetric_basis


def symmetric_tensor_repr(gspace: GSpace) -> Representation:
    r"""The action of the fiber group on symmetric d × d matrices, :math:`A \mapsto h A h^T`.

    The matrix of an element is orthogonal; it acts on the coordinates of a matrix in the basis of
    :class:`~escnn_attention.models.SymmetricTensors`, in which the diagonal comes first.

    Args:
        gspace: over R^2 or R^3, with any fiber group, finite or continuous.

    Raises:
        ValueError: the gspace has no base space.

    Example:
        >>> import torch
        >>> from escnn_attention.models import SymmetricTensors, symmetric_tensor_repr
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(5)
        >>> tensors = nn.FieldType(g, [symmetric_tensor_repr(g)])
        >>> tensors.size, [tuple(i) for i in tensors.representation.irreps]
        (3, [(0,), (2,)])
    """
    action = gspace.basespace_action
    if gspace.dimensionality == 0 or action is None:
        raise ValueError(f"gspace: got {gspace.name} without a base space, needed one over R^d")
    group: Group = gspace.fibergroup
    elements = list(group.testing_elements() if group.continuous else group.generators) or [group.identity]
    # A group can have different actions of the same name, for example about different axes.
    matrices = np.stack([np.asarray(action(h), dtype=np.float64) for h in elements]).round(6) + 0.0
    name = f"symmetric_tensors[{hashlib.sha256(matrices.tobytes()).hexdigest()[:12]}]"
    if name not in group.representations:
        basis = symmetric_basis(gspace.dimensionality)

        def matrix(element: Any) -> np.ndarray:
            moves = np.asarray(action(element), dtype=np.float64)
            return np.einsum("aij,ik,jl,bkl->ab", basis, moves, moves, basis)

        irreps, change_of_basis = _decompose(group, matrix, len(basis), action, elements)
        group.representations[name] = Representation(group, name, irreps, change_of_basis, [])
    return group.representations[name]


def _decompose(
    group: Group, matrix: Callable[[Any], np.ndarray], size: int, action: Representation, elements: list[Any]
) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """The irreps of an orthogonal representation, and an orthogonal change of basis to their sum.

    The elements generate the group, or are enough elements of a continuous one to distinguish irreps of these
    frequencies.
    """
    if group.continuous:
        candidates = [group.irrep(*i) for i in dict.fromkeys(action.tensor(action).irreps)]
    else:
        candidates = list(group.irreps())
    irreps, columns = [], np.zeros((size, 0))
    for irrep in candidates:
        for embedding in _embeddings(irrep, matrix, size, elements):
            irreps.append(irrep.id)
            columns = np.concatenate([columns, embedding], axis=1)
    if columns.shape != (size, size):
        raise ArithmeticError(f"of {size} dimensions {columns.shape[1]} were found in irreps of {group.name}")
    return irreps, columns


def _embeddings(
    irrep: IrreducibleRepresentation, matrix: Callable[[Any], np.ndarray], size: int, elements: list[Any]
) -> list[np.ndarray]:
    """Isometric maps T ``(size, irrep.size)`` with ρ(h) T = T ψ(h), whose images are orthogonal to each other."""
    identity = np.eye(irrep.size)
    # vec(ρ T − T ψ), with T written row by row
    equations = [np.kron(matrix(h), identity) - np.kron(np.eye(size), np.asarray(irrep(h)).T) for h in elements]
    _, values, rows = np.linalg.svd(np.concatenate(equations))
    rank = int((values > 1e-8).sum())
    found: list[np.ndarray] = []
    for candidate in rows[rank:].reshape(-1, size, irrep.size):
        # The rest after projecting out the copies found so far is a multiple of an isometry.
        for copy in found:
            candidate = candidate - copy @ (copy.T @ candidate)
        scale = np.linalg.norm(candidate) / np.sqrt(irrep.size)
        if scale > 1e-6:
            found.append(candidate / scale)
    return found
