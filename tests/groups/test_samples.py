import math

import numpy as np
import pytest
from escnn import group, gspaces

from escnn_attention import Samples
from escnn_attention.groups.fibers import fibers, frames, generic_fibers, mass
from escnn_attention.groups.samples import (
    as_samples,
    band,
    degrees_of_freedom,
    faithful,
    irreps_of,
    is_subgroup,
    matrices_of,
    sampled,
)
from tests import spaces


def sl(make):
    return make().fibergroup


def largest_mean(gspace, samples, frequency):
    """The largest mean of a matrix element of an irrep of this frequency other than the trivial one."""
    tables = fibers(gspace, samples)
    means = [
        np.abs(np.einsum("s,sij->ij", tables.weights, matrices_of(irrep, tables.elements))).max() / tables.order
        for irrep in irreps_of(gspace.fibergroup, frequency)
        if not irrep.is_trivial()
    ]
    return max(means, default=0.0)


EXACT = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), Samples(8), 7),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1), Samples(8), 3),
    "tetrahedron": (gspaces.rot3dOnR3, Samples(12), 2),
    "cube": (gspaces.rot3dOnR3, Samples(24), 3),
    "icosahedron": (gspaces.rot3dOnR3, Samples(60), 5),
    "cosets of the icosahedron": (gspaces.rot3dOnR3, Samples(120), 5),
    "spiral": (gspaces.rot3dOnR3, Samples(40), 2),
    "hopf": (gspaces.rot3dOnR3, Samples(60, "hopf"), 1),
    "random rotations": (gspaces.rot3dOnR3, Samples(40, "rand"), 1),
    "O(3)": (gspaces.flipRot3dOnR3, Samples(48), 3),
    "O(3) on a spiral": (gspaces.flipRot3dOnR3, Samples(36), 1),
    "random in O(2)": (lambda: gspaces.flipRot2dOnR2(-1), Samples(12, "rand"), 1),
    "about an axis": (lambda: gspaces.rot2dOnR3(-1), Samples(6), 5),
    "cone": (lambda: gspaces.conicalOnR3(-1), Samples(12), 5),
    "dihedral": (lambda: gspaces.dihedralOnR3(-1), Samples(12), 5),
    "cylinder": (lambda: gspaces.cylindricalOnR3(-1), Samples(12), 5),
    "full cylinder": (lambda: gspaces.fullCylindricalOnR3(-1), Samples(24), 5),
    "on a point": (lambda: gspaces.no_base_space(group.so3_group(2)), Samples(12), 2),
}


@pytest.mark.parametrize(("make", "samples", "frequency"), EXACT.values(), ids=EXACT)
def test_irreps_integrate_to_zero_up_to_a_frequency(make, samples, frequency):
    gspace = make()
    assert max(largest_mean(gspace, samples, f) for f in range(frequency + 1)) < 1e-9
    assert max(largest_mean(gspace, samples, f) for f in range(frequency + 1, frequency + 3)) > 1e-2
    weights = fibers(gspace, samples).weights
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(len(weights))


@pytest.mark.parametrize("name", ["spiral", "hopf", "random rotations", "random in O(2)"])
def test_equal_weights_would_not_do(name):
    make, samples, frequency = EXACT[name]
    tables = fibers(make(), samples)
    assert not is_subgroup(matrices_of(faithful(sl(make)), tables.elements))
    assert tables.log_measure is not None
    irreps = [i for f in range(frequency + 1) for i in irreps_of(sl(make), f) if not i.is_trivial()]
    assert max(np.abs(matrices_of(irrep, tables.elements).mean(0)).max() for irrep in irreps) > 1e-3


@pytest.mark.parametrize("name", ["SO(2)", "O(2)", "cube", "O(3)", "cylinder", "full cylinder"])
def test_subgroups_weigh_alike(name):
    make, samples, _ = EXACT[name]
    tables = fibers(make(), samples)
    assert (tables.weights == 1).all()
    assert tables.log_measure is None
    index = set(tables.elements)
    assert all(~a @ b in index for a in tables.elements[:5] for b in tables.elements[-5:])


@pytest.mark.parametrize("name", EXACT)
def test_tables_of_samples(name):
    make, samples, _ = EXACT[name]
    gspace = make()
    tables = fibers(gspace, samples)
    assert fibers(gspace, samples) is tables
    assert len(set(tables.elements)) == tables.order
    assert tables.order == samples.num_samples or samples.kind == "hopf"
    assert (tables.inverse.size, tables.quotient.size) == (0, 0)
    assert not tables.preserves_square
    if gspace.dimensionality:
        for h, matrix, inverse in list(zip(tables.elements, tables.action, tables.inverse_action, strict=True))[:9]:
            np.testing.assert_allclose(matrix, gspace.basespace_action(h), atol=1e-12)
            np.testing.assert_allclose(inverse, gspace.basespace_action(~h), atol=1e-12)


