"""Samples of continuous groups."""

import numpy as np
import pytest
from escnn import group, gspaces

from escnn_attention import Samples
from escnn_attention.groups.fibers import fibers, frames, generic_fibers, mass
from escnn_attention.groups.samples import as_samples, sampled
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
