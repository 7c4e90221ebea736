"""The Lie algebra of a group in a representation."""

import numpy as np
import pytest
import torch
from escnn import gspaces

from escnn_attention import Samples
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.lie_algebra import algebra, random_transformation, represented
from escnn_attention.groups.random_transformation import LieElement
from escnn_attention.groups.representations import irreps_of

GSPACES = {
    "SO(2)": lambda: gspaces.rot2dOnR2(-1),
    "O(2)": lambda: gspaces.flipRot2dOnR2(-1),
    "SO(3)": gspaces.rot3dOnR3,
    "O(3)": gspaces.flipRot3dOnR3,
    "cylinder": lambda: gspaces.cylindricalOnR3(-1),
}


@pytest.mark.parametrize("make", GSPACES.values(), ids=GSPACES)
def test_the_exponential_is_the_representation(make):
    """Along each line of the algebra and on every component, for irreps of every frequency."""
    group = make().fibergroup
    lines, components = algebra(group)
    for frequency in range(3):
        for irrep in irreps_of(group, frequency):
            matrices = represented(irrep)
            for i, line in enumerate(lines):
                for c, component in enumerate(components):
                    vector = torch.zeros(len(lines), dtype=torch.float64)
                    vector[i] = 0.7
                    element = component @ line(0.7)
                    found = matrices(LieElement(vector, c))
                    np.testing.assert_allclose(found, irrep(element), atol=1e-9)
                    np.testing.assert_allclose(
                        matrices(LieElement(vector, c), inverse=True), irrep(~element), atol=1e-9
                    )
            assert matrices.trivial == irrep.is_trivial()


def test_nothing_is_drawn_for_fixed_samples():
    space = gspaces.rot2dOnR2(-1)
    vectors = space.type(space.irrep(1))
    assert random_transformation(vectors, vectors, fibers(space, Samples(4))) is None
    assert random_transformation(vectors, vectors, fibers(space, Samples(4, turn="random"))) is not None
    finite = gspaces.rot2dOnR2(4)
    assert random_transformation(vectors, vectors, fibers(finite)) is None
