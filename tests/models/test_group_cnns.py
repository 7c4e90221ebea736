"""The convolutional networks of the papers."""

import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import PointwiseDropout

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool, PoseAttention, equivariance_report
from escnn_attention.models import AllCNNC, GroupCNN, GroupDenseNet, ResidualBlock, ResNet44
from escnn_attention.models.convolutions import options_of
from escnn_attention.nn.summary import count_parameters
from tests import spaces
from tests.models.networks import broken, sequence, settled, sizes

EXACT = 1e-10
Z2, P4, P4M = gspaces.trivialOnR2(), gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
NETWORKS = [GroupCNN, AllCNNC, ResNet44, GroupDenseNet]
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
    number = count_parameters(GroupCNN.rotmnist(P4, width=width, attention=attention))
    assert published in (None, number)
    assert abs(number / 1e3 - float(paper[:-1])) < 0.0051  # the paper rounds 50.415 up


def test_the_default_width_keeps_the_number_of_parameters():
    widths = {}
    for name in ("trivial", "flip", "C4", "C8", "D4", "D6"):
        network = GroupCNN.rotmnist(spaces.PLANE[name]())
        widths[name] = len(network.stages["convolution_1"].out_type)
    assert widths == {"trivial": 20, "flip": 14, "C4": 10, "C8": 7, "D4": 7, "D6": 6}
    assert count_parameters(GroupCNN.rotmnist(gspaces.trivialOnR2())) == 21_620  # the published Z2-CNN


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (GroupCNN.rotmnist, (1, 28, 28), [26, 24, 12, 10, 8, 6, 4, 1]),
        (lambda g: AllCNNC.cifar10(g, width=1), (3, 32, 32), [32, 32, 16, 16, 16, 8, 8, 8, 8]),
        (lambda g: ResNet44(g, 3, 10, width=(1, 1, 1), blocks=2), (3, 32, 32), [32, 32, 32, 16, 16, 8, 8, 1]),
        (GroupDenseNet.patch_camelyon, (3, 96, 96), [94, 92, 46, 44, 22, 20, 10, 8, 4, 2, 2]),
    ],
)
def test_grids_are_the_published_ones(make, shape, expected):
    assert [shape[-1] for shape in sizes(make(P4), 1, *shape)] == expected


@pytest.mark.parametrize("attention", ["full", "features", "poses"])
def test_in_train_mode(attention):
    """With the statistics of the batch, which an element of the group does not change."""
    network = GroupCNN(P4, 2, 3, **SMALL | {"attention": attention, "dropout": 0.0}, **narrow(attention))
    network = network.double().train()
    x = spaces.random_field(network.in_type, 10, 10, batch=2)
    y = network(x)
    for g in P4.testing_elements:
        torch.testing.assert_close(network(x.transform(g)), y, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("make", "stage", "kind", "size"),
    [
        (lambda: GroupCNN(P4, 1, 3, **SMALL), "classes", "kernel", 10),
        (lambda: GroupCNN(P4, 1, 3, **SMALL, attention="full", attention_size=3), "classes", "squeeze", 10),
        (lambda: GroupCNN(P4, 1, 3, **SMALL, attention="full", attention_size=3), "classes", "spatial", 10),
        (lambda: GroupCNN(P4, 1, 3, **SMALL, attention="features", attention_size=3), "classes", "excite", 10),
        (lambda: AllCNNC(P4, 1, 3, width=2), "convolution_4", "kernel", 8),
        (lambda: AllCNNC(P4, 1, 3, width=2, attention="features"), "convolution_4", "squeeze", 8),
        (lambda: ResNet44(P4, 1, 3, width=(2, 2, 2), blocks=1), "residual_2_1", "kernel", 8),
        (lambda: GroupDenseNet(P4, 1, 3, width=2, blocks=2), "dense_2", "kernel", 12),
    ],
)
def test_a_broken_kernel_is_found_out(make, stage, kind, size):
    network = settled(make(), 4, 1, size, size, spread=20)
    assert equivariance_report(network.as_fields(), (1, 1, size, size), layers=False).relative_error < EXACT
    broken(network.stages[stage], kind)
    assert equivariance_report(network.as_fields(), (1, 1, size, size), layers=False).relative_error > 1e-5


