import math

import pytest
import torch
from escnn import gspaces
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import FeatureAttention, equivariance_report
from escnn_attention.models import GroupDenseNet
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, count, few_examples, norms, sequence, settled

EXACT = 1e-10
Z2, P4, P4M = gspaces.trivialOnR2(), gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


@pytest.mark.parametrize(
    ("gspace", "attention", "published", "paper"),
    [
        (Z2, None, 130_598, "130.60K"),
        (P4, None, 129_649, "129.65K"),
        (P4, "features", 140_453, "140.45K"),
        (P4M, None, 124_209, "124.21K"),
        (P4M, "features", 141_221, "141.22K"),
    ],
    ids=["Z2", "p4", "f p4", "p4m", "f p4m"],
)
def test_parameters_are_those_of_table_3(gspace, attention, published, paper):
    assert count(GroupDenseNet.patch_camelyon(gspace, attention=attention)) == published
    assert f"{published / 1e3:.2f}K" == paper


def test_grids_and_widths_are_the_published_ones():
    network = GroupDenseNet.patch_camelyon(P4)
    current, seen = (1, 3, 96, 96), []
    for stage in network.stages.values():
        current = stage.evaluate_output_shape(current)
        seen.append((current[1] // 4, current[-1]))
    n = 13
    assert seen == [
        (n, 94),
        (2 * n, 92),
        (2 * n, 46),
        (3 * n, 44),
        (3 * n, 22),
        (4 * n, 20),
        (4 * n, 10),
        (5 * n, 8),
        (5 * n, 4),
        (6 * n, 2),
        (2, 2),
    ]


def test_layers_are_as_published():
    network = GroupDenseNet.patch_camelyon(P4M, attention="features")
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert [(m.kernel_size, m.plain.dilation) for m in attentions] == [
        (7, 4),  # on the image
        (7, 4),
        (7, 4),
        (7, 4),
        (7, 4),
        (7, 3),
        (7, 3),
        (7, 2),
        (7, 1),
        (5, 1),
        (3, 1),
    ]
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3] + 10 * [2]
    assert {norm.eps for norm in norms(network)} == {2e-5}
    kernel = network.stages["transition_4"].convolution.plain.kernel.weight
    assert 0.9 < kernel.abs().max() / math.sqrt(2 / 45) <= 1


def test_exact_at_the_published_size():
    network = settled(GroupDenseNet.patch_camelyon(P4, width=1, attention="features"), 2, 3, 96, 96)
    assert equivariance_report(network.as_fields(), (1, 3, 96, 96), layers=False).relative_error < EXACT


@few_examples
@given(st.data())
def test_equivariant_for_any_group_size_and_attention(data):
    gspace = (spaces.PLANE | spaces.VOLUME)[
        data.draw(st.sampled_from(["trivial", "flip", "C3", "C4", "D4", "mirror"]))
    ]()
    attention = data.draw(st.sampled_from([None, "full", "channel", "spatial", "features", "poses"]))
    network = GroupDenseNet(
        gspace, 1, 3, width=1, blocks=2, attention=attention, **options_of(attention, attention_size=3)
    )
    shape = (1, *spaces.shape_of(gspace, data.draw(st.integers(10, 12))))
    network = settled(network, 2, *shape, spread=2)
    assert equivariance_report(network.as_fields(), (1, *shape), layers=False).relative_error < EXACT
    assert_exported(network, 2, *shape)


def test_the_report_has_nothing_to_say_at_any_size():
    network = settled(GroupDenseNet(P4, 1, 2, width=1, blocks=2), 3, 1, 12, 12)
    for size in (10, 11, 12, 13):
        report = equivariance_report(sequence(network), (1, 1, size, size))
        assert report.relative_error < EXACT
        assert not report.inexact_layers


def test_a_broken_kernel_is_found_out():
    network = settled(GroupDenseNet(P4, 1, 3, width=2, blocks=2), 4, 1, 12, 12)
    broken(network.stages["dense_2"], "kernel")
    assert equivariance_report(network.as_fields(), (1, 1, 12, 12), layers=False).relative_error > 1e-4


def test_the_logits_are_means():
    network = settled(GroupDenseNet(P4, 1, 3, width=1, blocks=1), 4, 1, 8, 8)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    before = network.stages["classes"][:-1](network.feature_maps(x)["dense_1"])
    torch.testing.assert_close(network(x), before.tensor.unflatten(1, (3, 4)).mean((2, 3, 4)))


def test_mistakes():
    with pytest.raises(ValueError, match="blocks: got 0, needed at least 1"):
        GroupDenseNet(P4, 3, 2, blocks=0)
    with pytest.raises(ValueError, match="width: got 0, needed at least 1"):
        GroupDenseNet(P4, 3, 2, width=0)
    with pytest.raises(ValueError, match="hidden: got 0, needed at least 1"):
        GroupDenseNet(P4, 3, 2, hidden=0)
    with pytest.raises(ValueError, match="attention: got 'x', needed None"):
        GroupDenseNet(P4, 3, 2, attention="x")
    with pytest.raises(ValueError, match="is smaller than the kernel"):
        GroupDenseNet(P4, 3, 2, width=1)(torch.randn(1, 3, 64, 64))
