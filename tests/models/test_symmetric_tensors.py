"""Symmetric matrices as fields."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention.models import SymmetricTensors, symmetric_tensor_repr
from tests import spaces

SPACES = {**spaces.PLANE, **{name: space for name, space in spaces.VOLUME.items() if name != "octahedral"}}


def turned(values: torch.Tensor, field_type: FieldType, element) -> torch.Tensor:
    return values @ torch.as_tensor(field_type.representation(element)).T


@pytest.mark.parametrize("name", list(SPACES))
def test_symmetric_tensors(name):
    """Matrices to fields and back, and the representation on them is A ↦ hAhᵀ, orthogonal, and a sum of irreps."""
    space = SPACES[name]()
    d = space.dimensionality
    tensors, representation = SymmetricTensors(d).double(), symmetric_tensor_repr(space)
    assert representation is symmetric_tensor_repr(space)
    a = torch.randn(4, d, d, dtype=torch.float64)
    a = a + a.mT
    numbers = tensors.from_matrices(a)
    assert numbers.shape == (4, d * (d + 1) // 2)
    torch.testing.assert_close(tensors(numbers), a, rtol=0, atol=1e-14)
    torch.testing.assert_close(numbers.norm(dim=1), a.norm(dim=(1, 2)))
    torch.testing.assert_close(tensors.from_matrices(a + torch.triu(a, 1) - torch.triu(a, 1).mT), numbers)
    field_type = FieldType(space, [representation])
    for h in space.fibergroup.elements:
        matrix = torch.as_tensor(space.basespace_action(h), dtype=torch.float64)
        moved = tensors.from_matrices(matrix @ a @ matrix.T)
        torch.testing.assert_close(turned(numbers, field_type, h), moved, rtol=0, atol=1e-12)
    # The trace is invariant; under a group that moves every direction nothing else of degree one is.
    assert sum(space.fibergroup.irrep(*i).is_trivial() for i in representation.irreps) >= 1


def test_actions_of_one_group_are_told_apart():
    """Flips about different axes, rotations by half a turn: the same group, and other matrices."""
    found = [gspaces.flip2dOnR2(), gspaces.flip2dOnR2(axis=0.3), gspaces.rot2dOnR2(2)]
    assert found[0].fibergroup == found[1].fibergroup
    assert len({symmetric_tensor_repr(space).name for space in found}) == 3


@pytest.mark.parametrize("space", [lambda: gspaces.rot2dOnR2(-1), lambda: gspaces.flipRot2dOnR2(-1), gspaces.rot3dOnR3])
def test_symmetric_tensors_of_continuous_groups(space):
    space = space()
    d = space.dimensionality
    representation, tensors = symmetric_tensor_repr(space), SymmetricTensors(d).double()
    a = torch.randn(d, d, dtype=torch.float64)
    a = a + a.T
    for _ in range(5):
        h = space.fibergroup.sample()
        matrix = torch.as_tensor(space.basespace_action(h), dtype=torch.float64)
        found = torch.as_tensor(representation(h)) @ tensors.from_matrices(a)
        torch.testing.assert_close(found, tensors.from_matrices(matrix @ a @ matrix.T), rtol=0, atol=1e-10)
    sizes = sorted(space.fibergroup.irrep(*i).size for i in representation.irreps)
    assert sizes == ([1, 2] if d == 2 else [1, 5])


def test_a_space_without_points_is_refused():
    with pytest.raises(ValueError, match="without a base space"):
        symmetric_tensor_repr(gspaces.no_base_space(gspaces.rot2dOnR2(4).fibergroup))
