r"""Samples of a continuous fiber group, and the weights with which a sum over them is an integral.

A function on a continuous group H is held by its values at :math:`h_1, \dots, h_S`, and an integral over H becomes a
sum with weights :math:`\mu_s`. Functions that are band-limited are integrated exactly: on the samples here all
matrix elements of all irreps up to some frequency have the right mean, and the more samples there are the higher it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
)
from scipy.spatial.transform import Rotation

from escnn_attention._checks import check_int, check_option
from escnn_attention.groups.representations import (
    factors_of,
    faithful,
    irreps_of,
    is_subgroup,
    matrices_of,
    stacked,
)

POLYHEDRAL = {"tetra": 12, "cube": 24, "ico": 60}
"""The number of rotations of a polyhedron."""

_KINDS = ("auto", "regular", *POLYHEDRAL, "spiral", "thomson", "thomson_cube", "hopf", "fibonacci", "rand")


@dataclass(frozen=True)
class Samples:
    r"""Samples of a continuous fiber group, which represent all its elements.

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

    Subgroups are best: a layer is exactly equivariant to them, and all their weights are one. With cosets of the
    rotations of a polyhedron it is exactly equivariant to these rotations.

    Args:
        num_samples: the number S of all samples.
        kind: how they are chosen.
        turn: ``"fixed"``, or ``"random"`` to transform all of them by one random element at each forward pass in
            training, so that no directions are preferred: the layer is equivariant in expectation. In evaluation mode
            they stay where they are and nothing is random.

    Raises:
        ValueError: it is below 1, or an unknown kind or turn.

    Example:
        >>> import torch
        >>> from escnn_attention import GroupSelfAttention, Samples
        >>> from escnn import gspaces, nn
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
        check_int("num_samples", self.num_samples)
        check_option("kind", self.kind, _KINDS)
        check_option("turn", self.turn, ("fixed", "random"))


def as_samples(samples: Any) -> Samples | None:
    """The samples that an argument asks for: samples, their number, or None."""
    if samples is None or isinstance(samples, Samples):
        return samples
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise TypeError(f"samples: got {samples!r}, needed Samples, their number, or None")
    return Samples(check_int("samples", samples))


def sampled(group: Group, samples: Samples) -> tuple[tuple[GroupElement, ...], np.ndarray]:
    """The elements h_s, and their weights ``(S,)``, which sum to S."""
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
            rotations = rotations_of(group, _halved(group, number), kind)
            so3 = [group.element((0, r), "Q") for r in rotations]
            # The rest follows from the rotations: on them half of the irreps are the same as the other half.
            once = quadrature_weights(so3, lambda frequency: [group.irrep(0, frequency)])
            others = [group.element((1, r), "Q") for r in rotations]
            return (*so3, *others), np.concatenate([once, once])
        else:
            elements = [group.element(r, "Q") for r in rotations_of(group, number, kind)]
    else:
        raise NotImplementedError(
            f"gspace: the fiber group {group.name} is continuous, and only SO(2), O(2), SO(3), O(3) and their products "
            "with finite groups can be sampled"
        )
    return tuple(elements), quadrature_weights(elements, lambda frequency: irreps_of(group, frequency))


def _sampled_product(group: DirectProductGroup, samples: Samples) -> tuple[tuple[GroupElement, ...], np.ndarray]:
    """All elements of the finite factor with samples of the continuous one."""
    if group.G1.continuous and group.G2.continuous:
        raise NotImplementedError(f"gspace: the fiber group {group.name} is a product of two continuous groups")
    finite, continuous = factors_of(group)
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


def generic_samples(group: Group) -> Samples:
    """A few random elements."""
    finite = factors_of(group)[0].order() if isinstance(group, DirectProductGroup) else 1
    return Samples(4 * finite, "rand")


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
    """A subgroup, which maps these samples onto each other, and some of its cosets, far from each other."""
    candidates, rotations, samples = _spiral(1024), Rotation.from_quat(subgroup), subgroup
    nearest = np.abs(candidates @ subgroup.T).max(axis=1)  # the cosine of half the angle to the nearest sample
    for _ in range(count - 1):
        coset = (rotations * Rotation.from_quat(candidates[nearest.argmin()])).as_quat()
        samples = np.concatenate([samples, coset])
        nearest = np.maximum(nearest, np.abs(candidates @ coset.T).max(axis=1))
    return samples


def _spiral(number: int) -> np.ndarray:
    """Super-Fibonacci spirals: points that wind around two circles of the unit quaternions at irrational rates."""
    s = np.arange(number) + 0.5
    rates = (math.sqrt(2), 1.533751168755204288118041)  # the second solves x⁴ = x + 4
    (a, b), (r, t) = (2 * math.pi * s / p for p in rates), (np.sqrt(s / number), np.sqrt(1 - s / number))
    return np.stack([r * np.sin(a), r * np.cos(a), t * np.sin(b), t * np.cos(b)], axis=1)


def quadrature_weights(
    elements: Sequence[GroupElement], irreps: Callable[[int], Iterable[IrreducibleRepresentation]]
) -> np.ndarray:
    """Non-negative weights of sum S, nearly equal, by which irreps up to the highest frequency have mean zero."""
    group, number = elements[0].group, len(elements)
    weights, rows = np.ones(number), np.ones((1, number))
    if is_subgroup(matrices_of(faithful(group), elements)):
        return weights
    for frequency in range(number):
        others = (irrep for irrep in irreps(frequency) if not irrep.is_trivial())
        new = [stacked(irrep, elements).reshape(number, -1).T for irrep in others]
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


def relative_features(action: Representation, elements: Sequence[GroupElement]) -> np.ndarray:
    """The entries ``(S, S, F)`` of :math:`h_s^{-1} h_t` that differ, of mean 0 and variance 1 over the group."""
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
    if isinstance(group, DirectProductGroup):
        finite, continuous = factors_of(group)
        return Samples(finite.order() * _fine(continuous).num_samples)
    return Samples(60 if isinstance(group, (SO3, SO2)) else 120)