@pytest.mark.parametrize("make", [lambda: gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3], ids=["SO(2)", "SO(3)"])
def test_features_are_entries_of_the_matrix_of_the_relative_element(make):
    gspace = make()
    tables = fibers(gspace, Samples(12))
    d = gspace.dimensionality
    for s, t in [(0, 0), (1, 5), (7, 3)]:
        matrix = gspace.basespace_action(~tables.elements[s] @ tables.elements[t])
        entries = math.sqrt(d) * matrix.ravel()
        np.testing.assert_allclose(tables.relative[s, t], entries[:2] if d == 2 else entries, atol=1e-9)


@pytest.mark.parametrize("name", EXACT)
def test_features_tell_elements_apart(name):
    make, samples, _ = EXACT[name]
    features = fibers(make(), samples).relative
    assert np.isfinite(features).all()
    differ = np.abs(features[0][:, None] - features[0]).max(-1) > 1e-6
    assert differ.sum() == differ.size - len(differ)  # all but those of an element with itself
    np.testing.assert_allclose(features.std(axis=(0, 1)), 1, atol=0.35)


@pytest.mark.parametrize("dual", [False, True])
def test_frames_of_samples(dual):
    gspace = gspaces.rot3dOnR3()
    field_type = gspace.type(gspace.irrep(1), gspace.trivial_repr, gspace.irrep(2), gspace.irrep(1))
    tables = fibers(gspace, Samples(18))
    total = mass(field_type) / tables.order
    for segment, name in zip(frames(field_type, group=tables, dual=dual), (1, 0, 2), strict=True):
        for h, weight, matrix in zip(tables.elements, tables.weights, segment.matrices, strict=True):
            expected = total * weight * gspace.irrep(name)(h).T if dual else gspace.irrep(name)(~h)
            np.testing.assert_allclose(matrix, expected, atol=1e-9)


def test_mass_and_degrees_of_freedom():
    plane, volume = gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3()
    assert mass(plane.type(plane.irrep(2))) == 5
    assert mass(plane.type(plane.trivial_repr)) == 3
    assert mass(volume.type(volume.irrep(1))) == 10
    assert mass(spaces.regular(gspaces.rot2dOnR2(6), 2)) == 6
    assert degrees_of_freedom(group.o2_group(3), 3) == group.o2_group(3).bl_regular_representation(3).size
    assert degrees_of_freedom(group.o3_group(2), 2) == group.o3_group(2).bl_regular_representation(2).size
    assert band(group.so3_group(2).bl_regular_representation(2)) == 2


def test_a_few_elements_that_are_like_no_others():
    for make, _, _ in EXACT.values():
        assert generic_fibers(make()).order >= 4
    c4 = gspaces.rot2dOnR2(4)
    assert generic_fibers(c4) is fibers(c4)


def test_arguments():
    assert as_samples(None) is None
    assert as_samples(8) == Samples(8) == as_samples(Samples(8))
    assert Samples(8) != Samples(8, turn="random")
    assert len(sampled(group.so3_group(1), Samples(30))[0]) == 30


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Samples(0), ValueError, "num_samples: got 0"),
        (lambda: Samples(2.5), TypeError, "num_samples: got 2.5"),
        (lambda: Samples(True), TypeError, "num_samples: got True"),
        (lambda: Samples(8, "grid"), ValueError, "kind: got 'grid', needed one of 'auto', 'regular', 'tetra'"),
        (lambda: Samples(8, turn="often"), ValueError, "turn: got 'often'"),
        (lambda: as_samples("8"), TypeError, "samples: got '8'"),
        (lambda: as_samples(0), ValueError, "samples: got 0"),
        (lambda: sampled(group.o2_group(1), Samples(7)), ValueError, r"samples: got 7 for O\(2\), needed an even"),
        (lambda: sampled(group.o3_group(1), Samples(7)), ValueError, r"samples: got 7 for O\(3\), needed an even"),
        (lambda: sampled(group.so2_group(1), Samples(8, "ico")), ValueError, r"kind: got 'ico' for SO\(2\)"),
        (lambda: sampled(group.so3_group(1), Samples(8, "regular")), ValueError, r"kind: got 'regular' for SO\(3\)"),
        (
            lambda: sampled(group.so3_group(1), Samples(8, "ico")),
            ValueError,
            "got 8 of kind 'ico'.* needed a multiple of 60",
        ),
        (
            lambda: sampled(group.o3_group(1), Samples(8, "cube")),
            ValueError,
            "got 8 of kind 'cube'.* needed a multiple of 48",
        ),
        (lambda: sampled(group.so3_group(1), Samples(30, "thomson_cube")), ValueError, "needed a multiple of 24"),
        (
            lambda: sampled(gspaces.cylindricalOnR3(-1).fibergroup, Samples(5)),
            ValueError,
            "samples: got 5 for Cylindrical, needed a multiple of 2",
        ),
        (lambda: fibers(gspaces.rot2dOnR2(4), Samples(4)), ValueError, "samples: the fiber group C4 is finite"),
        (lambda: fibers(gspaces.rot2dOnR2(-1)), NotImplementedError, "samples=8 in the plane"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
