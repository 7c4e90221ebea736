import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import PointwiseDropout
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool, equivariance_report
from escnn_attention.models import AllCNNC
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, count, few_examples, norms, sequence, settled

EXACT = 1e-10
Z2, P4, P4M = gspaces.trivialOnR2(), gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


@pytest.mark.parametrize(
    ("gspace", "attention", "published", "paper"),
    [
        (Z2, None, 1_370_996, None),
        (P4, None, 1_370_372, "1.37M"),
        (P4, "features", 1_400_120, "1.40M"),
        (P4M, None, 1_219_252, "1.22M"),
        (P4M, "features", 1_249_192, "1.25M"),
    ],
    ids=["Z2", "p4", "f p4", "p4m", "f p4m"],
)
def test_parameters_are_those_of_table_2(gspace, attention, published, paper):
    assert count(AllCNNC.cifar10(gspace, attention=attention)) == published
    assert paper in (None, f"{published / 1e6:.2f}M")


def test_grids_are_the_published_ones():
    network = AllCNNC.cifar10(P4, width=1)
    current, seen = (1, 3, 32, 32), []
    for stage in network.stages.values():
        current = stage.evaluate_output_shape(current)
        seen.append(current[-1])
    assert seen == [32, 32, 16, 16, 16, 8, 8, 8, 8]
    assert [m.kernel_size for m in network.modules() if isinstance(m, AttentiveConv)] == [3] * 7 + [1, 1]
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@few_examples
@given(st.data())
def test_equivariant_for_any_group_size_and_attention(data):
    names = ["trivial", "flip", "C2", "C3", "C4", "C8", "D4", "mirror"]
    gspace = (spaces.PLANE | spaces.VOLUME)[data.draw(st.sampled_from(names))]()
    attention = data.draw(st.sampled_from([None, "full", "channel", "spatial", "features", "poses"]))
    options = options_of(attention, attention_size=3, ratio=data.draw(st.integers(1, 16)))
    network = AllCNNC(gspace, 2, 3, width=1, attention=attention, **options)
    shape = (2, *spaces.shape_of(gspace, data.draw(st.integers(4, 7))))
    network = settled(network, 2, *shape, spread=20)
    assert equivariance_report(network.as_fields(), (1, *shape), layers=False).relative_error < EXACT
    assert_exported(network, 2, *shape)


def test_the_logits_are_means():
    network = settled(AllCNNC(P4, 1, 3, width=2), 4, 1, 8, 8)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    *_, last = network.stages["classes"]
    before = network.stages["classes"][:-1](network.feature_maps(x)["convolution_8"])
    assert type(last).__name__ == "PoseMean"
    torch.testing.assert_close(network(x), before.tensor.unflatten(1, (3, 4)).mean((2, 3, 4)))


@pytest.mark.parametrize(("attention", "kind"), [(None, "kernel"), ("features", "squeeze")])
def test_a_broken_kernel_is_found_out(attention, kind):
    network = settled(AllCNNC(P4, 1, 3, width=2, attention=attention), 4, 1, 8, 8, spread=20)
    broken(network.stages["convolution_4"], kind)
    assert equivariance_report(network.as_fields(), (1, 1, 8, 8), layers=False).relative_error > 1e-5


def test_the_report_names_the_strides_of_the_original():
    network = settled(AllCNNC(P4, 1, 3, width=1), 4, 1, 8, 8)
    for size in (8, 9):
        assert not equivariance_report(sequence(network), (1, 1, size, size)).inexact_layers
    for i in (3, 6):
        stage = network.stages[f"convolution_{i}"]
        stage.convolution.plain.stride = 2
        stage.pool = torch.nn.Identity()
    report = equivariance_report(sequence(network), (1, 1, 8, 8))
    assert report.inexact_layers == (
        "convolution_3.convolution (AttentiveConv)",
        "convolution_6.convolution (AttentiveConv)",
    )
    assert report.exact_sizes["convolution_3.convolution (AttentiveConv)"] == ((7, 7), (9, 9))


def test_layers_are_as_published():
    network = AllCNNC.cifar10(P4, attention="features", width=48)
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3, 3, 3, 3, 6, 6, 6, 6, 6]
    assert {m.plain.dilation for m in attentions} == {1}
    assert {norm.eps for norm in norms(network)} == {2e-5}
    assert len(norms(network)) == 9
    dropouts = {n: m.p for n, m in network.named_modules() if isinstance(m, PointwiseDropout)}
    assert dropouts == {
        "stages.convolution_1.input_dropout": 0.2,
        "stages.convolution_3.dropout": 0.5,
        "stages.convolution_6.dropout": 0.5,
    }
    assert next(iter(network.stages["convolution_1"])).p == 0.2
    order = [type(m) for m in network.stages["convolution_3"]]
    assert order.index(AttentiveConv) + 1 == order.index(HalvingPool)
    kernel = network.stages["convolution_2"].convolution.plain.kernel.weight
    assert 0.9 < kernel.abs().max() / (0.035 / math.sqrt(48 * 9)) <= 1


def test_mistakes():
    with pytest.raises(ValueError, match="input_dropout: got 1, needed a probability"):
        AllCNNC(P4, 3, 10, input_dropout=1)
    with pytest.raises(ValueError, match=r"dropout: got 2\.0, needed a probability"):
        AllCNNC(P4, 3, 10, width=1, dropout=2.0)
    with pytest.raises(ValueError, match="width: got -1, needed at least 1"):
        AllCNNC(P4, 3, 10, width=-1)
    with pytest.raises(ValueError, match="attention: got 'x', needed None"):
        AllCNNC(P4, 3, 10, attention="x")
    with pytest.raises(ValueError, match="a grid of 1×1 cannot be halved"):
        AllCNNC(P4, 3, 10, width=1)(torch.randn(1, 3, 3, 3))
