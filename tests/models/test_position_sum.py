import pytest
import torch
from escnn import gspaces

from escnn_attention.models import EquivariantClassifier, PositionSum
from tests import spaces


def test_is_the_sum_over_the_positions():
    fields = spaces.regular(gspaces.flipRot2dOnR2(4), 2)
    module, x = PositionSum(fields), spaces.random_field(fields, 3, 5)
    y = module(x)
    torch.testing.assert_close(y.tensor, x.tensor.sum((2, 3), keepdim=True))
    assert tuple(y.shape) == module.evaluate_output_shape(tuple(x.shape))
    torch.testing.assert_close(module.export()(x.tensor), y.tensor)
    for g in fields.gspace.fibergroup.elements:
        torch.testing.assert_close(module(x.transform_fibers(g)).tensor, y.transform_fibers(g).tensor)


def test_makes_a_maximum_of_sums():
    fields = spaces.regular(gspaces.rot2dOnR2(4), 3)
    x = spaces.random_field(fields, 5, 5)
    logits = EquivariantClassifier({"sum": PositionSum(fields)}, None)(x)
    torch.testing.assert_close(logits, x.tensor.unflatten(1, (3, 4)).sum((3, 4)).amax(2))


def test_bad_types():
    with pytest.raises(TypeError, match="in_type: got int"):
        PositionSum(4)
