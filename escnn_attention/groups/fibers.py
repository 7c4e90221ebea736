r"""Fiber groups as index tables and matrices, read from escnn's group objects.

escnn's conventions, which everything above relies on: a regular field stores :math:`f(x, h)` in channel
``H.elements.index(h)``, and an element acts by :math:`(g \cdot f)(x, h) = f(g^{-1}x, g^{-1}h)`.

Of a continuous group there are samples, which stand for all elements: see :mod:`escnn_attention.groups.samples`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from escnn.group import Group, GroupElement, Representation
from escnn.gspaces import GSpace

from escnn_attention._escnn.types import FieldType
from escnn_attention.groups.representations import band, degrees_of_freedom, faithful, matrices_of, stacked
from escnn_attention.groups.samples import Samples, generic_samples, relative_features, sampled

_Result = TypeVar("_Result")


def _once(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Compute once for each object, by its identity: escnn's groups are singletons, but products cannot be hashed.

    What else the function takes is compared by its value.
    """
    results: dict[Any, tuple[Any, _Result]] = {}

    @wraps(function)
    def wrapper(key: Any, *others: Any) -> _Result:
        name = (id(key), *others)
        if name not in results:
            results[name] = key, function(key, *others)
        return results[name][1]

    return wrapper


@dataclass(frozen=True, eq=False)
class Fibers:
    """The fiber group H of a gspace over R^d, as arrays: all elements of a finite group, samples of a continuous one.

    Attributes:
        elements: the elements, in escnn's order, which is the order of the channels of a regular field; or the samples.
        inverse: ``(|H|,)``; ``inverse[h]`` is the index of the inverse of element ``h``. Empty for samples.
        quotient: ``(|H|, |H|)``; ``quotient[g, h]`` is the index of ``g⁻¹h``, the pose h seen from the pose g. Empty
            for samples.
        action: ``(|H|, d, d)`` float64; the matrix with which each element acts on the base space.
        weights: ``(|H|,)`` float64; the measure of every element, of sum :math:`|H|`: ones for a finite group,
            quadrature weights for samples.
        relative: ``(S, S, F)`` float64; features of :math:`h_s^{-1} h_t`, of mean 0 and variance 1 over the group.
            None for a finite group, whose pairs have an index.
        samples: what was sampled; None for a finite group.
        cosets: ``(|H/K|, |K|)``; the indices of the elements of each coset of a subgroup K, itself the first, where the
            poses are cosets. ``elements``, ``action`` and ``weights`` are then those of the first element of each, and
            ``quotient``, ``(|H/K|, |H/K|)``, numbers the double cosets :math:`K g^{-1} h K`, on which a function of two
            cosets can depend. None where poses are elements.
        stabilizer: ``(|K|, d, d)`` float64; the matrices of the inverses of the elements of K.
    """

    elements: tuple[GroupElement, ...]
    inverse: np.ndarray
    quotient: np.ndarray
    action: np.ndarray
    weights: np.ndarray
    relative: np.ndarray | None = None
    samples: Samples | None = None
    cosets: np.ndarray | None = None
    stabilizer: np.ndarray | None = None

    @property
    def relations(self) -> int:
        """The number of values of ``quotient``; of samples, that of the poses."""
        return self.order if self.cosets is None else int(self.quotient.max()) + 1

    @property
    def order(self) -> int:
        """The number of elements, which is the number of poses of a regular field, or of samples."""
        return len(self.elements)

    @property
    def inverse_action(self) -> np.ndarray:
        """``(|H|, d, d)`` float64; the matrix of the inverse of each element."""
        plain = self.samples is self.cosets is None
        return self.action[self.inverse] if plain else np.swapaxes(self.action, 1, 2)

    @property
    def log_measure(self) -> np.ndarray | None:
        """``(|H|,)`` float64; the logarithm of the weights. None where all are equal, because it drops out."""
        if np.ptp(self.weights) < 1e-12:
            return None
        with np.errstate(divide="ignore"):
            return np.log(self.weights)

    @property
    def dimension(self) -> int:
        """The dimension d of the base space."""
        return self.action.shape[-1]

    @property
    def preserves_square(self) -> bool:
        """Whether every element maps the axes of the grid onto each other (up to sign), and so a square onto itself.

        Of a continuous group there are elements between the samples that do not.
        """
        return self.samples is None and bool(is_signed_permutation(self.action).all())

    def index(self, element: GroupElement) -> int:
        """The channel of a regular field that belongs to ``element``, or its coset."""
        if self.cosets is None:
            return self.elements.index(element)
        return int((self.cosets == element.group.elements.index(element)).any(1).argmax())


