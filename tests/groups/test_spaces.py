"""Gspaces that escnn lacks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import GroupSelfAttention, LiftedMotion, PointSelfAttention, space_time, tetraOnR3
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.spaces import MotionSpace, tetra_group
from escnn_attention.models.description import build, describe
from tests import spaces
from tests.nn.points import cloud, error_of


def test_the_group_law():
    group = tetra_group()
    assert len(set(group.elements)) == group.order() == 12
    for g in group.elements:
        assert g @ ~g == group.identity
        for h in group.elements:
            assert (g @ h) in group.elements
    assert spaces.generated(group.generators) == set(group.elements)
    octahedral = fibers(gspaces.octaOnR3()).action
    inside = np.isclose(fibers(tetraOnR3()).action[:, None], octahedral).all((2, 3)).any(0)
    assert inside.sum() == 12
    # Those that are left out are no elements.
    for matrix in octahedral[~inside]:
        with pytest.raises(ValueError, match="element of Tetrahedral"):
            group.element(matrix, "MAT")


def test_representations():
    group = tetra_group()
    assert sum(irrep.size**2 / irrep.sum_of_squares_constituents for irrep in group.irreps()) == 12
    standard = fibers(tetraOnR3()).action
    for representation in (*group.irreps(), group.regular_representation):
        for g in group.elements:
            for h in group.generators:
                product = representation(g) @ representation(h)
                np.testing.assert_allclose(representation(g @ h), product, atol=1e-10)
    for i, g in enumerate(group.elements):
        np.testing.assert_allclose(standard[i], g.to("MAT"), atol=1e-12)
        moved = [group.elements.index(g @ h) for h in group.elements]
        np.testing.assert_array_equal(np.round(group.regular_representation(g)).argmax(0), moved)
    with pytest.raises(ValueError, match=r"irreps of .*0, 1 and 2"):
        group.irrep(3)


def test_layers_between_points_are_exact():
    space = tetraOnR3()
    fields = FieldType(space, [space.irrep(2), space.trivial_repr, space.regular_repr, space.irrep(1)])
    layer = PointSelfAttention(fields, fields, 2, head_fields=3).double()
    x = cloud(fields, 9)
    assert error_of(layer, x, space.fibergroup.elements) < 1e-11
    # The negative control: a quarter turn is none of its elements.
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    scalars = FieldType(space, [space.trivial_repr])
    layer = PointSelfAttention(scalars, scalars, 2, head_fields=3).double()
    x = cloud(scalars, 9)
    turned = GeometricTensor(x.tensor, scalars, x.coords @ quarter.T)
    assert (layer(turned).tensor - layer(x).tensor).abs().max() > 1e-6
    rotation = torch.as_tensor(fibers(space).action[5])
    turned = GeometricTensor(x.tensor, scalars, x.coords @ rotation.T)
    assert (layer(turned).tensor - layer(x).tensor).abs().max() < 1e-12


def test_layers_on_grids_are_exact():
    space = tetraOnR3()
    fields = FieldType(space, [space.trivial_repr, space.regular_repr])
    layer = GroupSelfAttention(fields, fields, 1, 3, keys="own").double()
    x = spaces.random_field(fields, 3, 3, 3)
    assert spaces.grid_error(layer, x) < 1e-11


@pytest.mark.parametrize(
    "make", [tetraOnR3, lambda: MotionSpace(2), lambda: MotionSpace(3), lambda: space_time(gspaces.rot2dOnR2(4))]
)
def test_copies_are_the_same_space(make):
    space = make()
    for again in (make(), copy.deepcopy(space), pickle.loads(pickle.dumps(space)), build(describe(space))):
        assert again == space
        assert hash(again) == hash(space)
        assert again.fibergroup is space.fibergroup
    assert space not in (gspaces.octaOnR3(), gspaces.rot2dOnR2(4), space_time(gspaces.rot2dOnR2(2)))
    assert MotionSpace(2) != MotionSpace(3)
    assert space.basespace_action.size == space.dimensionality


@pytest.mark.parametrize("dim", [2, 3])
def test_layers_take_it(dim):
    scalars = spaces.scalars(MotionSpace(dim), 2)
    layer = PointSelfAttention(scalars, scalars, num_neighbours=3, relation=LiftedMotion()).double()
    layer.check_equivariance()
    x = cloud(scalars, 5)
    assert layer(x).tensor.shape == (5, 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^dim: got 4"):
        MotionSpace(4)
    space = MotionSpace(3)
    for own in (space, tetraOnR3()):
        with pytest.raises(NotImplementedError, match="no subgroups"):
            own.restrict(1)
    with pytest.raises(NotImplementedError, match="no steerable kernels"):
        space.build_kernel_basis(*2 * [FieldType(space, [space.trivial_repr]).representations[0]], 1.0, [0.0])
