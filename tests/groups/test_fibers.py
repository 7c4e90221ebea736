import itertools

import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.groups.fibers import count_irreps, fibers, frames, invariant_vectors, is_regular, regular_fields
from tests import spaces

PRODUCTS = {
    "C2 x C3 on a point": lambda: gspaces.no_base_space(
        group.direct_product(group.cyclic_group(2), group.cyclic_group(3))
    ),
    "D3 x C2 on a point": lambda: gspaces.no_base_space(
        group.direct_product(group.dihedral_group(3), group.cyclic_group(2))
    ),
    "C2 doubled on a point": lambda: gspaces.no_base_space(group.double_group(group.cyclic_group(2))),
}
ALL = spaces.ALL | PRODUCTS
LARGE = [pytest.param(make, marks=pytest.mark.exhaustive, id=name) for name, make in spaces.LARGE.items()]
gspaces_listed = pytest.mark.parametrize("make", [*(pytest.param(m, id=name) for name, m in ALL.items()), *LARGE])
plane_or_point = st.one_of(
    st.builds(gspaces.rot2dOnR2, st.integers(1, 12)),
    st.builds(gspaces.flipRot2dOnR2, st.integers(2, 6), axis=st.floats(0, 3)),
    st.builds(lambda n: gspaces.no_base_space(group.cyclic_group(n)), st.integers(1, 9)),
    st.builds(
        lambda n, m: gspaces.no_base_space(group.direct_product(group.dihedral_group(n), group.cyclic_group(m))),
        st.integers(2, 4),
        st.integers(2, 3),
    ),
)


def check_tables(gspace):
    """The tables against escnn's products, inverses and matrices."""
    tables, elements = fibers(gspace), list(gspace.fibergroup.elements)
    n, d = len(elements), gspace.dimensionality
    assert fibers(gspace) is tables
    assert list(tables.elements) == elements
    assert (tables.order, tables.dimension) == (n, d)
    assert (tables.inverse.shape, tables.quotient.shape, tables.action.shape) == ((n,), (n, n), (n, d, d))
    rng = np.random.default_rng(0)
    pairs = itertools.product(range(n), range(n)) if n <= 12 else rng.integers(n, size=(60, 2))
    for g, h in pairs:
        assert elements[tables.quotient[g, h]] == ~elements[g] @ elements[h]
        assert elements[tables.inverse[g]] == ~elements[g]
        assert tables.index(elements[h]) == h
        product = tables.quotient[tables.inverse[g], h]
        np.testing.assert_allclose(tables.action[g] @ tables.action[h], tables.action[product], atol=1e-12)
        if d:
            np.testing.assert_allclose(tables.action[g], gspace.basespace_action(elements[g]), atol=1e-12)
    # Every row is a permutation, so that no pose is lost and none is counted twice.
    assert (np.sort(tables.quotient, axis=1) == np.arange(n)).all()


@pytest.mark.sampled(9)
@gspaces_listed
def test_tables_agree_with_escnn(make):
    check_tables(make())


@given(plane_or_point)
def test_tables_agree_with_escnn_for_groups_drawn(gspace):
    check_tables(gspace)


@pytest.mark.parametrize(
    ("make", "preserved"),
    [
        (gspaces.trivialOnR2, True),
        (gspaces.flip2dOnR2, True),
        (lambda: gspaces.flip2dOnR2(axis=np.pi / 4), True),
        (lambda: gspaces.flip2dOnR2(axis=0.3), False),
        (lambda: gspaces.rot2dOnR2(2), True),
        (lambda: gspaces.rot2dOnR2(3), False),
        (lambda: gspaces.rot2dOnR2(4), True),
        (lambda: gspaces.rot2dOnR2(8), False),
        (lambda: gspaces.flipRot2dOnR2(4), True),
        (lambda: gspaces.flipRot2dOnR2(4, axis=np.pi / 8), False),
        (lambda: gspaces.rot2dOnR3(4), True),
        (lambda: gspaces.dihedralOnR3(3), False),
        (gspaces.invOnR3, True),
        (gspaces.octaOnR3, True),
        (lambda: gspaces.no_base_space(group.cyclic_group(3)), True),
        pytest.param(gspaces.fullOctaOnR3, True, marks=pytest.mark.exhaustive),
        pytest.param(gspaces.icoOnR3, False, marks=pytest.mark.exhaustive),
    ],
)
def test_preserves_square(make, preserved):
    assert fibers(make()).preserves_square is preserved


