"""What escnn's representations give is kept: tests transform fields by the same elements of the same groups."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from escnn.group import GroupElement, Representation
from escnn.nn import FieldType
from scipy.linalg import block_diag

_MOST = 512  # of a representation: those of a continuous group have new elements all the time


def hasten() -> None:
    """Compute the matrix of an element once for each representation, and join those of a type without sparse matrices.

    escnn does both anew for each transformed field, by a sparse matrix of the irreps: milliseconds.
    """
    if not hasattr(Representation.__call__, "__wrapped__"):
        Representation.__call__ = _kept(Representation.__call__)
        FieldType.fiber_representation = _joined


def _kept(compute: Any) -> Any:
    @wraps(compute)
    def call(self: Representation, element: GroupElement) -> np.ndarray:
        kept = vars(self).setdefault("_matrices_of_tests", {})
        key = element.group.name, element.param, _bits(element._element)
        if key not in kept:
            if len(kept) == _MOST:
                kept.clear()
            kept[key] = compute(self, element)
        return kept[key].copy()

    return call


def _bits(value: Any) -> Any:
    """The value itself, to the last bit, where it is an array or has some."""
    if isinstance(value, tuple):
        return tuple(map(_bits, value))
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _joined(self: FieldType, element: GroupElement) -> torch.Tensor:
    assert element.group == self.fibergroup
    return torch.tensor(block_diag(*(representation(element) for representation in self.representations)))
