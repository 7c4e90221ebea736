r"""Samples of a continuous fiber group, and the weights with which a sum over them is an integral.

A function on a continuous group H is held by its values at :math:`h_1, \dots, h_S`, and an integral over H becomes a
sum with weights :math:`\mu_s`. Functions that are band-limited are integrated exactly: on the samples here all
matrix elements of all irreps up to some frequency have the right mean, and the more samples there are the higher it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.linalg
import scipy.optimize
from escnn.group import (
    O2,
    O3,
    SO2,
    SO3,
    DirectProductGroup,
    Group,
    GroupElement,
    IrreducibleRepresentation,
    Representation,
    directsum,
)
from scipy.spatial.transform import Rotation

__all__ = ["Samples", "as_samples"]

_POLYHEDRAL = {"tetra": 12, "cube": 24, "ico": 60}
_KINDS = ("auto", "regular", *_POLYHEDRAL, "spiral", "thomson", "thomson_cube", "hopf", "fibonacci", "rand")


@dataclass(frozen=True)
class Samples:
    r"""Which elements of a continuous fiber group stand for all of them.

    ========================= ================== ===================================================================
    fiber group               kind               samples
    ========================= ================== ===================================================================
    SO(2)                     ``"regular"``      the subgroup :math:`C_N`
    O(2)                      ``"regular"``      the subgroup :math:`D_{N/2}`
    SO(3)                     ``"tetra"``,       a multiple of 12, 24 or 60: the rotations of the tetrahedron, the cube
                              ``"cube"``,        or the icosahedron, and as many of their cosets as it takes
                              ``"ico"``
    SO(3)                     ``"spiral"``       any number, on a spiral that fills the group evenly
    SO(3)                     ``"thomson"``,     any number, or a multiple of 24, that repel each other; made
                              ``"thomson_cube"`` by an optimisation that may take minutes, which escnn caches on disk
    SO(3)                     ``"hopf"``,        *about* as many, on the fibres over a grid of the sphere
                              ``"fibonacci"``
    O(3)                      as for SO(3)       half of them, and these times the inversion
    all                       ``"rand"``         random ones, the same every time
    ========================= ================== ===================================================================

    For a product of a finite group with one of these, as over cylinders in space, the samples of the latter times all
    elements of the former. ``"auto"`` is ``"regular"``, the largest polyhedron whose number of rotations
    divides the number, and ``"spiral"`` elsewhere.

    Subgroups are best: a layer is exactly equivariant to them, and all their weights are one. It is
    also to the rotations of a polyhedron whose cosets are sampled.

    Args:
        num_samples: the number S of all samples.
        kind: how they are chosen.
        turn: ``"fixed"``, or ``"random"`` to rotate all of them by one random element at each forward pass in training,
            so that no directions are preferred: the layer is equivariant in expectation. In evaluation mode they stay
            where they are and nothing is random.

    Raises:
        TypeError: ``num_samples`` is not an integer.
        ValueError: it is below 1, or an unknown kind or turn.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import GroupSelfAttention, Samples
        >>> g = gspaces.rot2dOnR2(-1)
        >>> vectors = nn.FieldType(g, 4 * [g.irrep(1)])
        >>> layer = GroupSelfAttention(vectors, vectors, num_heads=2, kernel_size=5, samples=Samples(8, turn="random"))
        >>> layer(vectors(torch.randn(1, 8, 9, 9))).shape
        torch.Size([1, 8, 9, 9])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3, for attention over sampled group elements;
    Alexa, "Super-Fibonacci Spirals", CVPR 2022, for the spiral.
    """

    num_samples: int
    kind: str = "auto"
    turn: Literal["fixed", "random"] = "fixed"

    def __post_init__(self) -> None:
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int):
            raise TypeError(f"num_samples: got {self.num_samples!r}, needed an integer")
        if self.num_samples < 1:
            raise ValueError(f"num_samples: got {self.num_samples}, needed at least 1")
        for name, value, options in (("kind", self.kind, _KINDS), ("turn", self.turn, ("fixed", "random"))):
            if value not in options:
                raise ValueError(f"{name}: got {value!r}, needed one of {', '.join(map(repr, options))}")


def as_samples(samples: Any) -> Samples | None:
    """The samples that an argument asks for: samples, their number, or None.

    Raises:
        TypeError: anything else.
        ValueError: a number below 1.
    """
    if samples is None or isinstance(samples, Samples):
        return samples
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise TypeError(f"samples: got {samples!r}, needed Samples, their number, or None")
    if samples < 1:
        raise ValueError(f"samples: got {samples}, needed at least 1")
    return Samples(samples)


def sampled(group: Group, samples: Samples) -> tuple[tuple[GroupElement, ...], np.ndarray]:
    """The elements h_s, and their weights ``(S,)``, which sum to S.

    Raises:
        ValueError: the group has no such samples.
        NotImplementedError: a continuous group that is none of SO(2), O(2), SO(3), O(3) and their products with finite
            groups.
    """
    if isinstance(group, DirectProductGroup):
        return _sampled_product(group, samples)
    number, kind = samples.num_samples, samples.kind
    if isinstance(group, (SO2, O2)):
        if kind not in ("auto", "regular", "rand"):
            raise _unknown(group, kind, ("regular", "rand"))
        if kind == "rand":
            elements = group.grid(number, type="rand", seed=0)
        else:
            each = _halved(group, number) if isinstance(group, O2) else number
            elements = group.grid(each, type="regular")
            return tuple(elements), np.ones(len(elements))
    elif isinstance(group, (SO3, O3)):
        if kind == "regular":
            raise _unknown(group, kind, _KINDS[2:])
        if kind == "rand":
            elements = group.grid("rand", number, seed=0)
        elif isinstance(group, O3):
            rotations = _rotations(group, _halved(group, number), kind)
            so3 = [group.element((0, r), "Q") for r in rotations]
            # The rest follows from the rotations: on them half of the irreps are the same as the other half.
            once = _weights(so3, lambda frequency: [group.irrep(0, frequency)])
            rotated = [group.element((1, r), "Q") for r in rotations]
            return (*so3, *rotated), np.concatenate([once, once])
        else:
            elements = [group.element(r, "Q") for r in _rotations(group, number, kind)]
    else:
        raise NotImplementedError(
            f"gspace: the fiber group {group.name} is continuous, and only SO(2), O(2), SO(3), O(3) and their products "
            "with finite groups can be sampled"
        )
    return tuple(elements), _weights(elements, lambda frequency: irreps_of(group, frequency))


def _sampled_product(group: DirectProductGroup, samples: Samples) -> tuple[tuple[GroupElement, ...], np.ndarray]:
    """All elements of the finite factor with samples of the continuous one."""
    if group.G1.continuous and group.G2.continuous:
        raise NotImplementedError(f"gspace: the fiber group {group.name} is a product of two continuous groups")
    finite, continuous = (group.G2, group.G1) if group.G1.continuous else (group.G1, group.G2)
    if samples.num_samples % finite.order():
        raise ValueError(
            f"samples: got {samples.num_samples} for {group.name}, needed a multiple of {finite.order()}, the order of "
            f"{finite.name}"
        )
    of_factor = Samples(samples.num_samples // finite.order(), samples.kind, samples.turn)
    elements, weights = sampled(continuous, of_factor)
    pairs = [(h, k) if group.G1.continuous else (k, h) for k in finite.elements for h in elements]
    return tuple(group.pair_elements(*pair) for pair in pairs), np.tile(weights, finite.order())


def _unknown(group: Group, kind: str, options: tuple[str, ...]) -> ValueError:
    return ValueError(f"kind: got {kind!r} for {group.name}, needed one of {', '.join(map(repr, ('auto', *options)))}")


def _halved(group: Group, number: int) -> int:
    """The number of rotations among as many samples of a group with reflections or inversions."""
    if number % 2:
        raise ValueError(
            f"samples: got {number} for {group.name}, needed an even number: half of them are rotations, half are not"
        )
    return number // 2


def _rotations(group: SO3 | O3, number: int, kind: str) -> np.ndarray:
    """Unit quaternions ``(S, 4)``, the real part last."""
    if kind == "auto":
        kind = next((k for k in ("ico", "cube", "tetra") if number % _POLYHEDRAL[k] == 0), "spiral")
    twice = 2 if isinstance(group, O3) else 1
    if kind in _POLYHEDRAL and number % _POLYHEDRAL[kind]:
        raise ValueError(
            f"samples: got {twice * number} of kind {kind!r} for {group.name}, needed a multiple of "
            f"{twice * _POLYHEDRAL[kind]}; any number can be had as 'spiral' or 'thomson'"
        )
    if kind == "spiral":
        return _spiral(number)
    if kind == "thomson_cube" and number % 24:
        raise ValueError(f"samples: got {twice * number} of kind {kind!r}, needed a multiple of {twice * 24}")
    # The rotations of O(3) are those of SO(3), whose quaternions escnn holds alike.
    grid = group.grid_so3 if isinstance(group, O3) else group.grid
    arguments = {"thomson_cube": (number // 24,)}.get(kind, () if kind in _POLYHEDRAL else (number,))
    found = [np.asarray(h.to("Q")[1] if isinstance(group, O3) else h.to("Q")) for h in grid(kind, *arguments)]
    rotations = np.stack(found).astype(np.float64)
    return _orbits(rotations, number // len(rotations)) if kind in _POLYHEDRAL else rotations


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


def _weights(
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
        new = [_irrep_matrices(irrep, elements).reshape(number, -1).T for irrep in others]
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


def is_subgroup(matrices: np.ndarray) -> bool:
    """Whether the elements with the matrices ``(S, n, n)`` of a faithful orthogonal representation form a group."""
    flat = matrices.reshape(len(matrices), -1)
    for matrix in matrices:
        products = (matrix.T @ matrices).reshape(len(matrices), -1)
        distance = (products**2).sum(1)[:, None] + (flat**2).sum(1) - 2 * products @ flat.T
        if (distance.min(axis=1) > 1e-10).any():
            return False
    return True


def irreps_of(group: Group, frequency: int) -> Iterator[IrreducibleRepresentation]:
    """The irreps of one frequency of rotation; of frequency 0 all that do not see rotations, the trivial one first."""
    if isinstance(group, DirectProductGroup):
        finite, continuous = (group.G2, group.G1) if group.G1.continuous else (group.G1, group.G2)
        for other in finite.irreps():
            for irrep in irreps_of(continuous, frequency):
                pair = (irrep.id, other.id) if group.G1.continuous else (other.id, irrep.id)
                # The product of two irreps of complex type falls apart in two.
                for i in range(2 if irrep.type == other.type == "C" else 1):
                    yield group.irrep(*pair, i)
    elif isinstance(group, (SO2, SO3)):
        yield group.irrep(frequency)
    elif isinstance(group, O2):
        yield from (group.irrep(j, frequency) for j in ((0, 1) if frequency == 0 else (1,)))
    elif isinstance(group, O3):
        yield from (group.irrep(j, frequency) for j in (0, 1))
    else:
        raise NotImplementedError(f"the irreps of {group.name}")


def band(representation: Representation) -> int:
    """The highest frequency of rotation among the irreps of a representation."""
    return max((_frequency(representation.group, id) for id in representation.irreps), default=0)


def _frequency(group: Group, id: tuple) -> int:
    if isinstance(group, DirectProductGroup):
        return max(_frequency(group.G1, id[0]), _frequency(group.G2, id[1]))
    return int(id[-1]) if group.continuous else 0


def degrees_of_freedom(group: Group, frequency: int) -> int:
    """The dimension of the functions on a group up to a frequency: what is sampled has so many free values."""
    irreps = (irrep for f in range(frequency + 1) for irrep in irreps_of(group, f))
    return sum(irrep.size**2 // irrep.sum_of_squares_constituents for irrep in irreps)


def faithful(group: Group) -> Representation:
    """An orthogonal representation that tells all elements apart."""
    if isinstance(group, DirectProductGroup):
        one, two = faithful(group.G1), faithful(group.G2)
        name = f"faithful [{group.name}]"
        if name not in group.representations:
            trivial = group.G1.trivial_representation.irreps[0], group.G2.trivial_representation.irreps[0]
            parts = [group.irrep(id, trivial[1]) for id in one.irreps if id != trivial[0]]
            parts += [group.irrep(trivial[0], id) for id in two.irreps if id != trivial[1]]
            group.representations[name] = directsum(parts, name=name)
        return group.representations[name]
    if group.continuous:
        return group.standard_representation()
    return group.regular_representation


def matrices_of(representation: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    """The matrices of elements, ``(S, n, n)`` float64.

    Put together from those of the irreps, which escnn has fast; it is slow to join them for one element at a time.
    """
    size, group = representation.size, representation.group
    blocks = np.zeros((len(elements), size, size))
    values = {id: _irrep_matrices(group.irrep(*id), elements) for id in set(representation.irreps)}
    start = 0
    for id in representation.irreps:
        stop = start + values[id].shape[-1]
        blocks[:, start:stop, start:stop] = values[id]
        start = stop
    return representation.change_of_basis @ blocks @ representation.change_of_basis_inv


def _irrep_matrices(irrep: IrreducibleRepresentation, elements: Sequence[GroupElement]) -> np.ndarray:
    return np.stack([np.asarray(irrep(h), dtype=np.float64) for h in elements])


def relative_features(action: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    r"""The elements :math:`h_s^{-1} h_t` as numbers, ``(S, S, F)``: the entries of their matrices.

    Entries that are the same for all elements, or that differ in sign only, are left out, and the others have mean 0
    and variance 1 over the group: what they are does not depend on the samples.
    """
    fine, _ = sampled(action.group, _fine(action.group))
    entries = matrices_of(action, fine).reshape(len(fine), -1)
    kept: list[int] = []
    for i, entry in enumerate(entries.T):
        known = any(np.allclose(entry, sign * entries[:, j], atol=1e-8) for j in kept for sign in (1, -1))
        if np.ptp(entry) > 1e-8 and not known:
            kept.append(i)
    matrices = matrices_of(action, elements)
    relative = np.einsum("sji,tjk->stik", matrices, matrices)
    chosen = entries[:, kept]
    return (relative.reshape(*relative.shape[:2], -1)[..., kept] - chosen.mean(0)) / chosen.std(0)


def _fine(group: Group) -> Samples:
    """Samples on which squares of the entries of rotations are integrated exactly."""
    finite = _finite_factor(group)
    if isinstance(group, DirectProductGroup) and finite is not None:
        return Samples(finite.order() * _fine(group.G1 if group.G1.continuous else group.G2).num_samples)
    return Samples(60 if isinstance(group, (SO3, SO2)) else 120)


def generic_samples(group: Group) -> Samples:
    """A few random elements."""
    finite = _finite_factor(group)
    return Samples(4 * (1 if finite is None else finite.order()), "rand")


def _finite_factor(group: Group) -> Group | None:
    if not isinstance(group, DirectProductGroup):
        return None
    return group.G2 if group.G1.continuous else group.G1
