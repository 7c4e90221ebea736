"""Group convolutions with attention, and blocks of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.group import cyclic_group
from escnn.nn import FieldType, IdentityModule, InnerBatchNorm

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool
from escnn_attention.models import (
    AllCNNC,
    DenseBlock,
    FieldUNet,
    GroupCNN,
    GroupDenseNet,
    GSANet,
    HybridNet,
    ResidualBlock,
    ResNet44,
)
from escnn_attention.models.convolutions import BatchNorm, attended, draw_as_published, image_type, sequence, width_for
from tests import spaces
from tests.models.networks import settled

P4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(P4, 4)


@pytest.mark.sampled(1, of="compiled graphs")
@pytest.mark.parametrize("network", [HybridNet, FieldUNet])
@pytest.mark.parametrize("training", [True, False])
def test_networks_with_convolutions_of_escnn_compile_to_one_graph(network, training):
    outline = {"widths": (1, 1), "convolutions": (1, 1), "attention": (0, 1), "num_heads": 1}
    net = network(P4, 1, 1, **outline).double().train(training)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    x = x if network is HybridNet else net.in_type(x)
    before = {name: t.clone() for name, t in net.state_dict().items()}

    def results():
        net.load_state_dict(before)
        with torch.set_grad_enabled(training):
            y = net(x) if network is HybridNet else net(x).tensor
        return [y, *(torch.autograd.grad(y.square().sum(), list(net.parameters())) if training else ())]

    expected = results()
    torch.compiler.reset()
    net.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(results(), expected)
    with pytest.raises(Exception, match="data-dependent"):  # slices of escnn's own norm
        torch.compile(InnerBatchNorm(FIELDS), backend="eager", fullgraph=True)(
            FIELDS(torch.randn(2, FIELDS.size, 3, 3))
        )


def test_batch_norm_is_that_of_escnn():
    """Of fields of one size, of several, and where those of a size lie apart."""
    trivial, regular = P4.trivial_repr, P4.regular_repr
    for representations in ([regular, regular], [trivial, regular, regular], [regular, trivial, regular]):
        fields = FieldType(P4, representations)
        ours, theirs = BatchNorm(fields), InnerBatchNorm(fields)
        theirs.load_state_dict(ours.state_dict())
        x = fields(torch.randn(3, fields.size, 4, 4))
        for _ in range(2):
            assert torch.equal(ours(x).tensor, theirs(x).tensor)
            ours.eval(), theirs.eval()
        assert ours(fields(x.tensor[:0])).tensor.shape == (0, fields.size, 4, 4)


def test_image_type():
    assert image_type(P4, 3) == spaces.scalars(P4, 3)
    with pytest.raises(ValueError, match="in_channels: got 0"):
        image_type(P4, 0)


@pytest.mark.parametrize(
    "make",
    [GroupCNN, AllCNNC, ResNet44, GroupDenseNet, lambda *a: GSANet(*a, channels=6, blocks=(1,)), HybridNet, FieldUNet],
)
def test_networks_name_a_wrong_gspace(make):
    for gspace, error, message in (
        ("p4", TypeError, "gspace: got str"),
        (gspaces.no_base_space(cyclic_group(4)), ValueError, "gspace: .*grid of .*got C4"),
        (gspaces.rot2dOnR2(-1), NotImplementedError, r"gspace: .*finite .*got SO\(2\)"),
    ):
        with pytest.raises(error, match=message):
            make(gspace, 3, 10)


def test_no_default_width_is_0():
    assert width_for(gspaces.octaOnR3(), None, 2) == 1


def test_the_gain_scales_kernels_and_not_the_layers_of_channel_attention():
    torch.manual_seed(0)
    module = sequence(attended(FIELDS, FIELDS, 3, "features"))
    draw_as_published(module, 0.01)
    attention, convolution = (m.plain for m in module)
    assert convolution.kernel.weight.abs().max() <= 0.01 / math.sqrt(4 * 9)
    assert attention.spatial.weight.abs().max() <= 0.01 / math.sqrt(2 * 49)
    assert 0.5 / math.sqrt(16) < attention.squeeze.weight.abs().max() <= 1 / math.sqrt(16)


@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("wider", [False, True])
def test_is_the_formula(halve, wider):
    in_type = spaces.regular(P4, 2)
    block = settled(ResidualBlock(in_type, spaces.regular(P4, 3) if wider else in_type, halve=halve), 4, 8, 6, 6)
    x = spaces.random_field(in_type, 6, 6)

    def pooled(y):
        return F.max_pool2d(y, 2) if halve else y

    def convolve(name, y, padding=1):
        kernel = block.get_submodule(name).plain.kernel()
        return F.conv2d(y, kernel.flatten(0, 1).flatten(1, 2), padding=padding)

    def normed(name, y):
        (norm,) = block.branch.get_submodule(name).children()
        f = y.unflatten(1, (-1, 4))
        return norm(f).relu().flatten(1, 2)

    y = pooled(convolve("branch.convolution", normed("norm", x.tensor)))
    y = convolve("branch.convolution_2", normed("norm_2", y))
    if halve or wider:
        expected = y + pooled(convolve("shortcut.convolution", x.tensor, 0))
    else:
        assert isinstance(block.shortcut, IdentityModule)
        expected = y + x.tensor
    torch.testing.assert_close(block(x).tensor, expected)
    assert block.evaluate_output_shape(tuple(x.shape)) == tuple(expected.shape)


@pytest.mark.parametrize("attention", [None, "full", "features"])
def test_a_block_on_a_torus(attention):
    """Exact under rolls; halved, under rolls by twice as many."""
    fields = spaces.regular(P4, 2)
    for halve in (False, True):
        for mode in ("circular", "zeros"):
            options = {} if attention is None else {"attention_size": 3}
            block = ResidualBlock(fields, fields, halve=halve, attention=attention, padding_mode=mode, **options)
            block = settled(block, 4, 8, 6, 6)
            x = spaces.random_field(fields, 6, 6)
            rolled = block(fields(x.tensor.roll((4, 2), (2, 3)))).tensor
            error = (rolled - block(x).tensor.roll((2, 1) if halve else (4, 2), (2, 3))).abs().max()
            assert error < 1e-12 if mode == "circular" else error > 1e-4
    with pytest.raises(ValueError, match=r"input: got a torus .* even"):
        ResidualBlock(fields, fields, halve=True, padding_mode="circular").double()(spaces.random_field(fields, 5, 6))


def test_all_convolutions_attend():
    block = ResidualBlock(spaces.regular(P4, 6), spaces.regular(P4, 9), halve=True, attention="features", hidden=3)
    attentions = [m for m in block.modules() if isinstance(m, FeatureAttention)]
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3, 3, 3]
    assert [m.kernel_size for m in attentions] == [7, 7, 7]
    assert [m.kernel_size for m in block.modules() if isinstance(m, AttentiveConv)] == [3, 3, 1]
    assert len([m for m in block.modules() if isinstance(m, HalvingPool)]) == 2
    assert "halve=True" in repr(block)


def test_mistakes():
    fields = spaces.regular(P4, 2)
    for arguments, options, message in (
        ((spaces.scalars(P4, 2), fields), {}, "in_type: .*regular .*got also irrep_0"),
        ((fields, FieldType(P4, [P4.irrep(1)])), {}, "out_type: .*regular .*got also irrep_1"),
        ((fields, spaces.regular(gspaces.rot2dOnR2(2), 2)), {}, "out_type: its gspace"),
        ((fields, fields, 4), {}, "kernel_size: got 4"),
        ((fields, fields), {"attention": "features", "hidden": 0}, "hidden: got 0"),
        ((fields, fields), {"attention": "x"}, "attention: got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            ResidualBlock(*arguments, **options)
    for block in (ResidualBlock(fields, fields), DenseBlock(fields, 1)):
        with pytest.raises(TypeError, match=rf"input: {type(block).__name__} got Tensor"):
            block(torch.zeros(1, 8, 5, 5))


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_is_the_formula_of_dense(kernel_size):
    block = settled(DenseBlock(spaces.regular(P4, 2), 3, kernel_size), 4, 8, 7, 7)
    x = spaces.random_field(block.in_type, 7, 7)
    (norm,) = block.branch.norm.children()
    kernel = block.branch.convolution.plain.kernel()
    y = F.conv2d(norm(x.tensor.unflatten(1, (2, 4))).relu().flatten(1, 2), kernel.flatten(0, 1).flatten(1, 2))
    margin = kernel_size // 2
    expected = torch.cat([y, x.tensor[..., margin : 7 - margin, margin : 7 - margin]], 1)
    got = block(x)
    torch.testing.assert_close(got.tensor, expected)
    assert len(got.type) == 5
    assert block.evaluate_output_shape(tuple(x.shape)) == tuple(expected.shape)


def test_options_reach_the_attention():
    block = DenseBlock(spaces.regular(P4, 9), 2, attention="features", hidden=3, attention_size=5, attention_dilation=4)
    (attention,) = [m for m in block.modules() if isinstance(m, FeatureAttention)]
    assert (attention.kernel_size, attention.plain.dilation, len(attention.plain.squeeze.weight)) == (5, 4, 3)


def test_mistakes_of_dense():
    fields = spaces.regular(P4, 2)
    for arguments, message in (
        ((spaces.scalars(P4, 2), 2), "in_type: .*regular .*got also irrep_0"),
        ((fields, 0), "growth: got 0"),
        ((fields, 1, 2), "kernel_size: got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            DenseBlock(*arguments)
    with pytest.raises(ValueError, match="smaller than the kernel"):
        DenseBlock(fields, 1)(spaces.random_field(fields, 2, 2, dtype=torch.float32))