def test_layers_are_as_published():
    network = GroupCNN.rotmnist(P4, attention="features")
    stages = network.stages
    assert [name for name, s in stages.items() if any(isinstance(m, PointwiseDropout) for m in s.modules())] == [
        f"convolution_{i}" for i in (1, 3, 4, 5, 6)
    ]
    assert isinstance(stages["pool"], HalvingPool)
    parts = ["attention", "convolution", "norm", "relu", "dropout"]
    assert [name for name, _ in stages["convolution_1"].named_children()] == parts


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
    stages = GroupCNN(P4, 1, 3, attention="full", image_dilation=2, attention_size=5, ratio=5).stages
    first, second = (stages[f"convolution_{i}"].convolution for i in (1, 2))
    assert (first.plain.geometry.attention_dilation, second.attention_size, second.ratio) == (2, 5, 5)
    poses = GroupCNN(P4, 1, 3, attention="poses", convolutions=(1, 0), last_kernel=3)
    assert len([m for m in poses.modules() if isinstance(m, PoseAttention)]) == 2
    assert [m.kernel_size for m in poses.modules() if isinstance(m, AttentiveConv)] == [3, 3]
    x = torch.randn(2, 1, 12, 12)
    network = GroupCNN(P4, 1, 3, **SMALL, dropout=0.5)
    assert not torch.allclose(network(x), network(x))
    network = GroupCNN(P4, 1, 3, **SMALL, dropout=0.0)
    torch.testing.assert_close(network(x), network(x))


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        *((network, {"attention": "x"}, "attention: got 'x', needed None or one of 'full'") for network in NETWORKS),
        (GroupCNN, {"width": 0}, "width: got 0, needed at least 1"),
        (GroupCNN, {"convolutions": (0, 4)}, "convolutions: got 0, needed at least 1"),
        (GroupCNN, {"convolutions": (2, -1)}, "convolutions: got -1, needed at least 0"),
        (GroupCNN, {"convolutions": (2, 2, 2)}, "convolutions: got 3 values, needed 2, in front of the pooling"),
        (GroupCNN, {"last_kernel": 0}, "last_kernel: got 0, needed at least 1"),
        (GroupCNN, {"attention": "channel", "ratio": 0}, "ratio: got 0, needed at least 1"),
        (GroupCNN, {"attention": "spatial", "attention_size": 4}, "attention_size: got 4, needed an odd number"),
        (GroupCNN, {"attention": "features", "attention_size": 4}, "attention_size: got 4, needed an odd number"),
        (GroupCNN, {"image_dilation": 0}, "image_dilation: got 0, needed at least 1"),
        (GroupCNN, {"image_dilation": 4}, "image_dilation: got 4, but attention=None has no spatial attention"),
        (GroupCNN, {"ratio": 5}, "ratio: got 5, but attention=None has no channel attention; leave it at 2"),
        (GroupCNN, {"attention": "spatial", "ratio": 5}, "ratio: got 5, but attention='spatial' has no channel"),
        (GroupCNN, {"attention": "poses", "attention_size": 5}, "attention_size: got 5, but attention='poses' has no"),
        (GroupCNN, {"dropout": 1.0}, "dropout: got 1.0, needed a probability"),
        (AllCNNC, {"input_dropout": 1}, "input_dropout: got 1"),
        (AllCNNC, {"width": 1, "dropout": 2.0}, r"dropout: got 2\.0"),
        (AllCNNC, {"width": -1}, "width: got -1"),
        (ResNet44, {"width": (16, 32)}, "width: got 2 values"),
        (ResNet44, {"hidden": 3}, r"hidden: got 3, .*channel attention"),
        (ResNet44, {"blocks": 0}, "blocks: got 0"),
        (ResNet44, {"hidden": 0}, "hidden: got 0"),
        (GroupDenseNet, {"blocks": 0}, "blocks: got 0"),
        (GroupDenseNet, {"width": 0}, "width: got 0"),
        (GroupDenseNet, {"hidden": 0}, "hidden: got 0"),
    ],
)
def test_mistakes(network, options, message):
    with pytest.raises(ValueError, match=message):
        network(P4, 1, 10, **options)


def test_arguments_of_another_type():
    with pytest.raises(TypeError, match=r"in_channels: got 1\.0"):
        GroupCNN(P4, 1.0, 10)
    with pytest.raises(TypeError, match="convolutions: got 3"):
        GroupCNN(P4, 1, 10, convolutions=3)
    with pytest.raises(TypeError, match="width: got 16"):
        ResNet44(P4, 3, 10, width=16)


