"""Weights with which a sum over elements of a continuous group is an integral."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import scipy.linalg
import scipy.optimize
from escnn.group import GroupElement, IrreducibleRepresentation

from escnn_attention.groups.representations import faithful, irrep_matrices, is_subgroup, matrices_of

__all__ = ["quadrature_weights"]


def quadrature_weights(
    elements: Sequence[GroupElement], irreps: Callable[[int], Iterable[IrreducibleRepresentation]]
) -> np.ndarray:
    r"""Non-negative weights of sum S with which every irrep but the trivial one has mean zero, frequency by frequency.

    Up to the highest frequency for which there are such weights; of all of them, those nearest to equal ones.
    """
    group, number = elements[0].group, len(elements)
    weights, rows = np.ones(number), np.ones((1, number))
    if is_subgroup(matrices_of(faithful(group), elements)):
        return weights
    for frequency in range(number):
        others = (irrep for irrep in irreps(frequency) if not irrep.is_trivial())
        new = [irrep_matrices(irrep, elements).reshape(number, -1).T for irrep in others]
        rows = np.concatenate([rows, *new])
        found = _solve(rows, weights)
        if found is None:
            break
        weights = found
    return weights


def _solve(rows: np.ndarray, start: np.ndarray) -> np.ndarray | None:
    """The non-negative solution nearest to equal weights of ``rows @ w = (S, 0, 0, ...)``; None if there is none."""
    number = rows.shape[1]
    target = np.zeros(len(rows))
    target[0] = number

    def nearest(positive: np.ndarray) -> np.ndarray:
        """The solution without the sign constraint, for weights that vanish elsewhere."""
        some = rows[:, positive]
        ones = np.ones(some.shape[1])
        weights = np.zeros(number)
        weights[positive] = ones - scipy.linalg.lstsq(some, some @ ones - target, cond=1e-10)[0]
        return weights

    weights = nearest(np.ones(number, dtype=bool))
    if not np.abs(rows @ weights - target).max() <= 1e-10 * number:
        return None
    if (weights < 0).any():
        strong = 1e4
        stacked = np.concatenate([strong * rows, np.eye(number)])
        try:
            weights = scipy.optimize.nnls(stacked, np.concatenate([strong * target, np.ones(number)]))[0]
        except RuntimeError:  # it did not converge
            return None
        weights = nearest(weights > 1e-9)
    fits = np.abs(rows @ weights - target).max() <= 1e-10 * number
    return weights if fits and (weights >= 0).all() else None