def is_signed_permutation(matrices: np.ndarray) -> np.ndarray:
    """Whether the entries of a matrix are all 0, 1 or -1, for each of the orthogonal matrices ``(..., d, d)``."""
    return np.isclose(np.abs(matrices), np.round(np.abs(matrices)), atol=1e-6).all(axis=(-2, -1))


def subgroup_id(value: Any) -> Any:
    """The id of a subgroup, of which files have lists in place of tuples."""
    return tuple(map(subgroup_id, value)) if isinstance(value, (list, tuple)) else value


def fibers(gspace: GSpace, samples: Samples | None = None, subgroup: Any = None) -> Fibers:
    """The tables of the fiber group of ``gspace``.

    Args:
        gspace: the gspace.
        samples: the samples of a continuous fiber group.
        subgroup: the id of a subgroup of a finite fiber group, as of ``gspace.quotient_repr``, whose cosets are the
            poses; None for all elements.

    Raises:
        NotImplementedError: the fiber group is continuous and there are no samples, or it cannot be sampled.
        ValueError: there are samples and the fiber group is finite, or it has no such samples.
    """
    group = gspace.fibergroup
    if not group.continuous:
        if samples is not None:
            raise ValueError(
                f"samples: the fiber group {group.name} is finite and needs no samples; leave them at None"
            )
        return _all_fibers(gspace) if subgroup is None else _cosets(gspace, subgroup)
    if subgroup is not None:
        raise ValueError(f"poses: got {subgroup}, but the fiber group {group.name} is continuous; leave it at None")
    if samples is None:
        raise NotImplementedError(
            f"gspace: the fiber group {group.name} is continuous; this needs a finite fiber group, or samples of this "
            "one where there is an argument samples, for example samples=8 in the plane and samples=24 in space. "
            "Otherwise restrict the gspace to a finite subgroup, for example gspaces.rot2dOnR2(8) for "
            "gspaces.rot2dOnR2(-1)."
        )
    return _sampled_fibers(gspace, samples)


def generic_fibers(gspace: GSpace) -> Fibers:
    """All elements of a finite fiber group, or samples of a continuous one that linear maps cannot tell from all."""
    group = gspace.fibergroup
    return fibers(gspace, generic_samples(group) if group.continuous else None)


@_once
def _sampled_fibers(gspace: GSpace, samples: Samples) -> Fibers:
    group = gspace.fibergroup
    elements, weights = sampled(group, samples)
    action = gspace.basespace_action
    matrices = np.zeros((len(elements), 0, 0)) if action is None else matrices_of(action, elements)
    # A plane or space has a subgroup of O(2) or O(3), whose elements its matrices tell apart; a sequence has none.
    moves = action is not None and not np.allclose(matrices, np.eye(action.size))
    return Fibers(
        elements=elements,
        inverse=np.zeros(0, dtype=np.int64),
        quotient=np.zeros((0, 0), dtype=np.int64),
        action=matrices,
        weights=weights,
        relative=relative_features(action if moves else faithful(group), elements),
        samples=samples,
    )


@_once
def _all_fibers(gspace: GSpace) -> Fibers:
    group = gspace.fibergroup
    products = _products(group)
    inverse = np.argmax(products == group.elements.index(group.identity), axis=1)
    action = gspace.basespace_action
    return Fibers(
        elements=tuple(group.elements),
        inverse=inverse,
        quotient=products[inverse],
        action=np.zeros((len(inverse), 0, 0)) if action is None else stacked(action, group.elements),
        weights=np.ones(len(inverse)),
    )


