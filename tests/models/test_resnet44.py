import math

import pytest
import torch
from escnn import gspaces
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import AttentiveConv, FeatureAttention, equivariance_report
from escnn_attention.models import ResidualBlock, ResNet44
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, count, few_examples, norms, sequence, settled

EXACT = 1e-10
Z2, P4, P4M = gspaces.trivialOnR2(), gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


@pytest.mark.parametrize(
    ("gspace", "attention", "published", "paper"),
    [(Z2, None, 2_636_064, None), (P4M, None, 2_621_683, 2.62), (P4M, "features", 2_693_911, 2.70)],
    ids=["Z2", "p4m", "f p4m"],
)
def test_parameters_are_those_of_table_2(gspace, attention, published, paper):
    assert count(ResNet44.cifar10(gspace, attention=attention)) == published
    # The paper has 2.70M for the 2.694M of the published implementation, which is rounded up.
    assert paper is None or 0 < paper - published / 1e6 + 0.005 < 0.015


def test_layers_are_as_published():
    network = ResNet44.cifar10(P4M, attention="features")
    convolutions = [m for m in network.modules() if isinstance(m, AttentiveConv)]
    assert len(convolutions) == 44 + 2  # two shortcuts
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert len(attentions) == len(convolutions)
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3] + 45 * [2]
    assert {(m.kernel_size, m.plain.dilation) for m in attentions} == {(7, 1)}
    assert {norm.eps for norm in norms(network)} == {2e-5}
    halving = [n for n, m in network.stages.items() if isinstance(m, ResidualBlock) and m.halve]
    assert halving == ["residual_2_1", "residual_3_1"]
    kernel = network.stages["residual_1_2"].branch.convolution.plain.kernel.weight
    assert 0.9 < kernel.abs().max() / math.sqrt(2 / (11 * 9)) <= 1


def test_grids_are_the_published_ones():
    network = ResNet44(P4, 3, 10, width=(1, 1, 1), blocks=2)
    current, seen = (1, 3, 32, 32), []
    for stage in network.stages.values():
        current = stage.evaluate_output_shape(current)
        seen.append(current[-1])
    assert seen == [32, 32, 32, 16, 16, 8, 8, 1]


def test_all_44_layers_are_exact():
    network = settled(ResNet44.cifar10(P4, width=(1, 1, 2), attention="features"), 4, 3, 12, 12)
    assert equivariance_report(network.as_fields(), (1, 3, 12, 12), layers=False).relative_error < EXACT


@few_examples
@given(st.data())
def test_equivariant_for_any_group_size_and_attention(data):
    gspace = (spaces.PLANE | spaces.VOLUME)[
        data.draw(st.sampled_from(["trivial", "flip", "C4", "C8", "D4", "mirror"]))
    ]()
    attention = data.draw(st.sampled_from([None, "full", "channel", "spatial", "features", "poses"]))
    network = ResNet44(
        gspace, 1, 3, width=(1, 1, 2), blocks=1, attention=attention, **options_of(attention, attention_size=3)
    )
    shape = (1, *spaces.shape_of(gspace, data.draw(st.integers(5, 7))))
    network = settled(network, 2, *shape, spread=2)
    assert equivariance_report(network.as_fields(), (1, *shape), layers=False).relative_error < EXACT
    assert_exported(network, 2, *shape)


def test_the_report_has_nothing_to_say_at_any_size():
    network = settled(ResNet44(P4, 1, 3, width=(1, 1, 1), blocks=1), 2, 1, 8, 8)
    for size in (5, 6, 8):
        assert not equivariance_report(sequence(network), (1, 1, size, size)).inexact_layers


def test_the_logits_are_means_and_the_features_are_pooled_in_front():
    network = settled(ResNet44(P4, 1, 3, width=(1, 1, 2), blocks=1, attention="poses"), 4, 1, 8, 8)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    head = network.stages["classes"]
    pooled = head[:2](network.feature_maps(x)["residual_3_1"]).tensor.mean((2, 3), keepdim=True)
    y = head[3:5](head[2].out_type(pooled)).tensor
    torch.testing.assert_close(network(x), y.unflatten(1, (3, 4)).mean((2, 3, 4)))


def test_a_broken_kernel_is_found_out():
    network = settled(ResNet44(P4, 1, 3, width=(2, 2, 2), blocks=1), 4, 1, 8, 8)
    broken(network.stages["residual_2_1"], "kernel")
    assert equivariance_report(network.as_fields(), (1, 1, 8, 8), layers=False).relative_error > 1e-4


def test_widths_and_mistakes():
    network = ResNet44(P4, 3, 10, blocks=1)
    assert [len(network.stages[f"residual_{i}_1"].out_type) for i in (1, 2, 3)] == [16, 32, 64]
    with pytest.raises(ValueError, match="width: got 2 values, needed 3, one for each stage"):
        ResNet44(P4, 3, 10, width=(16, 32))
    with pytest.raises(TypeError, match="width: got 16, needed a list or a tuple, one for each stage"):
        ResNet44(P4, 3, 10, width=16)
    with pytest.raises(ValueError, match="hidden: got 3, but attention=None has no channel attention; leave it at 2"):
        ResNet44(P4, 3, 10, hidden=3)
    with pytest.raises(ValueError, match="blocks: got 0, needed at least 1"):
        ResNet44(P4, 3, 10, blocks=0)
    with pytest.raises(ValueError, match="hidden: got 0, needed at least 1"):
        ResNet44(P4, 3, 10, hidden=0)
    with pytest.raises(ValueError, match="attention: got 'x', needed None"):
        ResNet44(P4, 3, 10, attention="x")
