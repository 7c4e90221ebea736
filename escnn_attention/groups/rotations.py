"""Rotations of space that fill the group evenly: subgroups, their cosets, and spirals."""

from __future__ import annotations

import math

import numpy as np
from escnn.group import O3, SO3
from scipy.spatial.transform import Rotation

__all__ = ["POLYHEDRAL", "rotations_of"]


POLYHEDRAL = {"tetra": 12, "cube": 24, "ico": 60}
"""The number of rotations of a polyhedron."""


def rotations_of(group: SO3 | O3, number: int, kind: str) -> np.ndarray:
    """Unit quaternions ``(S, 4)``, the real part last."""
    if kind == "auto":
        kind = next((k for k in ("ico", "cube", "tetra") if number % POLYHEDRAL[k] == 0), "spiral")
    twice = 2 if isinstance(group, O3) else 1
    if kind in POLYHEDRAL and number % POLYHEDRAL[kind]:
        raise ValueError(
            f"samples: got {twice * number} of kind {kind!r} for {group.name}, needed a multiple of "
            f"{twice * POLYHEDRAL[kind]}; any number can be had as 'spiral' or 'thomson'"
        )
    if kind == "spiral":
        return _spiral(number)
    if kind == "thomson_cube" and number % 24:
        raise ValueError(f"samples: got {twice * number} of kind {kind!r}, needed a multiple of {twice * 24}")
    # The rotations of O(3) are those of SO(3), whose quaternions escnn holds alike.
    grid = group.grid_so3 if isinstance(group, O3) else group.grid
    arguments = {"thomson_cube": (number // 24,)}.get(kind, () if kind in POLYHEDRAL else (number,))
    found = [np.asarray(h.to("Q")[1] if isinstance(group, O3) else h.to("Q")) for h in grid(kind, *arguments)]
    rotations = np.stack(found).astype(np.float64)
    return _orbits(rotations, number // len(rotations)) if kind in POLYHEDRAL else rotations


def _orbits(subgroup: np.ndarray, count: int) -> np.ndarray:
    """A subgroup and some of its cosets gk, each as far from those before it as may be.

    The subgroup maps these samples onto each other, so that a layer is exactly equivariant to it.
    """
    candidates, rotations, samples = _spiral(1024), Rotation.from_quat(subgroup), subgroup
    nearest = np.abs(candidates @ subgroup.T).max(axis=1)  # the cosine of half the angle to the nearest sample
    for _ in range(count - 1):
        coset = (rotations * Rotation.from_quat(candidates[nearest.argmin()])).as_quat()
        samples = np.concatenate([samples, coset])
        nearest = np.maximum(nearest, np.abs(candidates @ coset.T).max(axis=1))
    return samples


def _spiral(number: int) -> np.ndarray:
    """Super-Fibonacci spirals: two circles of the sphere of unit quaternions are gone round at irrational paces."""
    s = np.arange(number) + 0.5
    paces = (math.sqrt(2), 1.533751168755204288118041)  # the second solves x⁴ = x + 4
    (a, b), (r, t) = (2 * math.pi * s / p for p in paces), (np.sqrt(s / number), np.sqrt(1 - s / number))
    return np.stack([r * np.sin(a), r * np.cos(a), t * np.sin(b), t * np.cos(b)], axis=1)
