"""The frame of tensors that were printed in a program's own orientation of the molecule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_TRIANGLE = (np.array([0, 0, 1, 0, 1, 2]), np.array([0, 1, 1, 2, 2, 2]))
_IDENTITY = (_TRIANGLE[0] == _TRIANGLE[1]).astype(np.float64)
_SIDES = np.where(_TRIANGLE[0] == _TRIANGLE[1], 1.0, 2**0.5)  # off the diagonal an entry counts twice

# Possible frames of an orientation: the axes in any order and with any directions.
_FRAMES = np.array(
    [
        np.diag(signs) @ np.eye(3)[list(order)]
        for order in itertools.permutations(range(3))
        for signs in ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
    ]
)

_ROTATIONS = np.einsum("fai,fbj->abfij", _FRAMES, _FRAMES)[(..., *_TRIANGLE)]  # (3, 3, 24, 6)

_RADII = np.array([0, 0.31, 0, 0, 0, 0, 0.76, 0.71, 0.66, 0.57])  # covalent, ångström, by charge
_BONDS = {1: (0, 0), 6: (2, 4), 7: (1, 3), 8: (1, 2), 9: (0, 0)}  # least and most that are told apart, by charge
_NUM_KINDS = 10
_CENTRES = np.array([1.05, 1.25, 1.42, 1.6, 2.2, 2.6, 3.2, 4.2])
_WIDTHS = np.array([0.12, 0.12, 0.12, 0.15, 0.3, 0.35, 0.5, 0.7])
_PAIRS = np.zeros((_NUM_KINDS, _NUM_KINDS), dtype=np.int64)
for _number, (_a, _b) in enumerate(itertools.combinations_with_replacement(range(_NUM_KINDS), 2)):
    _PAIRS[_a, _b] = _PAIRS[_b, _a] = _number
_NUM_PAIRS = _NUM_KINDS * (_NUM_KINDS + 1) // 2

_FITTED = 5_000  # molecules that the bonds are fitted to
_ROUNDS = 4
_RIDGE = 1e-2
_AT_ONCE = 512  # molecules
# The least decrease of the squared error by which another frame replaces the expected one, 13 times as frequent: it is
# 2 log 13 for errors of 1 in each entry.
_MARGIN = 5.0


def matrices(entries: npt.ArrayLike) -> Array:
    """Symmetric matrices (…, 3, 3) from xx, xy, yy, xz, yz, zz (…, 6).

    >>> matrices([1, 2, 3, 4, 5, 6]).tolist()
    [[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]]
    """
    values = np.asarray(entries, dtype=np.float64)
    full = np.empty((*values.shape[:-1], 3, 3))
    rows, columns = _TRIANGLE
    full[..., rows, columns] = full[..., columns, rows] = values
    return full


def standard_axes(charges: Array, positions: Array) -> Array:
    """The axes of the standard orientation of molecules without symmetry, as rows (M, 3, 3).

    They are the principal axes of Σ_i Z_i (x_i − c)(x_i − c)ᵀ about the centre of charge c, the longest first. The
    second and the third point to where Σ_i Z_i (a · (x_i − c))³ is positive, and the first makes them right-handed.
    """
    offsets = positions - (charges[..., None] * positions).sum(1, keepdims=True) / charges.sum(1)[:, None, None]
    _, vectors = np.linalg.eigh(np.einsum("mi,mia,mib->mab", charges, offsets, offsets))
    axes = vectors[..., ::-1].transpose(0, 2, 1).copy()
    skew = np.einsum("mi,mai->ma", charges, np.einsum("mab,mib->mai", axes, offsets) ** 3)
    axes[:, 1:] *= np.where(skew[:, 1:] < 0, -1.0, 1.0)[..., None]
    axes[:, 0] *= np.sign(np.linalg.det(axes))[:, None]
    return axes


def in_frame_of_positions(
    sizes: Integers, charges: Integers, positions: Array, entries: Array, chosen: Integers
) -> Array:
    """Tensors (m, 3, 3) of molecules in the frame of their atoms, from their entries in the standard orientation.

    Quantum chemistry programs rotate a molecule before they compute, and print tensors in the frame that it then has.
    The rule is that of :func:`standard_axes`; but molecules with some symmetry follow other rules, and where a sum of
    cubes is nearly zero, a direction is uncertain. So a polarisability is fitted to many molecules that is a sum over
    pairs of atoms, along and across the line between them, and where another order or direction of the axes agrees with
    it clearly better, that is taken. A molecule that is unlike all others, such as water, is not helped by that.

    Args:
        sizes: (M,) atoms of each molecule.
        charges: (N,) of all atoms, laid end to end: those of H, C, N, O and F.
        positions: (N, 3), ångström.
        entries: (M, 6) xx, xy, yy, xz, yz, zz.
        chosen: (m,) the numbers of the molecules wanted.

    Example:
        >>> import numpy as np
        >>> from escnn_attention.training.data.clouds.orientation import in_frame_of_positions
        >>> positions = np.array([[0.0, 0.0, 0.0], [0.6, 0.0, 0.7], [0.0, 0.8, 0.5]])  # O, H, H
        >>> isotropic = np.array([[2.0, 0.0, 2.0, 0.0, 0.0, 2.0]])  # 2 times the identity, in every frame
        >>> found = in_frame_of_positions(np.array([3]), np.array([8, 1, 1]), positions, isotropic, np.array([0]))
        >>> np.allclose(found, 2 * np.eye(3))
        True
    """
    starts = np.cumsum(sizes) - sizes
    given = matrices(entries)
    fitted = np.random.RandomState(0).permutation(len(sizes))[:_FITTED]
    molecules, designs = [], []
    for some, pairs, _ in _described(sizes, starts, charges, positions, fitted):
        molecules.append(some)
        designs.append((_features(pairs) * _SIDES).transpose(0, 2, 1).reshape(6 * len(some), -1))
    tensors, design = given[np.concatenate(molecules)], np.concatenate(designs)
    normal = design.T @ design + _RIDGE * np.eye(design.shape[1])
    frames = np.zeros(len(tensors), dtype=np.int64)
    for _ in range(_ROUNDS):
        targets = _seen_from_frames(tensors)[np.arange(len(tensors)), frames]
        bonds = np.linalg.solve(normal, design.T @ (targets * _SIDES).ravel())
        frames = _best((design @ bonds).reshape(-1, 6), tensors)

    found = np.empty((len(sizes), 3, 3))
    for some, pairs, axes in _described(sizes, starts, charges, positions, chosen):
        rotations = _FRAMES[_best(_predicted(pairs, bonds) * _SIDES, given[some])] @ axes
        found[some] = rotations.transpose(0, 2, 1) @ given[some] @ rotations
    return found[chosen]


def _seen_from_frames(tensors: Array) -> Array:
    """Tensors as each of the frames sees them, as entries: (M, 24, 6)."""
    return np.tensordot(tensors, _ROTATIONS, ((1, 2), (0, 1)))


def _best(predicted: Array, tensors: Array) -> Integers:
    """The frame of each molecule: the expected one, unless another agrees better with the prediction."""
    errors = ((_seen_from_frames(tensors) * _SIDES - predicted[:, None]) ** 2).sum(axis=2)
    errors[:, 1:] += _MARGIN
    return errors.argmin(axis=1)


class _Pairs(NamedTuple):
    """Pairs of atoms of m molecules of n atoms, P of each."""

    types: Integers  # (m, P), of what kinds they are
    near: Array  # (m, P, K), how close to each of the distances
    along: Array  # (m, P, 6), the entries of u uᵀ, where u is the direction from one to the other
    atoms: Integers  # (m, 10), how many atoms of each kind the molecule has


def _described(
    sizes: Integers, starts: Integers, charges: Integers, positions: Array, chosen: Integers
) -> Iterator[tuple[Integers, _Pairs, Array]]:
    """Molecules of equal size: their numbers, their pairs in their standard axes, and these (m, 3, 3)."""
    for size in np.unique(sizes[chosen]):
        of_size = chosen[sizes[chosen] == size]
        for start in range(0, len(of_size), _AT_ONCE):
            molecules = of_size[start : start + _AT_ONCE]
            atoms = starts[molecules][:, None] + np.arange(size)
            axes = standard_axes(charges[atoms].astype(np.float64), positions[atoms])
            yield molecules, _paired(charges[atoms], positions[atoms] @ axes.transpose(0, 2, 1)), axes


def _paired(charges: Integers, positions: Array) -> _Pairs:
    first, second = np.triu_indices(charges.shape[1], 1)
    kinds = _kinds(charges, positions)
    lines = positions[:, first] - positions[:, second]
    lengths = np.linalg.norm(lines, axis=2, keepdims=True)
    lines = lines / lengths
    rows, columns = _TRIANGLE
    return _Pairs(
        _PAIRS[kinds[:, first], kinds[:, second]],
        np.exp(-(((lengths - _CENTRES) / _WIDTHS) ** 2)),
        lines[..., rows] * lines[..., columns],
        (kinds[..., None] == np.arange(_NUM_KINDS)).sum(axis=1),
    )


def _features(pairs: _Pairs) -> Array:
    """The summands of a polarisability, (m, F, 6): by type and distance of pairs, u uᵀ and 1; by kind of atoms, 1."""
    count, size = pairs.types.shape
    each = (pairs.near[..., :, None] * pairs.along[..., None, :]).reshape(count * size, len(_CENTRES) * 6)
    place = (np.arange(count)[:, None] * _NUM_PAIRS + pairs.types).ravel()
    gather = sparse.csr_matrix((np.ones(len(place)), (place, np.arange(len(place)))), (count * _NUM_PAIRS, len(place)))
    aligned = (gather @ each).reshape(count, _NUM_PAIRS * len(_CENTRES), 6)
    across = (aligned * _IDENTITY).sum(axis=2, keepdims=True) * _IDENTITY
    return np.concatenate([aligned, across, pairs.atoms[..., None] * _IDENTITY], axis=1)


def _predicted(pairs: _Pairs, bonds: Array) -> Array:
    """Polarisabilities (m, 6): the sum of :func:`_features` times ``bonds`` (F,), which are never held."""
    by_type = _NUM_PAIRS * len(_CENTRES)
    along, across = (part.reshape(_NUM_PAIRS, -1)[pairs.types] for part in np.split(bonds[:-_NUM_KINDS], [by_type]))
    stretched = ((pairs.near * along).sum(axis=2)[..., None] * pairs.along).sum(axis=1)
    round_ = (pairs.near * across).sum(axis=(1, 2)) + pairs.atoms @ bonds[-_NUM_KINDS:]
    return stretched + round_[:, None] * _IDENTITY


def _kinds(charges: Integers, positions: Array) -> Integers:
    """The kinds of atoms: their element and number of bonds."""
    radii = _RADII[charges]
    apart = np.linalg.norm(positions[:, :, None] - positions[:, None], axis=3)
    bonds = ((apart < 1.3 * (radii[:, :, None] + radii[:, None])) & (apart > 0)).sum(axis=2)
    kinds = np.empty_like(charges, dtype=np.int64)
    first = 0
    for element, (least, most) in _BONDS.items():
        of_element = charges == element
        kinds[of_element] = first + bonds[of_element].clip(least, most) - least
        first += 1 + most - least
    return kinds
