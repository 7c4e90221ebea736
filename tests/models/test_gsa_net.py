import math

import pytest
import torch
from escnn import gspaces

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, equivariance_report
from escnn_attention.models import GSANet
from escnn_attention.nn.summary import count_parameters
from tests.models.networks import sizes

GROUPS = {
    "Z2": gspaces.trivialOnR2,
    "Z2M": gspaces.flip2dOnR2,
    "R4": lambda: gspaces.rot2dOnR2(4),
    "R8": lambda: gspaces.rot2dOnR2(8),
    "R12": lambda: gspaces.rot2dOnR2(12),
    "R16": lambda: gspaces.rot2dOnR2(16),
    "R4M": lambda: gspaces.flipRot2dOnR2(4),
}
NETWORKS = {"rotmnist": GSANet.rotmnist, "cifar10": GSANet.cifar10, "patch_camelyon": GSANet.patch_camelyon}

# Measured on the published implementation.
PUBLISHED = {
    "rotmnist": {"Z2": 44_368, "R4": 44_428, "R8": 44_508, "R12": 44_588, "R16": 44_668, "Z2M": 44_388, "R4M": 44_508},
    "cifar10": {"Z2": 3_001_648, "R4": 3_002_128, "R8": 3_002_768, "Z2M": 3_001_808, "R4M": 3_002_768},
    "patch_camelyon": {"Z2": 206_926, "R4": 207_034, "R8": 207_178, "Z2M": 206_962, "R4M": 207_178},
}


def tiny(gspace, **options):
    arguments = {"channels": 6, "blocks": (1, 1), "crops": (1, 0), "pool": (True, False)}
    return GSANet(gspace, 1, 3, **{**arguments, "num_heads": 2, "kernel_size": 3, **options})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_parameters_and_how_they_differ_from_the_published(name):
    """What is not there has no effect on the scores, or made step functions of the encoders."""
    for group, published in PUBLISHED[name].items():
        network = NETWORKS[name](GROUPS[group]())
        layers = [m for m in network.modules() if isinstance(m, (GroupSelfAttention, LiftingSelfAttention))]
        order = network.order
        left_out = 0
        for layer in layers:
            width = layer.head_fields
            left_out += layer.num_heads * width  # biases of the keys, which drop out of the softmax
            lifting = isinstance(layer, LiftingSelfAttention)
            left_out += 2 * (width // 2 if lifting else width // 3)  # biases of the encoders' outputs, which do so too
            left_out += 2 * 2 * 16  # norms of the encoders' hidden features, a scale and a shift
            if not lifting and order == 1:
                left_out += width - 2 * (width // 3)  # a pose embedding of one pose, which drops out as well
                widened = width // 2 - width // 3, width - width // 2 - width // 3
                left_out -= 16 * sum(widened)  # and whose channels the encoders take
        assert count_parameters(network) == published - left_out


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("rotmnist", (1, 28, 28), [28, 24, 24, 12, 8, 6, 4, 4]),
        ("cifar10", (3, 32, 32), [32, 32, 32, 16, 16, 16, 8, 8, 8, 8]),
        ("patch_camelyon", (3, 96, 96), [96, 48, 48, 24, 20, 18, 9, 7, 3, 3]),
    ],
)
def test_grids_are_the_published_ones(name, shape, expected):
    assert [found[-1] for found in sizes(NETWORKS[name](gspaces.trivialOnR2()), 1, *shape)] == expected


def test_a_broken_action_is_found_out():
    network = tiny(gspaces.rot2dOnR2(4))
    for module in network.modules():
        if type(module) is GroupSelfAttention:
            # The embedding of the key's pose itself, in place of that of its pose relative to the output's.
            module.plain.quotient.copy_(torch.arange(4).expand(4, 4))
    assert equivariance_report(network.as_fields(), (2, 1, 9, 9), layers=False).relative_error > 1e-4


def test_initialisation_is_the_published_one():
    torch.manual_seed(0)
    network = GSANet.cifar10(gspaces.flip2dOnR2())
    block = network.stages["attention_2_1"][0]  # from 96 to 192 fields
    plain = block.attention.plain
    heads, width, fields = block.attention.num_heads, block.attention.head_fields, 96
    weight = plain.project_in.weight
    assert weight.shape == (3 * heads * width, fields)
    queries, others = weight[: heads * width], weight[heads * width :]
    assert math.isclose(others.std().item(), math.sqrt(2 / fields), rel_tol=0.02)
    # ⟨q, k⟩ / √width here is what ⟨q, k⟩ / √fields is there.
    assert math.isclose(queries.std().item(), math.sqrt(2 / fields) * math.sqrt(width / fields), rel_tol=0.02)
    assert math.isclose(plain.project_out.weight.std().item(), math.sqrt(2 / (heads * width)), rel_tol=0.02)
    assert math.isclose(plain.encoding.pose_embedding.std().item(), 1.0, rel_tol=0.3)
    biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
    assert len(biases) > 20
    assert all((p == 0).all() for p in biases)


