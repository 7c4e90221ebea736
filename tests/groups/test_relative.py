"""The element between two samples as numbers."""

import math

import numpy as np
import pytest
from escnn import gspaces

from escnn_attention import Samples
from escnn_attention.groups.fibers import fibers
from tests.groups.cases import EXACT


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
