import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import PointwiseDropout
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool, PoseAttention, equivariance_report
from escnn_attention.models import GroupCNN
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, check_trains, count, few_examples, norms, sequence, settled

EXACT = 1e-10
P4 = gspaces.rot2dOnR2(4)
KINDS = [None, "full", "channel", "spatial", "features", "poses"]
# Columns: width, attention, parameters of the published implementation (None where it has no such network), Table 1.
TABLE_1 = [
    (10, None, 24_610, "24.61K"),
    (10, "poses", 24_851, "24.85K"),
    (19, None, None, "77.54K"),
    (10, "full", 73_130, "73.13K"),
    (15, None, None, "50.42K"),
    (10, "channel", 48_630, "48.63K"),
    (10, "spatial", 49_110, "49.11K"),
    (11, None, None, "29.05K"),
    (10, "features", 29_462, "29.46K"),
]
SMALL = {"width": 2, "convolutions": (1, 1), "last_kernel": 2}


def narrow(attention):
    """Small kernels of spatial attention, where there is any."""
    return options_of(attention, attention_size=3)


@pytest.mark.parametrize(("width", "attention", "published", "paper"), TABLE_1)
def test_parameters_are_those_of_table_1(width, attention, published, paper):
    number = count(GroupCNN.rotmnist(P4, width=width, attention=attention))
    assert published in (None, number)
    assert abs(number / 1e3 - float(paper[:-1])) < 0.0051  # the paper rounds 50.415 up


@pytest.mark.sampled
@pytest.mark.parametrize("order", [1, 2, 4, 8])
@pytest.mark.parametrize("attention", KINDS)
def test_parameters_of_any_group(order, attention):
    """Counted by hand: the groups that keep the square have every kernel."""
    gspace = {1: gspaces.trivialOnR2(), 2: gspaces.flip2dOnR2(), 4: P4, 8: gspaces.flipRot2dOnR2(4)}[order]
    w, hidden, classes = 6, 3, 5
    pairs = [(1, w, 9, 1), *5 * [(w, w, 9, order)], (w, classes, 16, order)]  # fields in and out, places, poses
    expected = 6 * 2 * w
    for i, (ins, outs, places, poses) in enumerate(pairs):
        middle = 1 if i == 0 else hidden
        expected += ins * outs * places * poses
        if attention in ("full", "channel"):
            expected += 2 * outs * ins * middle * poses
        if attention in ("full", "spatial"):
            expected += outs * 2 * 49 * poses
        if attention == "features":
            expected += 2 * ins * middle * poses + 2 * 49 * poses
        if attention == "poses":
            expected += ins * poses
    assert count(GroupCNN(gspace, 1, classes, width=w, attention=attention)) == expected


def test_the_default_width_keeps_the_number_of_parameters():
    widths = {}
    for name in ("trivial", "flip", "C4", "C8", "D4", "D6"):
        network = GroupCNN.rotmnist(spaces.PLANE[name]())
        widths[name] = len(network.stages["convolution_1"].out_type)
    assert widths == {"trivial": 20, "flip": 14, "C4": 10, "C8": 7, "D4": 7, "D6": 6}
    assert count(GroupCNN.rotmnist(gspaces.trivialOnR2())) == 21_620  # the published Z2-CNN


