"""The motions as a gspace of escnn."""

import copy
import pickle

import pytest
from escnn.nn import FieldType

from escnn_attention import LiftedMotion, PointSelfAttention
from escnn_attention.groups.motion_space import MotionSpace
from escnn_attention.models.description import build, describe
from tests import spaces
from tests.nn.points import cloud


def test_is_one_space_for_all():
    space = MotionSpace(2)
    assert space == MotionSpace(2) != MotionSpace(3)
    assert hash(space) == hash(MotionSpace(2))
    for again in (pickle.loads(pickle.dumps(space)), copy.deepcopy(space), build(describe(space))):
        assert again == space
    assert space.basespace_action.size == space.dimensionality == 3


@pytest.mark.parametrize("dim", [2, 3])
def test_layers_take_it(dim):
    scalars = spaces.scalars(MotionSpace(dim), 2)
    layer = PointSelfAttention(scalars, scalars, num_neighbours=3, relation=LiftedMotion()).double()
    layer.check_equivariance()
    x = cloud(scalars, 5)
    assert layer(x).tensor.shape == (5, 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^dim: got 4, needed one of 2, 3"):
        MotionSpace(4)
    space = MotionSpace(3)
    with pytest.raises(NotImplementedError, match="no subgroups"):
        space.restrict(1)
    with pytest.raises(NotImplementedError, match="no steerable kernels"):
        space.build_kernel_basis(*2 * [FieldType(space, [space.trivial_repr]).representations[0]], 1.0, [0.0])
