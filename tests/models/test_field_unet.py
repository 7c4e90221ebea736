"""U-shaped networks of fields."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import equivariance_report
from escnn_attention.models import FieldUNet

SPACES = {
    "C4": lambda: gspaces.rot2dOnR2(4),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
    "mirror": gspaces.flip2dOnR2,
    "octahedral": gspaces.octaOnR3,
}
SMALL = {"widths": (1, 2), "convolutions": 1, "attention": (0, 1), "num_heads": 1}


def vectors(space):
    return FieldType(space, [space.trivial_repr, space.basespace_action])


def network_on(space, **options):
    torch.manual_seed(0)
    out_type = None if options.get("features_only") else vectors(space)
    return FieldUNet(space, vectors(space), out_type, **{**SMALL, **options}).double().eval()


def error_of(network, size):
    shape = (2, network.in_type.size, *network.gspace.dimensionality * [size])
    return equivariance_report(network, shape, layers=False).relative_error


def test_by_default_attention_stands_in_place_of_convolutions():
    space = gspaces.rot2dOnR2(4)
    network = FieldUNet(space, 1, 1, widths=(2, 3, 3), attention=(0, 0, 2), num_heads=2)
    kinds = [[type(layer).__name__ for layer in layers] for layers in network.encoder]
    assert kinds == 2 * [2 * ["SequentialModule"]] + [2 * ["TransformerBlock"]]
    attention = network.encoder[2][1].attention.plain
    assert (attention.keys, attention.channels, attention.window.kernel_size) == ("own", 2, 5)
    assert type(attention.encoding).__name__ == "ConvolutionalEncoding"
    block = {"keys": "all", "head_fields": 4}
    chosen = FieldUNet(space, 1, 1, widths=(1, 1), attention=(0, 1), kernel_size=None, block=block)
    attention = chosen.encoder[1][0].attention.plain
    assert (attention.keys, attention.channels, attention.window.kernel_size) == ("all", 4, None)
    assert type(attention.encoding).__name__ == "RotaryEncoding"
    torus = FieldUNet(space, 1, 1, widths=(1, 1), attention=(0, 1), kernel_size=None, padding_mode="circular")
    assert type(torus.encoder[1][0].attention.plain.encoding).__name__ == "MLPEncoding"


def test_the_layers_are_joined_as_documented():
    network = network_on(gspaces.rot2dOnR2(4), widths=(1, 2, 1), attention=(0, 1, 1))
    x = network.in_type(torch.randn(2, 3, 9, 8).double())
    fine = network.encoder[0](x)
    middle = network.encoder[1](network.pools[0](fine))
    coarse = network.encoder[2](network.pools[1](middle))
    assert coarse.shape[2:] == (2, 2)
    for skip, layers in zip((middle, fine), network.decoder, strict=True):
        up = torch.nn.functional.interpolate(coarse.tensor, skip.shape[2:], mode="bilinear")
        joined = torch.cat([skip.tensor, up], dim=1)
        coarse = layers(GeometricTensor(joined, skip.type + coarse.type))
    torch.testing.assert_close(network(x).tensor, network.head(coarse).tensor)
    torch.testing.assert_close(network(x.tensor), network.head(coarse).tensor)


@pytest.mark.parametrize("antialiased", [True, False])
@pytest.mark.slow
def test_on_a_torus_it_commutes_with_rolls_and_turns(antialiased):
    options = {"convolutions": 0, "attention": (1, 1), "kernel_size": 3, "antialiased": antialiased}
    network = network_on(gspaces.rot2dOnR2(4), padding_mode="circular", **options)
    assert error_of(network, 8) < 1e-10
    x = torch.randn(1, 3, 8, 8).double()

    def error(network, shift):
        return (network(x.roll((shift, -shift), (2, 3))) - network(x).roll((shift, -shift), (2, 3))).abs().max()

    for shift in (2, 4, 6):
        assert error(network, shift) < 1e-10
    assert error(network, 1) > 1e-4  # the coarse level has every second position
    assert error(network_on(gspaces.rot2dOnR2(4), **options), 2) > 1e-4
    options |= {"kernel_size": None}
    mixed = {"convolutions": 1, "attention": (0, 1)}
    with_convolutions = network_on(gspaces.rot2dOnR2(4), **options | mixed, padding_mode="circular")
    assert error(with_convolutions, 2) < 1e-10
    options |= {"patch_size": 2}
    of_patches = network_on(gspaces.rot2dOnR2(4), **options, padding_mode="circular")
    assert error(of_patches, 4) < 1e-10 < 1e-4 < error(of_patches, 2)
    with pytest.raises(ValueError, match=r"input: .*torus of 8×9"):
        network(torch.randn(1, 3, 8, 9).double())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("space", ["D4", "mirror"])
@pytest.mark.parametrize("convolutions", [0, 1])
@pytest.mark.slow
def test_levels_of_patches(space, convolutions):
    space = SPACES[space]()
    options = {"convolutions": convolutions, "attention": (1, 1)}
    network, size = network_on(space, **options, patch_size=3), 6 if space.dimensionality == 3 else 9
    assert error_of(network, size) < 1e-10
    fields = FieldType(space, [space.regular_repr])
    levels = FieldUNet(space, fields, None, **{**SMALL, **options}, features_only=True).double()
    inside = {name: t for name, t in network.state_dict().items() if not name.startswith(("embedding", "head"))}
    levels.load_state_dict(inside)
    x = network.in_type(torch.randn(1, network.in_type.size, *space.dimensionality * [6]).double())
    y = network.head(levels.eval()(network.embedding(x))[0])
    torch.testing.assert_close(network(x).tensor, y.tensor, rtol=1e-12, atol=1e-12)
    kernel = torch.randn_like(network.head.plain.kernel_and_bias(x.tensor)[0])  # the negative control
    network.head.plain.kernel_and_bias = lambda like: (kernel, None)
    assert error_of(network, size) > 1e-3


@pytest.mark.parametrize("patch_size", [None, 2])
def test_features_of_a_backbone(patch_size):
    """As timm gives them, for the pyramid of a detector: by level, each equivariant, and with gradients of all."""
    space = gspaces.rot2dOnR2(4)
    options = {"widths": (1, 2, 4), "attention": (0, 0, 1), "num_heads": 2, "patch_size": patch_size}
    backbone = network_on(space, features_only=True, **options)
    x = torch.randn(2, 3, 16, 16).double()
    maps, info = backbone(x), backbone.feature_info
    assert [m.shape[1] for m in maps] == info.channels() == [4, 8, 16]
    assert [16 // m.shape[2] for m in maps] == info.reduction() == [(patch_size or 1) * n for n in (1, 2, 4)]
    names = dict(backbone.named_modules())
    assert [names[level["module"]][-1].out_type.size for level in info] == [4, 8, 16]
    for g in space.testing_elements:
        turned = backbone(backbone.in_type(x).transform(g))
        for found, m in zip(turned, maps, strict=True):
            torch.testing.assert_close(found.tensor, found.type(m).transform(g).tensor, rtol=0, atol=1e-10)
    sum(m.square().sum() for m in maps).backward()
    assert all(p.grad is not None for p in backbone.parameters())


def test_what_does_not_fit():
    space = gspaces.rot2dOnR2(4)
    other = vectors(gspaces.rot2dOnR2(8))
    for arguments, options, error, message in (
        ((1, other), {}, ValueError, "out_type: .* C4"),
        ((1, None), {}, ValueError, "out_type: .* features_only"),
        ((1, 1), {"features_only": True}, ValueError, "out_type"),
        ((1, 1), {"attention": (1,)}, ValueError, "attention: .* needed 2"),
        ((1, 1), {"convolutions": (1, 0), "attention": (0, 0)}, ValueError, "level 2"),
        ((1, 1), {"conv_kernel": 4}, ValueError, "conv_kernel: .* odd"),
        ((1, 1), {"widths": ()}, ValueError, "widths"),
        ((1, 1), {"block": {"condition": 3}}, TypeError, "condition"),
        ((1, 1), {"block": {"crop": 1}}, TypeError, "crop"),
        ((1, 1), {"padding_mode": "zeros"}, ValueError, "padding_mode"),
        (("image", 1), {}, TypeError, "in_type: .* integer"),
        ((1, 1), {"patch_size": 0}, ValueError, "size: got 0"),
        ((1, 1), {"kernel_size": 4}, ValueError, "kernel_size: .* odd"),
    ):
        with pytest.raises(error, match=message):
            FieldUNet(space, *arguments, **{**SMALL, **options})
    for options, x, message in (
        ({}, torch.randn(1, 3, 1, 8), "input: .*of 1×8"),
        ({"patch_size": 3}, torch.randn(1, 3, 7, 9), "input: .*7×9"),
        ({"patch_size": 3}, torch.randn(1, 3, 3, 6), "input: .*of 1×2"),
        ({}, other(torch.randn(1, 3, 8, 8)), "input: .*gspace"),
    ):
        with pytest.raises(ValueError, match=message):
            network_on(space, **options).float()(x)
    for options, message in (
        ({"patch_size": 2}, "square grid"),
        ({"padding_mode": "circular"}, "padding_mode: .* lattice"),
    ):
        with pytest.raises(ValueError, match=message):
            FieldUNet(gspaces.rot2dOnR2(8), 1, 1, **SMALL, **options)
