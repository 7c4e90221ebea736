"""Vision transformers with equivariant blocks."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from torch.func import jvp

from escnn_attention import assert_equivariant
from escnn_attention.models import VisionTransformer
from tests import spaces
from tests.layers import drawn

SIZES = {"image_size": 8, "patch_size": 2, "fields": 4, "num_heads": 2, "num_blocks": (1, 1), "hidden_fields": 3}
GROUPS = [gspaces.flipRot2dOnR2(4), gspaces.rot2dOnR2(4), gspaces.mirOnR3()]


def network_on(gspace, **options):
    return drawn(VisionTransformer(gspace, 2, 3, **(SIZES | options)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("class_token", "registers"), [(True, 0), (False, 0), (True, 2), (False, 2)])
@pytest.mark.parametrize("gspace", GROUPS, ids=lambda g: g.name)
@pytest.mark.slow
def test_invariant_with_invariants_alone(gspace, class_token, registers):
    shape = (2, 2, *[8] * gspace.dimensionality)
    network = network_on(gspace, invariant=True, class_token=class_token, registers=registers)
    assert_equivariant(network.as_fields(), shape, tolerance=1e-11)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(network.export()(x), network(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="equivarian"):
        assert_equivariant(network_on(gspace, class_token=class_token).as_fields(), shape, tolerance=1e-3)


@pytest.mark.parametrize("class_token", [True, False])
def test_tokens_are_what_is_read(class_token):
    network = network_on(GROUPS[0], class_token=class_token, registers=3)
    x, first = torch.randn(2, 2, 8, 8, dtype=torch.float64), int(class_token)
    tokens = network.tokens(x)
    assert tokens.shape == (2, first + 3 + 16, 32)
    read = tokens[:, 0] if class_token else tokens[:, 3:].mean(1)
    torch.testing.assert_close(network(x), network.head(read), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(network.export().tokens(x), tokens, rtol=1e-12, atol=1e-12)
    without = VisionTransformer(GROUPS[0], 2, None, **SIZES, class_token=class_token, registers=3).double()
    without.load_state_dict({n: t for n, t in network.state_dict().items() if not n.startswith("head.")})
    torch.testing.assert_close(without(x), read, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(without.export()(x), read, rtol=1e-12, atol=1e-12)
    assert without.as_fields()(without.in_type(x)).shape[:2] == (2, 32)
    # Registers are attended to, and are no patches.
    with torch.no_grad():
        network.token.registers.add_(1)
    assert (network(x) - network.head(read)).abs().max() > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gspace", GROUPS, ids=lambda g: g.name)
@pytest.mark.slow
def test_from_fields_to_fields(gspace):
    vectors = FieldType(gspace, [gspace.basespace_action, gspace.trivial_repr])
    options = SIZES | {"num_blocks": (2, 0), "class_token": False, "registers": 1}
    network = drawn(VisionTransformer(gspace, vectors, vectors, **options))
    shape = (2, vectors.size, *[8] * gspace.dimensionality)
    assert_equivariant(network.as_fields(), shape, tolerance=1e-11)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(network(vectors(x)).tensor, network(x))
    kernel = torch.randn_like(network.decoder[1].plain.kernel_and_bias(x)[0])  # the negative control
    network.decoder[1].plain.kernel_and_bias = lambda like: (kernel, None)
    with pytest.raises(AssertionError, match="equivarian"):
        assert_equivariant(network.as_fields(), shape, tolerance=1e-3)


def test_bad_arguments():
    for name, value, message in (
        ("image_size", 9, r"^image_size: patches of 2 do not divide 9"),
        ("num_heads", 3, r"^num_heads: 3 heads do not divide 4 fields"),
        ("num_blocks", (1,), r"^num_blocks: got 1 values, needed 2"),
        ("registers", -1, r"^registers: got -1"),
        ("layer_scale", 0.0, "^layer_scale: got 0.0, needed a positive gain"),
    ):
        with pytest.raises(ValueError, match=message):
            VisionTransformer(GROUPS[0], 2, 3, **(SIZES | {name: value}))
    # Tokens stand in a row: a convolution of it would not commute with the group.
    for name, value in {"encoding": "mlp", "projection_kernel_size": 3, "padding_mode": "circular"}.items():
        with pytest.raises(TypeError, match=f"^{name}: .*no such option"):
            VisionTransformer(GROUPS[0], 2, 3, **SIZES, block={name: value})
    scalars = spaces.scalars(GROUPS[0], 2)
    for arguments, message in (
        ((GROUPS[0], 2, scalars), "num_classes: got a type"),
        ((GROUPS[1], scalars, 3), "in_channels: its gspace"),
        ((gspaces.rot2dOnR2(8), 2, 3), "square grid"),
    ):
        with pytest.raises(ValueError, match=message):
            VisionTransformer(*arguments, **SIZES)
    for shape, message in (((1, 3, 8, 8), "^input: .*of shape"), ((1, 2, 7, 8), "^input: .*divide .*7×8")):
        with pytest.raises(ValueError, match=message):
            VisionTransformer(GROUPS[0], 2, 3, **SIZES)(torch.zeros(shape))


def test_second_derivatives_in_forward_mode():
    sizes = {"image_size": 4, "patch_size": 2, "fields": 2, "num_heads": 1, "num_blocks": (1, 1)}
    network = drawn(VisionTransformer(gspaces.flipRot2dOnR2(4), 1, 2, **sizes))
    x, along = torch.randn(2, 1, 4, 4, dtype=torch.float64)[:, None].unbind()

    def loss(t):
        return network(x + t * along).sin().sum()

    def derivative(function):
        return lambda t: jvp(function, (t,), (torch.ones_like(t),))[1]

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(t), t, create_graph=True)
    (expected,) = torch.autograd.grad(slope, t)
    torch.testing.assert_close(derivative(derivative(loss))(t.detach()), expected, rtol=1e-9, atol=1e-9)