@pytest.mark.parametrize(
    ("network", "channels", "size", "message"),
    [
        (GroupCNN.rotmnist, 1, 20, r"2×2 .*smaller than the kernel"),
        (lambda gspace: AllCNNC(gspace, 3, 10, width=1), 3, 3, "1×1 cannot be halved"),
        (lambda gspace: GroupDenseNet(gspace, 3, 2, width=1), 3, 64, "smaller than the kernel"),
    ],
)
def test_images_that_are_too_small_are_refused(network, channels, size, message):
    with pytest.raises(ValueError, match=message):
        network(P4)(torch.randn(1, channels, size, size))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("make", "gspace", "attention", "published", "paper"),
    [
        (AllCNNC.cifar10, Z2, None, 1_370_996, None),
        (AllCNNC.cifar10, P4, None, 1_370_372, "1.37M"),
        (AllCNNC.cifar10, P4, "features", 1_400_120, "1.40M"),
        (AllCNNC.cifar10, P4M, None, 1_219_252, "1.22M"),
        (AllCNNC.cifar10, P4M, "features", 1_249_192, "1.25M"),
        (ResNet44.cifar10, Z2, None, 2_636_064, None),
        (ResNet44.cifar10, P4M, None, 2_621_683, "2.62M"),
        (ResNet44.cifar10, P4M, "features", 2_693_911, "2.70M"),  # rounded up
        (GroupDenseNet.patch_camelyon, Z2, None, 130_598, "130.60K"),
        (GroupDenseNet.patch_camelyon, P4, None, 129_649, "129.65K"),
        (GroupDenseNet.patch_camelyon, P4, "features", 140_453, "140.45K"),
        (GroupDenseNet.patch_camelyon, P4M, None, 124_209, "124.21K"),
        (GroupDenseNet.patch_camelyon, P4M, "features", 141_221, "141.22K"),
    ],
)
def test_parameters_are_those_of_tables_2_and_3(make, gspace, attention, published, paper):
    assert count_parameters(make(gspace, attention=attention)) == published
    rounded = {f"{published / 1e6:.2f}M", f"{published / 1e6 + 0.005:.2f}M", f"{published / 1e3:.2f}K"}
    assert paper is None or paper in rounded


@pytest.mark.slow
def test_the_report_names_the_strides_of_the_original():
    network = settled(AllCNNC(P4, 1, 3, width=1), 4, 1, 8, 8)
    for i in (3, 6):
        stage = network.stages[f"convolution_{i}"]
        stage.convolution.plain.geometry = stage.convolution.plain.geometry._replace(stride=2)
        stage.pool = torch.nn.Identity()
    report = equivariance_report(sequence(network), (1, 1, 8, 8))
    assert report.inexact_layers == (
        "convolution_3.convolution (AttentiveConv)",
        "convolution_6.convolution (AttentiveConv)",
    )
    assert report.exact_sizes["convolution_3.convolution (AttentiveConv)"] == ((7, 7), (9, 9))


def test_layers_are_as_published_of_all_cnn_c():
    network = AllCNNC.cifar10(P4, attention="features", width=48)
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3, 3, 3, 3, 6, 6, 6, 6, 6]
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


@pytest.mark.slow
def test_layers_are_as_published_of_resnet44():
    network = ResNet44.cifar10(P4M, attention="features")
    convolutions = [m for m in network.modules() if isinstance(m, AttentiveConv)]
    assert len(convolutions) == 44 + 2  # two shortcuts
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    assert len(attentions) == len(convolutions)
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3] + 45 * [2]
    halving = [n for n, m in network.stages.items() if isinstance(m, ResidualBlock) and m.halve]
    assert halving == ["residual_2_1", "residual_3_1"]
    kernel = network.stages["residual_1_2"].branch.convolution.plain.kernel.weight
    assert 0.9 < kernel.abs().max() / math.sqrt(2 / (11 * 9)) <= 1


def test_layers_are_as_published_of_dense_net():
    network = GroupDenseNet.patch_camelyon(P4M, attention="features")
    attentions = [m for m in network.modules() if isinstance(m, FeatureAttention)]
    kernels = [*5 * [(7, 4)], (7, 3), (7, 3), (7, 2), (7, 1), (5, 1), (3, 1)]  # the first on the image
    assert [(m.kernel_size, m.plain.dilation) for m in attentions] == kernels
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3] + 10 * [2]
    kernel = network.stages["transition_4"].convolution.plain.kernel.weight
    assert 0.9 < kernel.abs().max() / math.sqrt(2 / 45) <= 1
