"""Classifiers and their last stages."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, ReLU
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import LiftingSelfAttention, PoseLinear, equivariance_report
from escnn_attention.models import EquivariantClassifier, InvariantLogits, PoseMean, PositionSum
from tests import spaces


def stages(gspace, fields=3):
    image, hidden = spaces.scalars(gspace, 1), spaces.regular(gspace, fields)
    return {"lifting": LiftingSelfAttention(image, hidden, fields, 3), "relu": ReLU(hidden)}


@pytest.mark.parametrize("num_classes", [4, None])
def test_is_the_formula(num_classes):
    network = EquivariantClassifier(stages(gspaces.flipRot2dOnR2(4)), num_classes).double()
    images = torch.randn(2, 1, 5, 6, dtype=torch.float64)
    features = network.feature_maps(images)["relu"].tensor.view(2, 3, 8, 5, 6)
    expected = features.amax(2).mean((-2, -1))
    if num_classes is not None:
        expected = expected @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(network(images), expected)
    torch.testing.assert_close(network(network.in_type(images)), expected)
    assert network.num_classes == expected.shape[1]


def test_logits_are_invariant():
    for gspace in (gspaces.flipRot2dOnR2(4), gspaces.mirOnR3()):
        network = EquivariantClassifier(stages(gspace), 4)
        shape = (2, 1, *spaces.shape_of(gspace, 5))
        assert equivariance_report(network.as_fields(), shape).relative_error < 1e-12
        assert network.as_fields().evaluate_output_shape(shape) == (2, 4, *[1] * gspace.dimensionality)


def test_a_network_without_symmetry_is_found_out():
    gspace = gspaces.rot2dOnR2(4)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3))
    module = InvariantLogits(network, spaces.scalars(gspace, 1), 3)
    assert equivariance_report(module, (2, 1, 5, 5)).relative_error > 1e-2


def test_other_fields_are_refused():
    gspace = gspaces.rot2dOnR2(4)
    vectors = FieldType(gspace, [gspace.irrep(1)])
    with pytest.raises(ValueError, match=r"stages: .*regular .*got also irrep_1"):
        EquivariantClassifier({"map": PoseLinear(spaces.regular(gspace, 1), vectors)}, 2)
    with pytest.raises(ValueError, match=r"in_type: .*regular .*got also irrep_1"):
        PoseMean(vectors)
    for stage in (PoseMean, PositionSum):
        with pytest.raises(TypeError, match="in_type: got int"):
            stage(4)


def test_other_inputs_are_refused():
    network = EquivariantClassifier(stages(gspaces.rot2dOnR2(4)), 2)
    other = spaces.random_field(spaces.scalars(gspaces.rot2dOnR2(2), 1), 5, 5)
    with pytest.raises(ValueError, match=r"input: .*on the gspace"):
        network(other)
    with pytest.raises(TypeError, match=r"input: .*float64, but its parameters"):
        network(torch.randn(1, 1, 5, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"got .*uint8, .*to\(torch.float32\)$"):
        network(torch.zeros(1, 1, 5, 5, dtype=torch.uint8))
    for shape in ((1, 2, 5, 5), (1, 5, 5)):
        with pytest.raises(ValueError, match=r"input: .*needed \(batch, 1"):
            network(torch.randn(shape))


LAST_STAGES = {
    PoseMean: lambda f: f.mean(2, keepdim=True).expand_as(f),
    PositionSum: lambda f: f.sum((3, 4), keepdim=True),
}


@pytest.mark.parametrize("stage", LAST_STAGES)
@given(st.sampled_from(list(spaces.PLANE)), st.integers(1, 3))
def test_last_stages_are_their_formulas(stage, name, fields):
    module = stage(spaces.regular(spaces.PLANE[name](), fields))
    x = spaces.random_field(module.in_type, 3, 5)
    y = module(x)
    torch.testing.assert_close(y.tensor, LAST_STAGES[stage](x.tensor.unflatten(1, (fields, -1))).flatten(1, 2))
    assert tuple(y.shape) == module.evaluate_output_shape(tuple(x.shape))
    for g in module.in_type.gspace.fibergroup.elements:
        torch.testing.assert_close(module(x.transform_fibers(g)).tensor, y.transform_fibers(g).tensor)
    torch.testing.assert_close(module.export()(x.tensor), y.tensor)
