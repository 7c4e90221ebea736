"""Symmetric matrices as fields."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces

from escnn_attention.models import SymmetricTensors, symmetric_tensor_repr
from tests import spaces

FINITE = {**spaces.PLANE, **{name: space for name, space in spaces.VOLUME.items() if name != "octahedral"}}
CONTINUOUS = {
    "SO(2)": lambda: gspaces.rot2dOnR2(-1),
    "O(2)": lambda: gspaces.flipRot2dOnR2(-1),
    "SO(3)": gspaces.rot3dOnR3,
}


@pytest.mark.parametrize("name", [*FINITE, *CONTINUOUS])
def test_symmetric_tensors(name):
    """Matrices to fields and back, and the representation on them is A ↦ hAhᵀ, orthogonal, and a sum of irreps."""
    space = (FINITE | CONTINUOUS)[name]()
    d, group = space.dimensionality, space.fibergroup
    tensors, representation = SymmetricTensors(d).double(), symmetric_tensor_repr(space)
    assert representation is symmetric_tensor_repr(space)
    a = torch.randn(4, d, d, dtype=torch.float64)
    a = a + a.mT
    numbers = tensors.from_matrices(a)
    assert numbers.shape == (4, d * (d + 1) // 2)
    torch.testing.assert_close(tensors(numbers), a, rtol=0, atol=1e-14)
    torch.testing.assert_close(numbers.norm(dim=1), a.norm(dim=(1, 2)))
    torch.testing.assert_close(tensors.from_matrices(a + torch.triu(a, 1) - torch.triu(a, 1).mT), numbers)
    for h in group.elements if name in FINITE else [group.sample() for _ in range(5)]:
        matrix = torch.as_tensor(space.basespace_action(h), dtype=torch.float64)
        moved = tensors.from_matrices(matrix @ a @ matrix.T)
        found = numbers @ torch.as_tensor(representation(h)).T
        torch.testing.assert_close(found, moved, rtol=0, atol=1e-12 if name in FINITE else 1e-10)
    # The trace is invariant; under a group that moves every direction nothing else of degree one is.
    assert sum(group.irrep(*i).is_trivial() for i in representation.irreps) >= 1
    if name in CONTINUOUS:
        assert sorted(group.irrep(*i).size for i in representation.irreps) == ([1, 2] if d == 2 else [1, 5])


def test_actions_of_one_group_are_told_apart():
    """Flips about different axes, rotations by half a turn: the same group, and other matrices."""
    found = [gspaces.flip2dOnR2(), gspaces.flip2dOnR2(axis=0.3), gspaces.rot2dOnR2(2)]
    assert found[0].fibergroup == found[1].fibergroup
    assert len({symmetric_tensor_repr(space).name for space in found}) == 3


def test_a_space_without_points_is_refused():
    with pytest.raises(ValueError, match="without a base space"):
        symmetric_tensor_repr(gspaces.no_base_space(gspaces.rot2dOnR2(4).fibergroup))