def test_grids_are_the_published_ones():
    network = GroupCNN.rotmnist(P4)
    current, seen = (1, 1, 28, 28), []
    for stage in network.stages.values():
        current = stage.evaluate_output_shape(current)
        seen.append(current[-1])
    assert seen == [26, 24, 12, 10, 8, 6, 4, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attention", KINDS)
def test_equivariant_and_exported(attention):
    network = settled(GroupCNN.rotmnist(P4, width=1, attention=attention), 2, 1, 28, 28, spread=3)
    assert equivariance_report(network.as_fields(), (1, 1, 28, 28), layers=False).relative_error < EXACT
    assert_exported(network, 3, 1, 28, 28)
    x = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(network(network.in_type(x)), network(x))


@pytest.mark.parametrize("attention", ["full", "features", "poses"])
def test_in_train_mode(attention):
    """With the statistics of the batch, which an element of the group does not change."""
    network = GroupCNN(P4, 2, 3, **SMALL | {"attention": attention, "dropout": 0.0}, **narrow(attention))
    network = network.double().train()
    x = spaces.random_field(network.in_type, 10, 10, batch=2)
    y = network(x)
    for g in P4.testing_elements:
        torch.testing.assert_close(network(x.transform(g)), y, atol=1e-12, rtol=1e-10)


@few_examples
@given(st.data())
def test_equivariant_for_any_group_size_and_attention(data):
    flat = data.draw(st.booleans())
    names = ["trivial", "flip", "C2", "C3", "C4", "C8", "D4"] if flat else ["trivial 3D", "mirror", "C4 3D"]
    gspace = (spaces.PLANE | spaces.VOLUME)[data.draw(st.sampled_from(names))]()
    options = {"attention": data.draw(st.sampled_from(KINDS)), "convolutions": (data.draw(st.integers(1, 2)), 1)}
    options |= {"width": data.draw(st.integers(1, 3)), "dropout": 0.1}
    options |= {"last_kernel": data.draw(st.integers(1, 2)) if flat else 1}
    options |= options_of(options["attention"], ratio=data.draw(st.integers(1, 3)), attention_size=3)
    if not all(abs(m).round(6).max() == 1 for m in map(gspace.basespace_action, gspace.fibergroup.elements)):
        options["last_kernel"] = 1  # escnn has no 2×2 kernels for the others
    size = data.draw(st.integers(12 if options["last_kernel"] == 2 else 10, 13 if flat else 11))
    network = GroupCNN(gspace, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), **options)
    shape = (network.in_type.size, *spaces.shape_of(gspace, size))
    network = settled(network, 2, *shape)
    assert equivariance_report(network.as_fields(), (1, *shape), layers=False).relative_error < EXACT
    assert_exported(network, 2, *shape)


@pytest.mark.parametrize(
    ("attention", "kind"), [(None, "kernel"), ("full", "squeeze"), ("full", "spatial"), ("features", "excite")]
)
def test_a_broken_kernel_is_found_out(attention, kind):
    network = settled(GroupCNN(P4, 1, 3, **SMALL, attention=attention, **narrow(attention)), 2, 1, 10, 10, spread=3)
    assert equivariance_report(network.as_fields(), (1, 1, 10, 10), layers=False).relative_error < EXACT
    network.stages["classes"] = broken(network.stages["classes"], kind)
    assert equivariance_report(network.as_fields(), (1, 1, 10, 10), layers=False).relative_error > 1e-4


def test_the_report_names_a_stride_that_does_not_fit():
    """At every size the network has the exact alternative, where a strided convolution is named."""
    network = settled(GroupCNN(P4, 1, 3, **SMALL), 2, 1, 12, 12)
    for size in (12, 13):
        report = equivariance_report(sequence(network), (1, 1, size, size))
        assert report.relative_error < EXACT
        assert not report.inexact_layers
    fields = network.stages["pool"].in_type
    network.stages["pool"] = AttentiveConv(fields, fields, 3, channel=False, spatial=False, stride=2)
    report = equivariance_report(sequence(network), (1, 1, 12, 12))
    assert report.inexact_layers == ("pool (AttentiveConv)",)
    assert report.exact_sizes == {"pool (AttentiveConv)": ((9, 9), (11, 11))}
    assert equivariance_report(sequence(network), (1, 1, 13, 13)).relative_error < EXACT


def test_layers_are_as_published():
    network = GroupCNN.rotmnist(P4, attention="features")
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert [m.plain.dilation for m in attentions] == [4, 1, 1, 1, 1, 1, 1]
    assert [m.ratio for m in attentions] == [1, 2, 2, 2, 2, 2, 2]
    assert {norm.eps for norm in norms(network)} == {2e-5}
    stages = network.stages
    assert [name for name, s in stages.items() if any(isinstance(m, PointwiseDropout) for m in s.modules())] == [
        f"convolution_{i}" for i in (1, 3, 4, 5, 6)
    ]
    assert isinstance(stages["pool"], HalvingPool)
    assert [name for name, _ in stages["convolution_1"].named_children()] == [
        "attention",
        "convolution",
        "norm",
        "relu",
        "dropout",
    ]
    dilations = [
        m.plain.attention_dilation
        for m in GroupCNN.rotmnist(P4, attention="full").modules()
        if isinstance(m, AttentiveConv)
    ]
    assert dilations == 7 * [1]