def _cosets(gspace: GSpace, subgroup: Any) -> Fibers:
    """The cosets of a subgroup of a finite fiber group."""
    group, every = gspace.fibergroup, _all_fibers(gspace)
    try:
        part, into, _ = group.subgroup(subgroup)
        if part is None or part.continuous:
            raise ValueError
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"poses: got {subgroup!r}, needed the id of a subgroup of {group.name}, as of gspace.quotient_repr"
        ) from error
    own = np.array([every.index(into(k)) for k in part.elements])
    products = every.quotient[every.inverse]
    # The coset and the double coset of each element, named by their first elements; K is the first of them.
    first = products[:, own].min(1)
    names = sorted(set(first.tolist()), key=lambda name: (name not in own, name))
    cosets = np.stack([np.flatnonzero(first == name) for name in names])
    chosen = cosets[:, 0]
    _, double = np.unique(first[products[own]].min(0), return_inverse=True)
    return Fibers(
        elements=tuple(every.elements[h] for h in chosen),
        inverse=every.inverse,
        quotient=double[every.quotient[np.ix_(chosen, chosen)]],
        action=every.action[chosen],
        weights=np.ones(len(chosen)),
        cosets=cosets,
        stabilizer=every.inverse_action[own],
    )


@_once
def _products(group: Group) -> np.ndarray:
    """The Cayley table: ``products[g, h]`` is the index of ``gh``. Rows of products with generators give all others."""
    elements = list(group.elements)
    index = {element: i for i, element in enumerate(elements)}
    rows = {index[group.identity]: np.arange(len(elements))}
    generators = {
        index[s]: np.array([index[s @ h] for h in elements]) for s in group.generators or elements if s in index
    }
    frontier = list(rows)
    while frontier:
        found = []
        for h in frontier:
            for row in generators.values():
                product = int(row[h])
                if product not in rows:
                    rows[product] = row[rows[h]]
                    found.append(product)
        frontier = found
    return np.stack([rows[i] for i in range(len(elements))])


@_once
def _inverse_matrices(representation: Representation) -> np.ndarray:
    """``(|H|, n, n)`` float64: the matrix of the inverse of each element."""
    return stacked(representation, [~h for h in representation.group.elements])


