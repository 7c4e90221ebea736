import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.models import EquivariantClassifier, PoseMean
from tests import spaces


@given(st.sampled_from(list(spaces.PLANE)), st.integers(1, 3))
def test_is_the_mean_over_the_poses_at_every_pose(name, fields):
    module = PoseMean(spaces.regular(spaces.PLANE[name](), fields))
    x = spaces.random_field(module.in_type, 3, 3)
    f = x.tensor.unflatten(1, (fields, -1))
    y = module(x)
    torch.testing.assert_close(y.tensor.unflatten(1, (fields, -1)), f.mean(2, keepdim=True).expand_as(f))
    for g in module.in_type.gspace.fibergroup.elements:
        torch.testing.assert_close(module(x.transform_fibers(g)).tensor, y.transform_fibers(g).tensor)
    torch.testing.assert_close(module.export()(x.tensor), y.tensor)


def test_makes_a_mean_of_the_maximum_over_the_poses():
    fields = spaces.regular(gspaces.rot2dOnR2(4), 3)
    x = spaces.random_field(fields, 5, 5)
    logits = EquivariantClassifier({"mean": PoseMean(fields)}, None)(x)
    torch.testing.assert_close(logits, x.tensor.unflatten(1, (3, 4)).mean((2, 3, 4)))


def test_other_fields_are_refused():
    gspace = gspaces.rot2dOnR2(4)
    with pytest.raises(
        ValueError, match="in_type: the mean over the poses needs regular fields only, got also irrep_1"
    ):
        PoseMean(FieldType(gspace, [gspace.irrep(1)]))
    with pytest.raises(TypeError, match="in_type: got int"):
        PoseMean(4)