@pytest.mark.parametrize("attention", KINDS)
def test_initialisation_is_the_published_one(attention):
    torch.manual_seed(0)
    network = GroupCNN.rotmnist(P4, attention=attention)
    stage = network.stages["convolution_3"]
    plain = stage.convolution.plain

    def check(kernel, bound):
        weight = kernel.weight
        assert 0.9 * bound < weight.abs().max() <= bound
        assert math.isclose(weight.std().item(), bound / math.sqrt(3), rel_tol=0.2)

    check(plain.kernel, 1 / math.sqrt(10 * 9))
    if attention in ("full", "channel"):
        check(plain.squeeze, 1 / math.sqrt(5 * 10 * 4))
        check(plain.excite, 1 / math.sqrt(10 * 5 * 4))
    if attention in ("full", "spatial"):
        check(plain.spatial, 1 / math.sqrt(2 * 49))
    if attention == "features":
        check(stage.attention.plain.squeeze, 1 / math.sqrt(10 * 4))
        check(stage.attention.plain.excite, 1 / math.sqrt(5 * 4))
        check(stage.attention.plain.spatial, 1 / math.sqrt(2 * 49))
    if attention == "poses":
        check(stage.attention.plain.weight, 1 / math.sqrt(10))
    network.reset_parameters(2.0)
    check(plain.kernel, 2 / math.sqrt(10 * 9))


def test_a_band_limited_kernel_starts_as_large():
    torch.manual_seed(0)
    network = GroupCNN(gspaces.rot2dOnR2(8), 1, 10, width=20)
    kernel = network.stages["convolution_3"].convolution.plain.kernel
    assert kernel.basis is not None
    assert math.isclose(kernel().square().mean().item(), 1 / (3 * 20 * 9), rel_tol=0.1)


def test_options_reach_the_layers():
    network = GroupCNN(P4, 1, 3, attention="features", image_dilation=2, attention_size=5, ratio=5, dropout=0.2)
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert [m.plain.dilation for m in attentions][:2] == [2, 1]
    assert {m.kernel_size for m in attentions} == {5}
    assert len(attentions[1].plain.squeeze.weight) == 2
    dropouts = [m for m in network.modules() if isinstance(m, PointwiseDropout)]
    assert {m.p for m in dropouts} == {0.2}
    assert len(dropouts) == 5
    poses = GroupCNN(P4, 1, 3, attention="poses", convolutions=(1, 0), last_kernel=3)
    assert len([m for m in poses.modules() if isinstance(m, PoseAttention)]) == 2
    assert [m.kernel_size for m in poses.modules() if isinstance(m, AttentiveConv)] == [3, 3]
    x = torch.randn(2, 1, 12, 12)
    network = GroupCNN(P4, 1, 3, **SMALL, dropout=0.5)
    assert not torch.allclose(network(x), network(x))
    network = GroupCNN(P4, 1, 3, **SMALL, dropout=0.0)
    torch.testing.assert_close(network(x), network(x))


def test_trains():
    torch.manual_seed(0)
    network = GroupCNN(P4, 1, 2, **SMALL, attention="full", attention_size=3, dropout=0.0)
    check_trains(network, 10, lr=2e-2)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "features and poses"}, "attention: got 'features and poses', needed None or one of 'full'"),
        ({"width": 0}, "width: got 0, needed at least 1"),
        ({"convolutions": (0, 4)}, "convolutions: got 0, needed at least 1"),
        ({"convolutions": (2, -1)}, "convolutions: got -1, needed at least 0"),
        ({"convolutions": (2, 2, 2)}, "convolutions: got 3 values, needed 2, in front of the pooling and behind"),
        ({"last_kernel": 0}, "last_kernel: got 0, needed at least 1"),
        ({"attention": "channel", "ratio": 0}, "ratio: got 0, needed at least 1"),
        ({"attention": "spatial", "attention_size": 4}, "attention_size: got 4, needed an odd number"),
        ({"attention": "features", "attention_size": 4}, "attention_size: got 4, needed an odd number"),
        ({"image_dilation": 0}, "image_dilation: got 0, needed at least 1"),
        ({"image_dilation": 4}, "image_dilation: got 4, but attention=None has no spatial attention; leave it at None"),
        ({"ratio": 5}, "ratio: got 5, but attention=None has no channel attention; leave it at 2"),
        ({"attention": "spatial", "ratio": 5}, "ratio: got 5, but attention='spatial' has no channel attention"),
        ({"attention": "poses", "attention_size": 5}, "attention_size: got 5, but attention='poses' has no spatial"),
        ({"dropout": 1.0}, "dropout: got 1.0, needed a probability"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        GroupCNN(P4, 1, 10, **options)
    with pytest.raises(TypeError, match=r"in_channels: got 1\.0, needed an integer"):
        GroupCNN(P4, 1.0, 10)
    with pytest.raises(TypeError, match="convolutions: got 3, needed a list or a tuple, in front of the pooling"):
        GroupCNN(P4, 1, 10, convolutions=3)


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="a grid of 2×2 with padding 0 is smaller than the kernel"):
        GroupCNN.rotmnist(P4)(torch.randn(1, 1, 20, 20))