@_once
def _sampled_matrices(representation: Representation, group: Fibers) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of the inverse of each sample, and of the samples."""
    of_samples = matrices_of(representation, group.elements)
    return np.linalg.inv(of_samples), of_samples


def _matrices_of(representation: Representation, group: Fibers, dual: bool) -> np.ndarray:
    r"""``(|H|, n, n)`` float64: :math:`\rho(h)^{-1}`, or its transposed inverse :math:`\rho(h)^T`."""
    if group.samples is None:
        matrices = _inverse_matrices(representation)
        return np.swapaxes(matrices[group.inverse], 1, 2) if dual else matrices
    inverse, of_samples = _sampled_matrices(representation, group)
    return np.swapaxes(of_samples, 1, 2) if dual else inverse


def is_regular(representation: Representation) -> bool:
    """Whether a representation is the regular representation of its group, as escnn builds it."""
    return representation.name == "regular" and representation.size == representation.group.order()


def is_pointwise(representation: Representation) -> bool:
    """Whether a representation allows a nonlinearity on every channel: trivial ones of products do, too."""
    return "pointwise" in representation.supported_nonlinearities or representation.is_trivial()


def regular_fields(field_type: FieldType) -> int:
    """The number of regular fields in a type."""
    return sum(is_regular(r) for r in field_type.representations)


class IrrepCopies(NamedTuple):
    r"""The copies of an irrep in a representation of size n, and in the regular one.

    Of ``reads`` ``(m, K, n)``, ``weights`` ``(K, d, n)`` and orthonormal ``poses`` ``(m, d, H)``, the sum over irreps
    is :math:`\sum_{akj} \mathrm{poses}_{aj}(h)\, \mathrm{weights}_{kj}\, \mathrm{reads}_{ak}^T = \rho(h)^{-1}`.
    """

    reads: np.ndarray
    weights: np.ndarray
    poses: np.ndarray


@dataclass(frozen=True, eq=False)
class FrameSegment:
    r"""The fields of one representation in the frame of every pose.

    Attributes:
        columns: ``(m, n)``; the channels of the m fields of this representation, each of size n.
        matrices: ``(|H|, n, n)``; :math:`\rho(h^{-1})`, or its transposed inverse. For cosets ``(|H/K|, r, n)``, in a
            basis of the r vectors that are the same for all elements of a coset.
        permutation: ``(|H|, n)``; of permutations, with ``(w @ matrices[h])[j] == w[permutation[h, j]]``; or None.
        irreps: the copies of each irrep of a finite group, the trivial one first; None for samples.
        factors: sparse matrices whose product are the ``reads`` of all irreps, and those of all ``poses``.
    """

    columns: np.ndarray
    matrices: np.ndarray
    permutation: np.ndarray | None
    irreps: tuple[IrrepCopies, ...] | None = None
    factors: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None


@_once
def _irreps_of(representation: Representation) -> tuple[tuple[IrrepCopies, ...], tuple[IrrepCopies, ...]]:
    """The copies of all irreps in a representation, and in its dual."""
    group = representation.group
    basis = np.asarray(representation.change_of_basis, dtype=np.float64)
    inverse = np.asarray(representation.change_of_basis_inv, dtype=np.float64)
    starts: dict[tuple, list[int]] = {}
    position = 0
    for id in representation.irreps:
        starts.setdefault(id, []).append(position)
        position += group.irrep(*id).size
    found: tuple[list[IrrepCopies], list[IrrepCopies]] = ([], [])
    for irrep in sorted(group.irreps(), key=lambda irrep: not irrep.is_trivial()):
        algebra = irrep.endomorphism_basis()
        # An orthonormal basis over the algebra, whose images under it are one over the real numbers.
        images = np.zeros((0, len(algebra), irrep.size))
        for vector in np.eye(irrep.size):
            seen = images.reshape(-1, irrep.size)
            rest = vector - (seen @ vector) @ seen
            if (length := np.linalg.norm(rest)) > 1e-6:
                images = np.concatenate([images, rest @ algebra[None] / length])
        of_group = stacked(irrep, group.elements)
        scale = np.sqrt(irrep.size / len(of_group))
        poses = scale * np.einsum("ai,hij->ajh", images[:, 0], of_group)
        slices = [slice(start, start + irrep.size) for start in starts.get(irrep.id, [])]
        for copies, (reads, writes) in zip(found, ((inverse, basis.T), (basis.T, inverse)), strict=True):
            read = np.array([reads[s] for s in slices]).reshape(-1, irrep.size, len(basis))
            written = np.array([writes[s] for s in slices]).reshape(-1, irrep.size, len(basis))
            of_copies = np.einsum("aei,cin->acen", images, read).reshape(len(images), -1, len(basis))
            weights = np.einsum("eij,cjn->cein", algebra, written).reshape(-1, irrep.size, len(basis)) / scale
            copies.append(IrrepCopies(of_copies, weights, poses))
    return tuple(found[0]), tuple(found[1])


@_once
def _factors_of(representation: Representation) -> list[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]:
    """The factors of the reads and of the poses of a representation, and of its dual."""
    products = _products(representation.group)
    found: list[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]] = []
    for irreps in _irreps_of(representation):
        reads = np.concatenate([i.reads.reshape(-1, representation.size) for i in irreps])
        poses = np.concatenate([i.poses.reshape(-1, len(products)) for i in irreps])
        found.append((_factorise(reads, products if is_regular(representation) else None), _factorise(poses, products)))
    return found


def _factorise(matrix: np.ndarray, products: np.ndarray | None) -> list[np.ndarray]:
    """Sparse matrices with this product, the last applied first.

    As in fast Fourier transforms, functions on the group, of which a column is an element, are transformed on the
    cosets of a cyclic subgroup K first. The values of an irrep on a coset sK or Ks are combinations of those on K.

    Source: Clausen and Baum, "Fast Fourier Transforms", 1993.
    """
    matrix = np.where(np.abs(matrix) < 1e-13, 0.0, matrix)
    best = [matrix]
    if products is None:
        return best
    identity = int(np.flatnonzero((products == np.arange(len(products))).all(1))[0])
    seen = set()
    for element in range(len(products)):
        powers = [identity]
        while (power := int(products[powers[-1], element])) != identity:
            powers.append(power)
        if frozenset(powers) in seen or len(powers) in (1, len(products)):
            continue
        seen.add(frozenset(powers))
        basis = _orthonormal(matrix[:, powers])
        for cosets in (products[:, powers], products[powers].T):
            _, first = np.unique(cosets.min(1), return_index=True)
            on_cosets = np.zeros_like(matrix)
            for i, coset in enumerate(cosets[first]):
                on_cosets[i * len(powers) + np.arange(len(powers))[:, None], coset] = basis
            rest = matrix @ on_cosets.T
            factors = [np.where(np.abs(m) < 1e-13, 0.0, m) for m in (rest, on_cosets)]
            if sum(map(np.count_nonzero, factors)) < 0.9 * sum(map(np.count_nonzero, best)):
                best = factors
    return best


def mass(field_type: FieldType) -> int:
    """The number of independent poses of a type, which a sum over the poses is scaled to.

    It is :math:`|H|` for a finite group. For a continuous one it is the dimension of the functions up to the highest
    frequency in the type, for any number of samples: parameters then have the same meaning for all samples.
    """
    group = field_type.fibergroup
    if not group.continuous:
        return int(group.order())
    return degrees_of_freedom(group, max(1, *(band(r) for r in field_type.representations)))


def frames(field_type: FieldType, *, group: Fibers | None = None, dual: bool = False) -> Sequence[FrameSegment]:
    r"""The matrices :math:`\rho(h^{-1})` of a field type, one segment for each distinct representation.

    With them every equivariant map to a regular field is written down at once: it reads a vector w in the frame of each
    pose, :math:`q(h) = w\,\rho(h)^{-1} f` (Frobenius reciprocity), and every map from a regular field places w in it,
    :math:`\sum_h f(h)\,\rho(h)\,w`. ``dual=True`` gives :math:`\rho(h)^T`, which the second one multiplies with; for
    orthogonal representations both are the same.

    For samples of a continuous group the sum is a quadrature, :math:`\frac KS \sum_s \mu_s f(h_s)\,\rho(h_s)\,w` with K
    the :func:`mass` of the type, and ``dual=True`` gives :math:`\frac KS \mu_s\,\rho(h_s)^T`.

    Args:
        field_type: the type.
        group: the elements or samples; by default all elements of the fiber group, which is finite then.
        dual: as above.
    """
    group = fibers(field_type.gspace) if group is None else group
    segments = []
    for representation, columns in columns_of(field_type):
        matrices = _matrices_of(representation, group, dual)
        if dual and group.samples is not None:
            matrices = matrices * (group.weights * mass(field_type) / group.order)[:, None, None]
        if group.cosets is not None:
            basis = _orthonormal(matrices[group.cosets[0]].mean(0))  # of the vectors that K keeps
            segments.append(FrameSegment(columns, basis @ matrices[group.cosets[:, 0]], None))
            continue
        irreps = _irreps_of(representation)[dual] if group.samples is None else None
        factors = _factors_of(representation)[dual] if group.samples is None else None
        segments.append(FrameSegment(columns, matrices, _as_permutation(matrices), irreps, factors))
    return segments


def _orthonormal(rows: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what rows ``(m, n)`` span, ``(k, n)``."""
    basis = np.zeros((0, rows.shape[1]))
    for row in rows:
        rest = row - (row @ basis.T) @ basis
        if (length := np.linalg.norm(rest)) > 1e-6:
            basis = np.concatenate([basis, rest[None] / length])
    return basis


