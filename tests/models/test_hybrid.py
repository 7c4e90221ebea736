"""Hybrid networks, and convolutional ones of the same outline."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import R2Conv

from escnn_attention import (
    GroupSelfAttention,
    HalvingPool,
    LiftingSelfAttention,
    TransformerBlock,
    equivariance_report,
)
from escnn_attention.geometry.windows import Window
from escnn_attention.models import CNN, HybridNet
from escnn_attention.plain.resample import AntialiasedPool as PlainAntialiasedPool

C4 = gspaces.rot2dOnR2(4)
SMALL = {"widths": (3, 4, 4), "convolutions": (1, 1, 0), "attention": (0, 1, 2), "stem": 3, "num_heads": 2}


def layers(network, kind):
    return [m for m in network.modules() if isinstance(m, kind)]


def test_stages_are_as_asked_for():
    block = {"window": "disc", "query": "all", "encoding": "fourier", "norm": "gsa"}
    network = HybridNet(C4, 2, 5, **SMALL, kernel_size=5, block=block)
    stages = "convolution_1_1 pool_1 convolution_2_1 attention_2_1 pool_2 attention_3_1 attention_3_2 norm"
    assert list(network.stages) == stages.split()
    assert [len(c.out_type) for c in layers(network, R2Conv) if c.kernel_size == 3] == [3, 4]
    blocks = layers(network, TransformerBlock)
    assert [(len(b.in_type), len(b.out_type)) for b in blocks] == [(4, 4)] * 3
    for layer in layers(network, GroupSelfAttention):
        assert layer.plain.window == Window(5, "disc")
        assert layer.plain.query == "all"
        assert type(layer.plain.encoding).__name__ == "FourierEncoding"
    assert {b.norm for b in blocks} == {"gsa"}


@pytest.mark.slow
def test_blocks_see_their_own_pose_by_default():
    def attention(**options):
        network = HybridNet(C4, 1, 5, **{**SMALL, **options})
        lifting = [layer.plain for layer in layers(network, LiftingSelfAttention)]
        blocks = [m.plain for m in layers(network, GroupSelfAttention) if m.plain not in lifting]
        return blocks, lifting, equivariance_report(network.as_fields(), (1, 1, 8, 8), layers=False).relative_error

    for options, encoding, window in (
        ({}, "ConvolutionalEncoding", 5),
        ({"kernel_size": None}, "RotaryEncoding", None),
        ({"kernel_size": None, "block": {"padding_mode": "circular"}, "convolutions": (1, 0, 0)}, "MLPEncoding", None),
    ):
        blocks, _, error = attention(**options)
        assert error < 1e-10
        for plain in blocks:
            found = type(plain.encoding).__name__, plain.window.kernel_size, plain.keys, plain.channels
            assert found == (encoding, window, "own", 2)
    _, (lifting,), _ = attention(stem={"num_heads": 2, "kernel_size": None})
    assert type(lifting.encoding).__name__ == "MLPEncoding"  # of the layer, not of the blocks


@pytest.mark.parametrize("options", [{}, {"antialiased": True}, {"stem": {"num_heads": 2, "kernel_size": 3}}], ids=str)
def test_a_network_of_tori(options):
    """Its logits do not change with rolls by as many positions as become one; those of a network with ends do."""
    for mode in ("circular", "none"):
        block = {"padding_mode": mode, "encoding": "mlp"}
        network = HybridNet(C4, 1, 5, **{**SMALL, "kernel_size": 3, **options}, block=block).double().eval()
        x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
        error = (network(x.roll((4, 8), (2, 3))) - network(x)).abs().max()
        assert error < 1e-12 if mode == "circular" else error > 1e-6
    torus = HybridNet(C4, 1, 5, **{**SMALL, **options}, kernel_size=3, block={"padding_mode": "circular"})
    report = equivariance_report(torus.as_fields(), (1, 1, 12, 12), layers=False)
    assert list(report.rolls) == ["roll by 4 along axis 0", "roll by 4 along axis 1"]
    assert max(report.relative_error, *report.rolls.values()) < 1e-10
    with pytest.raises(ValueError, match="input: got a torus of 5×6, needed even"):
        torus(torch.randn(1, 1, 10, 12))


def test_antialiasing_adds_no_parameters_and_weights_fit_both():
    plain, antialiased = (HybridNet(C4, 1, 5, **SMALL, antialiased=b) for b in (False, True))
    assert {type(p) for p in layers(plain, HalvingPool)} == {HalvingPool}
    antialiased.load_state_dict(plain.state_dict())
    x = torch.randn(2, 1, 12, 12)
    assert (antialiased.eval()(x) - plain.eval()(x)).abs().max() > 1e-3


def test_without_attention_it_is_a_convolutional_network():
    network = HybridNet(C4, 1, 5, widths=(3, 4), convolutions=(2, 1), attention=(0, 0))
    assert not layers(network, GroupSelfAttention)
    assert "norm" not in network.stages
    assert [c.kernel_size for c in layers(network, R2Conv)] == [5, 3, 3]
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 5)


def test_precisions_do_not_reach_other_networks():
    """Which they would through the bases that convolutions of escnn share."""
    options = {"widths": (2,), "convolutions": (1,), "attention": (0,)}
    networks = [HybridNet(C4, 1, 2, **options) for _ in range(2)]
    networks[0].double()
    types = networks[0].stages["convolution_1_1"].in_type, networks[0].stages["convolution_1_1"].out_type
    R2Conv(*types, 5).double()
    networks.append(HybridNet(C4, 1, 2, **options))
    for network, dtype in zip(networks, (torch.float64, torch.float32, torch.float32), strict=True):
        assert network(torch.randn(1, 1, 7, 7, dtype=dtype)).dtype == dtype


def test_a_stem_that_attends():
    options = {"widths": (2, 4), "convolutions": (1, 0), "attention": (0, 1), "num_heads": 2, "kernel_size": 3}
    options |= {"stem": {"num_heads": 2, "kernel_size": 5}, "last_norm": False, "features": 3}
    options["block"] = {"norm": "gsa", "encoding": "fourier", "attention_dropout": 0.2}
    network = HybridNet(C4, 1, 5, **options)
    assert list(network.stages) == ["lifting", "pool_1", "attention_2_1", "features"]
    assert [c.kernel_size for c in layers(network, R2Conv)] == [1]
    assert equivariance_report(network.as_fields(), (2, 1, 8, 8), layers=False).relative_error < 1e-10
    lifting = layers(network, LiftingSelfAttention)[0]
    assert (lifting.num_heads, lifting.head_fields, lifting.plain.window) == (2, 1, Window(5, "square"))
    # The stem shares options of the blocks, unless it has its own.
    assert (type(lifting.plain.encoding).__name__, lifting.plain.dropout) == ("FourierEncoding", 0.2)
    own = HybridNet(C4, 1, 5, **options | {"stem": {"encoding": "mlp", "dropout": 0.1}})
    lifting = layers(own, LiftingSelfAttention)[0]
    assert (type(lifting.plain.encoding).__name__, lifting.plain.dropout) == ("MLPEncoding", 0.1)
    assert lifting.plain.window == Window(5, "square")
    options["block"]["window"] = "disc"
    for size, window in ((5, Window(5, "disc")), (None, Window())):
        made = HybridNet(C4, 1, 5, **options | {"stem": {"kernel_size": size}})
        assert layers(made, LiftingSelfAttention)[0].plain.window == window


def test_features_follow_the_last_norm():
    network = HybridNet(
        gspaces.flip2dOnR2(), 1, 5, widths=(2,), convolutions=(1,), attention=(1,), num_heads=1, features=3
    )
    assert list(network.stages)[-2:] == ["norm", "features"]
    assert network.head.in_features == 3


@pytest.mark.parametrize("make", [gspaces.flip2dOnR2, lambda: gspaces.rot2dOnR2(8)], ids=["Z2M", "R8"])
def test_a_class_token_reads_the_logits(make):
    options = {"widths": (2, 3), "convolutions": (1, 1), "attention": (0, 0), "pool": "avg"}
    network = HybridNet(make(), 1, 5, **options, class_token={"num_heads": 2, "head_fields": 3})
    token = network.stages["class_token"]
    assert list(network.stages)[-1] == "class_token"
    assert isinstance(network.head, torch.nn.Identity)
    assert (token.in_type, token.out_type.size) == (network.stages["convolution_2_1"].out_type, 5)
    assert token.plain.tokens.shape == (2, 1, 3)
    x = torch.randn(2, 1, 9, 9)
    assert equivariance_report(network.as_fields(), (2, 1, 9, 9), layers=False).relative_error < 1e-10
    last = network.feature_maps(x)["convolution_2_1"]
    torch.testing.assert_close(network(x), token(last).tensor[:, :, 0, 0])


def test_attention_alone_can_widen():
    network = HybridNet(C4, 1, 5, widths=(3, 6), convolutions=(1, 0), attention=(0, 1), num_heads=4)
    block = layers(network, TransformerBlock)[0]
    assert (len(block.in_type), len(block.out_type), block.attention.head_fields) == (3, 6, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"widths": (3, 4)}, ValueError, "widths, convolutions, attention: .* for each stage, got 2, 3 and 3"),
        ({"convolutions": (0, 1, 0)}, ValueError, "convolutions: got 0, needed at least 1"),
        ({"attention": (0, 0, 0)}, ValueError, "convolutions, attention: stage 3 has neither"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0, needed at least 1"),
        ({"stem": 4}, ValueError, "stem: got 4, needed an odd width"),
        ({"conv_kernel": 4}, ValueError, "conv_kernel: got 4, needed an odd width"),
        ({"stem": {"num_heads": 0}}, ValueError, "num_heads: got 0, needed at least 1"),
        ({"features": 0}, ValueError, "features: got 0, needed at least 1"),
        ({"pool": "sum"}, ValueError, "pool: got 'sum', needed one of 'max', 'avg'"),
        ({"stem": "attention"}, TypeError, "stem: got 'attention'"),
        ({"stem": {"padding_mode": "circular"}}, ValueError, "padding_mode: .* in stem and 'none' in block"),
        ({"block": {"padding_mode": "zeros"}}, ValueError, "padding_mode: got 'zeros'"),
        (
            {"block": {"num_heads": 2}},
            TypeError,
            r"num_heads: block has no such option \(HybridNet has it itself\), .*norm",
        ),
        ({"block": {"samples": 4}}, TypeError, r"samples: block .*\(HybridNet sets it or does without\)"),
        ({"block": {"padding": 1}}, TypeError, "padding: block has no such option, needed"),
        ({"stem": {"heads": 2}}, TypeError, "heads: .*no such option"),
        ({"antialiased": "max"}, TypeError, "antialiased: got 'max', needed"),
        ({"class_token": 3}, TypeError, "class_token: got 3"),
        ({"class_token": {"heads": 3}}, TypeError, "heads: .*needed .*num_heads, head_fields"),
        ({"widths": 16}, TypeError, "widths: got 16"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        HybridNet(C4, 1, 2, **{**SMALL, **options})


CNN_SMALL = {"widths": (3, 4), "convolutions": (2, 1), "features": 5}


def test_stages_are_as_asked_for_of_cnn():
    network = CNN(2, 7, **CNN_SMALL, stem_kernel=7)
    assert list(network.stages) == ["convolution_1_1", "convolution_1_2", "pool_1", "convolution_2_1", "features"]
    kernels = [m.kernel_size[0] for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [7, 3, 3, 1]
    assert network(torch.randn(2, 2, 8, 9)).shape == (2, 7)
    assert (network.in_channels, network.num_classes) == (2, 7)


def test_antialiased_pooling_takes_the_place_of_the_maximum():
    network = CNN(2, 7, **CNN_SMALL, antialiased=True).double()
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    torch.testing.assert_close(network.stages["pool_1"](x), PlainAntialiasedPool("max", 2).double()(x))
    assert network(torch.randn(2, 2, 8, 9, dtype=torch.float64)).shape == (2, 7)
    assert CNN(2, 7, **CNN_SMALL).stages["pool_1"](x).equal(torch.nn.functional.max_pool2d(x, 2))


def test_mistakes_of_cnn():
    for options, error, message in (
        ({"widths": (3,)}, ValueError, "widths: got 1 values, needed 2"),
        ({"convolutions": (1, 0)}, ValueError, "convolutions: got 0, needed at least 1"),
        ({"conv_kernel": 2}, ValueError, "conv_kernel: got 2, needed an odd width"),
        ({"features": 0}, ValueError, "features: got 0, needed at least 1"),
        ({"antialiased": 1}, TypeError, "antialiased: got 1, needed"),
    ):
        with pytest.raises(error, match=message):
            CNN(1, 2, **CNN_SMALL | options)
