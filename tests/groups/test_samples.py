"""Samples of a continuous group, their weights, and the elements between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from escnn import group, gspaces
from escnn.group.groups import so3_utils
from scipy.spatial.transform import Rotation

from escnn_attention import Samples
from escnn_attention.groups.fibers import fibers, frames, generic_fibers, mass
from escnn_attention.groups.representations import faithful, irreps_of, is_subgroup, matrices_of
from escnn_attention.groups.samples import POLYHEDRAL, as_samples, rotations_of, sampled
from tests import spaces
from tests.groups.cases import EXACT


@pytest.mark.sampled(6)
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


def test_mass():
    plane, volume = gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3()
    assert mass(plane.type(plane.irrep(2))) == 5
    assert mass(plane.type(plane.trivial_repr)) == 3
    assert mass(volume.type(volume.irrep(1))) == 10
    assert mass(spaces.regular(gspaces.rot2dOnR2(6), 2)) == 6


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


def distances(rotations, others):
    """The angles between rotations, ``(S, T)``."""
    return 2 * np.arccos(np.clip(np.abs(rotations @ others.T), 0, 1))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (12, "auto"),
        (7, "auto"),
        (72, "tetra"),
        (48, "cube"),
        pytest.param(20, "thomson", marks=pytest.mark.exhaustive),  # escnn optimises for twenty seconds
    ],
)
@pytest.mark.parametrize("make", [group.so3_group, group.o3_group])
def test_as_many_that_differ(make, number, kind):
    rotations = rotations_of(make(1), number, kind)
    assert rotations.shape == (number, 4)
    np.testing.assert_allclose(np.linalg.norm(rotations, axis=1), 1, atol=1e-6)
    nearest = (distances(rotations, rotations) + 10 * np.eye(number)).min(1)
    assert nearest.min() > 0.1


@pytest.mark.parametrize(("number", "kind", "argument"), [(5, "thomson", 5), (48, "thomson_cube", 2)])
@pytest.mark.parametrize("make", [group.so3_group, group.o3_group])
def test_what_escnn_optimises_is_taken_as_it_is(monkeypatch, make, number, kind, argument):
    optimised = Rotation.random(number, random_state=0).as_quat()
    monkeypatch.setattr(so3_utils, f"{kind}_so3", {argument: optimised}.__getitem__)
    # Of two quaternions of a rotation escnn may take either.
    assert distances(rotations_of(make(1), number, kind), optimised).diagonal().max() < 1e-6


@pytest.mark.parametrize("kind", POLYHEDRAL)
def test_cosets_are_mapped_onto_each_other(kind):
    """By the rotations of the polyhedron, and not by others."""
    number = POLYHEDRAL[kind]
    samples = Rotation.from_quat(rotations_of(group.so3_group(1), 2 * number, kind))
    other = Rotation.from_rotvec([0.3, 0.1, -0.2])

    def gap(rotation):
        return distances((rotation * samples).as_quat(), samples.as_quat()).min(1).max()

    assert max(gap(samples[i]) for i in range(number)) < 1e-3
    assert gap(other) > 0.05


def largest_mean(gspace, samples, frequency):
    """The largest mean of a matrix element of an irrep of this frequency other than the trivial one."""
    tables = fibers(gspace, samples)
    means = [
        np.abs(np.einsum("s,sij->ij", tables.weights, matrices_of(irrep, tables.elements))).max() / tables.order
        for irrep in irreps_of(gspace.fibergroup, frequency)
        if not irrep.is_trivial()
    ]
    return max(means, default=0.0)


@pytest.mark.sampled(6)
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
    assert not is_subgroup(matrices_of(faithful(make().fibergroup), tables.elements))
    assert tables.log_measure is not None
    irreps = [i for f in range(frequency + 1) for i in irreps_of(make().fibergroup, f) if not i.is_trivial()]
    assert max(np.abs(matrices_of(irrep, tables.elements).mean(0)).max() for irrep in irreps) > 1e-3


@pytest.mark.parametrize("name", ["SO(2)", "O(2)", "cube", "O(3)", "cylinder", "full cylinder"])
def test_subgroups_weigh_alike(name):
    make, samples, _ = EXACT[name]
    tables = fibers(make(), samples)
    assert (tables.weights == 1).all()
    assert tables.log_measure is None
    index = set(tables.elements)
    assert all(~a @ b in index for a in tables.elements[:5] for b in tables.elements[-5:])


@pytest.mark.parametrize("make", [lambda: gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3], ids=["SO(2)", "SO(3)"])
def test_features_are_entries_of_the_matrix_of_the_relative_element(make):
    gspace = make()
    tables = fibers(gspace, Samples(12))
    d = gspace.dimensionality
    for s, t in [(0, 0), (1, 5), (7, 3)]:
        matrix = gspace.basespace_action(~tables.elements[s] @ tables.elements[t])
        entries = math.sqrt(d) * matrix.ravel()
        np.testing.assert_allclose(tables.relative[s, t], entries[:2] if d == 2 else entries, atol=1e-9)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXACT)
def test_features_tell_elements_apart(name):
    make, samples, _ = EXACT[name]
    features = fibers(make(), samples).relative
    assert np.isfinite(features).all()
    differ = np.abs(features[0][:, None] - features[0]).max(-1) > 1e-6
    assert differ.sum() == differ.size - len(differ)  # all but those of an element with itself
    np.testing.assert_allclose(features.std(axis=(0, 1)), 1, atol=0.35)
