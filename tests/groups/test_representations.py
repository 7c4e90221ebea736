"""Irreps by their frequency, and the matrices of many elements."""

import numpy as np
import pytest
from escnn import group, gspaces

from escnn_attention.groups.representations import (
    band,
    degrees_of_freedom,
    factors_of,
    faithful,
    irreps_of,
    is_subgroup,
    matrices_of,
)
from tests.groups.cases import EXACT


def test_degrees_of_freedom():
    assert degrees_of_freedom(group.o2_group(3), 3) == group.o2_group(3).bl_regular_representation(3).size
    assert degrees_of_freedom(group.o3_group(2), 2) == group.o3_group(2).bl_regular_representation(2).size
    assert band(group.so3_group(2).bl_regular_representation(2)) == 2


@pytest.mark.parametrize("name", EXACT)
def test_matrices_are_those_of_escnn(name):
    make, _, _ = EXACT[name]
    sampled = make().fibergroup
    representation = sum((irrep for f in (1, 0, 1) for irrep in irreps_of(sampled, f)), faithful(sampled))
    elements = [sampled.sample() for _ in range(3)]
    expected = [representation(h) for h in elements]
    np.testing.assert_allclose(matrices_of(representation, elements), expected, atol=1e-12)


def test_irreps_by_frequency():
    cylinder = gspaces.cylindricalOnR3(-1).fibergroup
    finite, continuous = factors_of(cylinder)
    assert finite.order() == 2
    assert continuous.continuous
    for frequency in range(3):
        irreps = list(irreps_of(cylinder, frequency))
        assert len(irreps) == 2
        assert [band(irrep) for irrep in irreps] == [frequency, frequency]
    assert next(irreps_of(group.o2_group(3), 0)).is_trivial()
    with pytest.raises(NotImplementedError, match="C4"):
        list(irreps_of(group.cyclic_group(4), 1))


def test_subgroups_are_told_from_other_sets():
    so3 = group.so3_group(1)
    cube = matrices_of(faithful(so3), so3.grid("cube"))
    assert is_subgroup(cube)
    assert not is_subgroup(cube[:-1])