def test_dropouts_are_where_they_are_said_to_be():
    off = {"attention_dropout": 0.0, "dropout": 0.0}
    x = torch.randn(2, 1, 9, 9)
    network = tiny(gspaces.rot2dOnR2(2), block=off)
    torch.testing.assert_close(network(x), network(x))
    for name in ("attention_dropout", "dropout", "input_dropout", "pool_dropout"):
        options = {"block": {**off, name: 0.5}} if name in off else {"block": off, name: 0.5}
        network = tiny(gspaces.rot2dOnR2(2), **options)
        assert not torch.allclose(network(x), network(x)), name
        network.eval()
        torch.testing.assert_close(network(x), network(x))


def test_options_reach_the_layers():
    block = {"window": "disc", "encoding": "fourier"}
    network = tiny(gspaces.rot2dOnR2(2), kernel_size=5, query="own", num_heads=3, block=block)
    lifting = [m for m in network.modules() if isinstance(m, LiftingSelfAttention)]
    blocks = [m for m in network.modules() if type(m) is GroupSelfAttention]
    assert (len(lifting), len(blocks)) == (1, 2)
    for module in (*lifting, *blocks):
        assert module.num_heads == 3
        assert module.plain.window.kernel_size == 5
        assert module.plain.window.shape == "disc"
        assert type(module.plain.encoding).__name__ == "FourierEncoding"
    assert {module.plain.query for module in blocks} == {"own"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"crops": (1,)}, ValueError, "crops: got 1 values, needed one for each block, 2"),
        ({"pool": (True, False, True)}, ValueError, "pool: got 3 values, needed one for each stage, 2"),
        ({"expansion": (1, 0)}, ValueError, "expansion: got 0, needed at least 1"),
        ({"channels": 4}, ValueError, "channels: got 4, needed at least 6"),
        ({"crops": (1, 0), "block": {"padding_mode": "circular"}}, ValueError, "crops: got margins .* torus"),
        ({"crops": (-1, 0)}, ValueError, "crops: got -1, needed at least 0"),
        ({"blocks": (0, 1), "crops": (0,), "expansion": (2, 1)}, ValueError, "expansion: a stage without blocks"),
        ({"input_dropout": 1.0}, ValueError, "input_dropout: got 1.0, needed a probability"),
        ({"blocks": (1, -1)}, ValueError, "blocks: got -1, needed at least 0"),
        ({"query": "none"}, ValueError, "^query: got 'none'"),
        ({"readout": "mean"}, ValueError, "^readout: got 'mean'"),
        ({"channels": "abc"}, TypeError, "channels: got 'abc', needed an integer"),
        ({"blocks": 3}, TypeError, "blocks: got 3, needed"),
        ({"crops": 1}, TypeError, "crops: got 1, needed"),
        ({"pool": ("yes", False)}, TypeError, "pool: got 'yes', needed True or False"),
        ({"pool": (1, 0)}, TypeError, "pool: got 1, needed True or False"),
        ({"num_heads": 1.5}, TypeError, r"num_heads: got 1\.5, needed an integer"),
        ({"norm_between": "yes"}, TypeError, "norm_between: got 'yes', needed True or False"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        tiny(gspaces.rot2dOnR2(2), **options)


def test_a_network_of_tori():
    options = {"crops": (0, 0), "block": {"padding_mode": "circular"}}
    network = tiny(gspaces.rot2dOnR2(4), **options).double().eval()
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    assert (network(x.roll((2, 4), (2, 3))) - network(x)).abs().max() < 1e-12
    assert (network(x.roll((1, 0), (2, 3))) - network(x)).abs().max() > 1e-6
    with pytest.raises(ValueError, match=r"input: got a torus of 5×8, needed even"):
        network(x[:, :, :5])


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="margin of 1"):
        GSANet.rotmnist(gspaces.rot2dOnR2(4))(torch.randn(1, 1, 14, 14))


def test_each_relative_pose_has_heads_of_its_own():
    network = tiny(gspaces.rot2dOnR2(4), query="each").double().eval()
    blocks = [m for m in network.modules() if type(m) is GroupSelfAttention]
    assert [block.num_heads for block in blocks] == [8, 8]
    assert {block.plain.query for block in blocks} == {"own"}
    assert equivariance_report(network.as_fields(), (1, 1, 9, 9), layers=False).relative_error < 1e-11


def test_readouts():
    networks = [tiny(gspaces.rot2dOnR2(4), readout=readout).double().eval() for readout in ("max", "sum")]
    networks[1].load_state_dict(networks[0].state_dict())
    x = torch.randn(2, 1, 9, 9, dtype=torch.float64)
    classes = networks[0].feature_maps(x)["classes"].tensor.unflatten(1, (3, 4))
    for network, expected in zip(networks, (classes.amax(2).mean((2, 3)), classes.sum((3, 4)).amax(2)), strict=True):
        torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(network.export()(x), expected, rtol=1e-12, atol=1e-12)
    assert (networks[0](x) - networks[1](x)).abs().max() > 1e-3


def test_norms_have_the_epsilon_that_is_asked_for():
    network = tiny(gspaces.rot2dOnR2(4), norm_between=True, block={"norm_eps": 1e-12})
    assert {m.eps for m in network.modules() if hasattr(m, "eps")} == {1e-12}
    assert {m.eps for m in tiny(gspaces.rot2dOnR2(4)).modules() if hasattr(m, "eps")} == {1e-5}