def columns_of(field_type: FieldType) -> list[tuple[Representation, np.ndarray]]:
    """Each distinct representation of a type, with the channels ``(m, n)`` of its m fields."""
    starts: dict[Representation, list[int]] = {}
    start = 0
    for representation in field_type.representations:
        starts.setdefault(representation, []).append(start)
        start += representation.size
    return [(r, np.array(first)[:, None] + np.arange(r.size)) for r, first in starts.items()]


def count_irreps(field_type: FieldType) -> Counter[tuple]:
    """The multiplicity of each irrep in a type."""
    return Counter(irrep for representation in field_type.representations for irrep in representation.irreps)


def _as_permutation(matrices: np.ndarray) -> np.ndarray | None:
    rounded = np.round(matrices)
    is_permutation = (
        np.allclose(matrices, rounded, atol=1e-9)
        and (rounded >= 0).all()
        and (rounded.sum(axis=1) == 1).all()
        and (rounded.sum(axis=2) == 1).all()
    )
    return rounded.argmax(axis=1) if is_permutation else None


def invariant_vectors(field_type: FieldType) -> np.ndarray:
    """``(size, k)``: a basis of the vectors that no element moves, the only ones a bias may add, one field each."""
    columns = []
    start = 0
    for representation in field_type.representations:
        position = 0
        for irrep in (field_type.fibergroup.irrep(*i) for i in representation.irreps):
            if irrep.is_trivial():
                vector = np.zeros(field_type.size)
                part = np.asarray(representation.change_of_basis[:, position], dtype=np.float64)
                vector[start : start + representation.size] = part / part[np.abs(part).argmax()]
                columns.append(vector)
            position += irrep.size
        start += representation.size
    return np.stack(columns, axis=1) if columns else np.zeros((field_type.size, 0))