@pytest.mark.parametrize("make", [gspaces.rot2dOnR2, gspaces.flipRot2dOnR2, gspaces.rot2dOnR3, gspaces.rot3dOnR3])
def test_a_continuous_group_is_refused(make):
    with pytest.raises(NotImplementedError, match=r"gspace: .* continuous.*finite subgroup"):
        fibers(make())


def test_regular_representations_are_told_from_others_of_their_size():
    gspace = gspaces.rot2dOnR2(4)
    regular = gspace.regular_repr
    twice = group.directsum([gspace.quotient_repr(2), gspace.quotient_repr(2)], name="twice a quotient")
    assert is_regular(regular)
    assert regular.size == twice.size
    assert not is_regular(twice)
    assert not is_regular(gspace.trivial_repr)
    assert regular_fields(FieldType(gspace, [regular, twice, gspace.trivial_repr, regular])) == 2


def oblique(gspace):
    """A custom representation whose change of basis is not orthogonal."""
    regular = gspace.regular_repr
    basis = np.eye(regular.size) + np.triu(np.ones((regular.size, regular.size)), 1) / 2
    return group.change_basis(regular, basis, name="oblique", supported_nonlinearities=[])


def rich_type(gspace):
    """Fields of all kinds, interleaved; one has a trivial irrep behind a larger one."""
    regular, last = gspace.regular_repr, gspace.fibergroup.irreps()[-1]
    fields = [last, regular, gspace.trivial_repr, oblique(gspace), last, regular, last.tensor(last)]
    fields.append(group.directsum([last, gspace.trivial_repr, last]))
    return FieldType(gspace, fields)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_frames_are_the_matrices_of_the_type(make, dual):
    field_type = rich_type(make())
    size, elements = field_type.size, list(field_type.fibergroup.elements)
    segments = frames(field_type, dual=dual)
    assert sorted(np.concatenate([s.columns.ravel() for s in segments])) == list(range(size))
    for i in range(0, len(elements), max(1, len(elements) // 6)):
        matrix = np.zeros((size, size))
        for segment in segments:
            for columns in segment.columns:
                matrix[np.ix_(columns, columns)] = segment.matrices[i]
        whole = field_type.representation
        expected = np.asarray(whole(elements[i])).T if dual else np.asarray(whole(~elements[i]))
        np.testing.assert_allclose(matrix, expected, atol=1e-9)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_permutation_does_what_its_matrices_do(make):
    segments = frames(rich_type(make()))
    by_permutation = [s for s in segments if s.permutation is not None]
    assert by_permutation  # the regular fields at least
    for segment in by_permutation:
        w = np.arange(1.0, 1 + segment.matrices.shape[-1])
        np.testing.assert_allclose(w @ segment.matrices, w[segment.permutation], atol=1e-9)


def test_only_permutation_matrices_become_a_permutation():
    gspace = gspaces.flipRot2dOnR2(4)
    sign = gspace.irrep(1, 0)
    segments = frames(
        FieldType(gspace, [gspace.regular_repr, gspace.trivial_repr, sign, gspace.irrep(1, 1), oblique(gspace)])
    )
    assert [s.permutation is not None for s in segments] == [True, True, False, False, False]


def fixed_dimension(field_type):
    """The dimension of the invariant vectors, from the character."""
    whole = field_type.representation
    return round(np.mean([np.trace(np.asarray(whole(g))) for g in field_type.fibergroup.elements]))


def check_invariant_vectors(field_type):
    vectors = invariant_vectors(field_type)
    assert vectors.shape == (field_type.size, fixed_dimension(field_type))
    if vectors.shape[1]:
        assert np.linalg.matrix_rank(vectors) == vectors.shape[1]
        np.testing.assert_allclose(np.abs(vectors).max(axis=0), 1)
    for g in field_type.fibergroup.elements:
        np.testing.assert_allclose(np.asarray(field_type.representation(g)) @ vectors, vectors, atol=1e-9)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_invariant_vectors_are_all_that_no_element_moves(make):
    check_invariant_vectors(rich_type(make()))


@given(st.data())
def test_invariant_vectors_of_types_drawn(data):
    gspace = data.draw(plane_or_point)
    check_invariant_vectors(data.draw(spaces.field_types(gspace)))


def test_tables_do_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float16)
    try:
        tables = fibers(gspaces.rot2dOnR2(5))
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_allclose(tables.action[1, 0, 0], np.cos(2 * np.pi / 5), rtol=1e-15)


def test_irreps_are_counted():
    gspace = gspaces.rot2dOnR2(4)
    counts = count_irreps(FieldType(gspace, [gspace.regular_repr, gspace.irrep(1), gspace.irrep(1)]))
    assert counts == {(0,): 1, (1,): 3, (2,): 1}


QUOTIENTS = {
    "C8, 4": (lambda: gspaces.rot2dOnR2(8), 4),
    "D4, mirror": (lambda: gspaces.flipRot2dOnR2(4), (0, 1)),
    "D4, turns": (lambda: gspaces.flipRot2dOnR2(4), (None, 4)),
    "D3, itself": (lambda: gspaces.flipRot2dOnR2(3), (0, 3)),
    "octahedral, axes": (gspaces.octaOnR3, (False, 4)),
    "cylindrical, mirror": (lambda: gspaces.conicalOnR3(4), (0, 1)),
    "C6 on a point": (lambda: gspaces.no_base_space(group.cyclic_group(6)), 3),
}
quotients = pytest.mark.parametrize(("make", "subgroup"), QUOTIENTS.values(), ids=QUOTIENTS)


@quotients
@pytest.mark.slow
def test_cosets_agree_with_escnn(make, subgroup):
    """The cosets hK of a subgroup, how elements move them, and which pairs of them a function can tell apart."""
    space, tables = make(), fibers(make(), subgroup=subgroup)
    part, into, _ = space.fibergroup.subgroup(subgroup)
    elements, own = list(space.fibergroup.elements), {into(k) for k in part.elements}
    sets = [{elements[i] for i in coset} for coset in tables.cosets]
    assert sets[0] == own
    assert sets == [{h @ k for k in own} for h in tables.elements]
    assert sum(map(len, sets)) == len(set().union(*sets)) == len(elements)
    assert [tables.index(g) for g in elements] == [next(i for i, c in enumerate(sets) if g in c) for g in elements]
    if tables.dimension:
        matrices = [space.basespace_action(h) for h in tables.elements]
        np.testing.assert_allclose(tables.action, matrices, atol=1e-12)
        np.testing.assert_allclose(tables.inverse_action, np.linalg.inv(tables.action), atol=1e-12)
        stabilizer = {tuple(np.round(space.basespace_action(k), 6).ravel() + 0.0) for k in own}
        assert {tuple(np.round(m, 6).ravel() + 0.0) for m in tables.stabilizer} == stabilizer
    # A function of two cosets is invariant where it is one of K g^-1 h K, as the quotient has it.
    double = {
        (a, b): frozenset(k @ ~g @ h @ m for k in own for m in own)
        for (a, g), (b, h) in itertools.product(enumerate(tables.elements), repeat=2)
    }
    assert len(set(double.values())) == tables.relations == len(np.unique(tables.quotient))
    for pair, other in itertools.combinations(double, 2):
        assert (double[pair] == double[other]) == (tables.quotient[pair] == tables.quotient[other])
    moved = np.array([[tables.index(g @ h) for h in tables.elements] for g in elements])
    assert all((tables.quotient[np.ix_(move, move)] == tables.quotient).all() for move in moved)


@quotients
def test_frames_of_cosets_are_complete(make, subgroup):
    """As many weights as there are equivariant maps, and every one of them another."""
    space, cosets = make(), fibers(make(), subgroup=subgroup)
    for field in (space.regular_repr, space.trivial_repr, space.quotient_repr(subgroup)):
        for dual in (False, True):
            (segment,) = frames(FieldType(space, [field]), group=cosets, dual=dual)
            maps = np.concatenate(list(segment.matrices), axis=1)
            character = [
                np.trace(field(h)) * space.quotient_repr(subgroup).character(h) for h in space.fibergroup.elements
            ]
            assert np.linalg.matrix_rank(maps) == len(maps) == round(np.mean(character))


def test_other_elements_than_the_first_of_a_coset_mix_poses():
    """The quotient of elements is none of cosets: it changes with the elements that stand for them."""
    tables = fibers(gspaces.flipRot2dOnR2(4), subgroup=(0, 1))
    every = fibers(gspaces.flipRot2dOnR2(4))
    by_first, by_last = (every.quotient[np.ix_(c, c)] for c in (tables.cosets[:, 0], tables.cosets[:, -1]))
    assert (by_first != by_last).any()


@pytest.mark.parametrize("subgroup", [3, -1, 2.5, "K", (0, 2), (None, 3)])
def test_subgroups_that_there_are_not(subgroup):
    with pytest.raises(ValueError, match=r"poses: got .* id of a subgroup"):
        fibers(gspaces.rot2dOnR2(4), subgroup=subgroup)
    with pytest.raises(ValueError, match=r"poses: .* continuous"):
        fibers(gspaces.rot2dOnR2(-1), subgroup=subgroup)
