"""Rotations of space that fill the group evenly."""

import numpy as np
import pytest
from escnn import group
from escnn.group.groups import so3_utils
from scipy.spatial.transform import Rotation

from escnn_attention.groups.rotations import POLYHEDRAL, rotations_of


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
