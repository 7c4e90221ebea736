"""Queries, keys and values of heads: which are made, and which keys have biases."""

from __future__ import annotations

import pytest
import torch
from escnn import gspaces

import escnn_attention as ea
from escnn_attention import PairKernel, RotaryEncoding
from escnn_attention.plain.heads import HeadModule
from tests import spaces
from tests.layers import Case, on_points, vectors
from tests.nn import spheres
from tests.nn.attention import TOLERANCE, attention_for, turned_error
from tests.nn.points import cloud, mixed, worst_error, written_out

D3 = gspaces.flipRot2dOnR2(3)
SCALES = ea.Scales(2, 2)


def grid(encoding, layer=ea.GroupSelfAttention, channels=3, **options):
    in_type = spaces.scalars(D3, 2) if layer is ea.LiftingSelfAttention else spaces.mixed(D3)
    return Case(
        lambda: layer(in_type, spaces.regular(D3, 1), 2, 3, head_fields=channels, encoding=encoding, **options),
        shape=(1, 4, 4),
    )


def dilation(encoding):
    fields = SCALES.repeat(spaces.regular(D3, 1))
    return Case(
        lambda: ea.DilationSelfAttention(fields, fields, SCALES, 2, 3, head_fields=3, encoding=encoding),
        shape=(1, 5, 5),
    )


def points(encoding, layer=ea.PointSelfAttention, in_type=None, **options):
    fields = mixed(D3)
    return on_points(lambda: layer(in_type or fields, fields, 2, head_fields=3, encoding=encoding, **options))


def sphere(encoding, **options):
    fields = spheres.mixed(spheres.ROTATIONS)
    return on_points(
        lambda: ea.SphereSelfAttention(fields, fields, 2, samples=3, head_fields=3, encoding=encoding, **options),
        unit=True,
    )


def kernel(*options):
    return PairKernel(*options, hidden=4)


# A layer with heads of three channels, and how many of them have keys with a bias.
BIASED = {
    **{f"grid, {name}": (grid(name), 0) for name in ("mlp", "separable", "fourier", "absolute", "none")},
    "grid, quadratic": (grid(ea.QuadraticEncoding()), 0),
    "grid, keys own": (grid("mlp", keys="own"), 0),
    "grid, query all": (grid("absolute", query="all"), 0),
    "grid, rotary": (grid("rotary"), 2),
    "grid, rotary, keys own": (grid("rotary", keys="own", query="all"), 2),
    "grid, rotary, even": (grid(RotaryEncoding(1), channels=2), 2),
    "lifting, mlp": (grid("mlp", ea.LiftingSelfAttention), 0),
    "lifting, rotary": (grid("rotary", ea.LiftingSelfAttention), 2),
    "dilation, mlp": (dilation("mlp"), 0),
    "dilation, rotary": (dilation("rotary"), 2),
    **{f"points, {name}": (points(name), 0) for name in ("mlp", "absolute", "none")},
    "points, rotary": (points("rotary", keys="own"), 2),
    **{f"points, {name}, count": (points(name, normalization="count"), 3) for name in ("mlp", "rotary", "none")},
    "points, absolute, count": (points("absolute", normalization="count"), 3),
    "points, scalars, count": (points("mlp", in_type=spaces.scalars(D3, 2), normalization="count"), 3),
    "points, convolution, count": (points("mlp", ea.PointAttentiveConv, normalization="count"), 3),
    "points, dot": (points(kernel()), 0),
    "points, dot, count": (points(kernel(), normalization="count"), 3),
    "points, dot, product": (points(kernel("dot", "mlp", "product")), 3),
    "points, dot, network": (points(kernel("dot", "raw", "mlp")), 3),
    "points, concat": (points(kernel("concat", "mlp", "sum")), 3),
    "points, location": (points(kernel("none")), 0),
    "points, location, count": (points(kernel("none"), normalization="count"), 0),
    "sphere, mlp": (sphere("mlp"), 0),
    "sphere, mlp, count": (sphere("mlp", normalization="count"), 3),
    "sphere, product": (sphere(kernel("dot", "mlp", "product")), 3),
}


def heads_of(module) -> HeadModule:
    (found,) = (m for m in module.modules() if isinstance(m, HeadModule))
    return found


@pytest.mark.parametrize("name", BIASED)
def test_keys_have_a_bias_exactly_where_it_matters(name):
    """What is added to all keys, channel by channel: to the keys themselves, and by the parameter."""
    case, biased = BIASED[name]
    module = case.drawn()
    core, inputs = heads_of(module), case.inputs(module)
    heads, channels = core.num_heads, module.head_fields
    with torch.no_grad():
        y = case.output(module, *inputs)
        if not core.needs.keys:
            assert len(core.project_in.weight) == heads * channels
            return
        assert len(core.project_in.bias) == heads * (2 * channels + biased)
        for channel in range(channels):
            number = torch.zeros(channels, dtype=torch.float64)
            number[channel] = 1.5
            hook = core.project_in.register_forward_hook(
                lambda *given, number=number: torch.cat([given[2][:-heads], given[2][-heads:] + number])
            )
            changed = case.output(module, *inputs)
            hook.remove()
            assert ((changed - y).norm() > 1e-6 * y.norm()) == (channel < biased), channel
            if channel < biased:
                core.project_in.bias[-heads * biased :].view(heads, biased)[:, channel] += 1.5
                torch.testing.assert_close(case.output(module, *inputs), changed, rtol=1e-9, atol=1e-11)
                core.project_in.bias[-heads * biased :].view(heads, biased)[:, channel] -= 1.5


@pytest.mark.parametrize("name", ["grid, rotary", "dilation, rotary", "points, dot, product", "points, location"])
def test_what_a_layer_without_biases_of_the_keys_has_saved(name):
    """They are zero; and what nobody reads is left out."""
    case, biased = BIASED[name]
    module = case.drawn()
    core, inputs = heads_of(module), case.inputs(module)
    heads, fields = core.num_heads, core.num_heads * module.head_fields
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        if biased:
            state["plain.project_in.bias"] = state["plain.project_in.bias"][: 2 * fields]
            core.project_in.bias[2 * fields :] = 0
        else:
            for part, others in (("weight", 2), ("bias", 1)):
                values = state[f"plain.project_in.{part}"]
                torch.manual_seed(1)
                before, after = torch.randn_like(values), torch.randn_like(values)
                state[f"plain.project_in.{part}"] = torch.cat([before, values, after][: 1 + others])
        expected = case.output(module, *inputs)
        other = case.make().double()
        other.load_state_dict(state)
        assert torch.equal(case.output(other, *inputs), expected)
    state["plain.project_in.bias"] = torch.randn(heads * 7)
    with pytest.raises(RuntimeError, match=r"size mismatch for plain\.project_in\.bias"):
        other.load_state_dict(state)


SO2 = gspaces.rot2dOnR2(-1)
POSED = {
    "grid, absolute": lambda **options: ea.GroupSelfAttention(
        spaces.mixed(D3), spaces.regular(D3, 1), 2, 3, head_fields=3, encoding="absolute", keys="own", **options
    ),
    "grid, absolute, scalars": lambda **options: ea.GroupSelfAttention(
        spaces.scalars(D3, 2), spaces.regular(D3, 1), 2, 3, head_fields=3, encoding="absolute", **options
    ),
    "grid, absolute, samples": lambda **options: ea.GroupSelfAttention(
        *2 * [vectors(SO2)], 2, 3, head_fields=3, encoding="absolute", keys="own", samples=5, **options
    ),
    **{
        f"points, {name}, {normalization}": lambda name=name, normalization=normalization, **options: (
            ea.PointSelfAttention(
                *2 * [mixed(D3)], 2, head_fields=3, encoding=name, keys="own", normalization=normalization, **options
            )
        )
        for name in ("mlp", "separable", "rotary", "absolute")
        for normalization in ("softmax", "count")
        if name == "absolute" or normalization == "count"
    },
    "points, samples": lambda **options: ea.PointSelfAttention(
        *2 * [vectors(SO2)],
        2,
        head_fields=3,
        encoding=ea.MLPEncoding(per_head=False),
        keys="own",
        normalization="count",
        samples=5,
        **options,
    ),
}


@pytest.mark.parametrize("name", POSED)
def test_a_constant_term_of_the_pose_is_a_bias(name, monkeypatch):
    """A layer loads what one with such a term has saved, and gives the same; without biases it cannot."""
    is_grid, make = name.startswith("grid"), POSED[name]
    case = Case(make, shape=(1, 4, 4)) if is_grid else on_points(make)
    module, without_biases = case.drawn(), make(bias=False)
    module_name = f"escnn_attention.nn.{'self' if is_grid else 'point'}_attention"
    monkeypatch.setattr(f"{module_name}._constant_pose", lambda *_, **__: None)
    if "scalars" in name:
        monkeypatch.setattr(f"{module_name}._sees_scalars", lambda *_: False)
    posed = case.drawn()
    for parameter in posed.parameters():
        torch.nn.init.normal_(parameter)
    state = posed.state_dict()
    found = [n for n in state if "encoding.pose_" in n]
    assert found
    assert not [n for n in module.state_dict() if "encoding.pose_" in n]
    module.load_state_dict(state)
    assert set(found) < set(state)
    inputs = case.inputs(module)
    expected = case.output(posed, *inputs)
    torch.testing.assert_close(case.output(module, *inputs), expected, rtol=1e-10, atol=1e-12)
    module.plain.project_in.bias.data.copy_(state["plain.project_in.bias"])
    assert (case.output(module, *inputs) - expected).norm() > 1e-3 * expected.norm()  # the term does something
    del state["plain.project_in.bias"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoding\.pose_"):
        without_biases.load_state_dict(state)


def test_constants_of_a_kernel_that_drop_out_load():
    kernel = PairKernel("dot", "raw", "sum")
    layer = ea.PointSelfAttention(*2 * [mixed(D3)], head_fields=3, encoding=kernel, keys="own", query="all")
    state = layer.state_dict() | {"plain.encoding.bias": torch.randn(1, 1), "plain.encoding.of_pose": torch.ones(2)}
    layer.load_state_dict(state)
    assert "plain.encoding.bias" not in layer.state_dict()
    counted = ea.PointSelfAttention(
        *2 * [mixed(D3)], head_fields=3, encoding=kernel, keys="own", query="all", normalization="count"
    )
    assert {"plain.encoding.bias", "plain.encoding.of_pose"} < set(counted.state_dict())


CONSTANT = {
    "grid": lambda **options: grid(RotaryEncoding(**options), channels=4, query="all"),
    "grid, keys own": lambda **options: grid(RotaryEncoding(**options), channels=4, keys="own"),
    "lifting": lambda **options: grid(RotaryEncoding(**options), ea.LiftingSelfAttention, channels=4),
    "dilation": lambda **options: Case(
        lambda: ea.DilationSelfAttention(
            *2 * [SCALES.repeat(spaces.regular(D3, 1))], SCALES, 2, 3, head_fields=4, encoding=RotaryEncoding(**options)
        ),
        shape=(1, 5, 5),
    ),
    "points": lambda **options: on_points(
        lambda: ea.PointSelfAttention(
            mixed(D3), mixed(D3), 2, head_fields=4, keys="own", num_neighbours=4, encoding=RotaryEncoding(**options)
        )
    ),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_keys_are_keys_with_nothing_but_a_bias_of_one(name):
    case, full = CONSTANT[name](constant_keys=True), CONSTANT[name]()
    module, other = case.drawn(), full.make().double()
    core = heads_of(module)
    fields = core.num_heads * module.head_fields
    assert len(core.project_in.weight) == len(core.project_in.bias) == 2 * fields
    state = module.state_dict()
    weight, bias = state["plain.project_in.weight"], state["plain.project_in.bias"]
    state["plain.project_in.weight"] = torch.cat([weight, torch.zeros_like(weight[:fields])])
    state["plain.project_in.bias"] = torch.cat([bias, torch.ones(fields, dtype=torch.float64)])
    other.load_state_dict(state)
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    y, expected = case.output(module, *inputs), full.output(other, *inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    leaves = [core.project_in.bias, *inputs], [heads_of(other).project_in.bias, *inputs]
    got, needed = (torch.autograd.grad(t.sin().sum(), of) for t, of in zip((y, expected), leaves, strict=True))
    torch.testing.assert_close(got[0], needed[0][: 2 * fields], rtol=1e-9, atol=1e-11)
    for a, b in zip(got[1:], needed[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("keys", ["own", "all"])
def test_constant_keys_commute_with_the_group(keys):
    layer = attention_for(spaces.PLANE["D6"](), encoding=RotaryEncoding(constant_keys=True), size=3, keys=keys)
    torch.nn.init.normal_(layer.plain.project_in.bias)
    x = spaces.random_field(layer.in_type, 4, 4)
    assert turned_error(layer, x) < TOLERANCE
    # A constant that differs from pose to pose is no constant field.
    make = layer.plain.to_heads
    layer.plain.to_heads = lambda x: (lambda q, k, v: (q, k + torch.arange(12.0).double().view(-1, 1), v))(*make(x))
    assert turned_error(layer, x) > 1e-3


def test_constant_keys_between_points_by_the_formula():
    layer = ea.PointSelfAttention(
        mixed(D3), mixed(D3), 2, head_fields=4, keys="own", encoding=RotaryEncoding(constant_keys=True)
    ).double()
    x = cloud(mixed(D3), 5)
    assert worst_error(layer, x) < TOLERANCE
    edges = torch.tensor([[0, 1, 2, 2, 1, 3, 4], [1, 1, 1, 0, 3, 2, 4]])
    assert bool((layer.plain.to_heads(x.tensor.unsqueeze(0))[1] == 1).all())
    torch.testing.assert_close(layer(x, edges).tensor, written_out(layer, x, edges), rtol=1e-10, atol=1e-12)


def test_constant_keys_need_rotations_of_all_channels():
    fields = spaces.regular(D3, 1)
    for options, encoding in (({"head_fields": 3}, {}), ({"head_fields": 4}, {"num_frequencies": 1})):
        with pytest.raises(ValueError, match=r"constant_keys=True.* rotates 2 of the .* set head_fields"):
            ea.GroupSelfAttention(fields, fields, encoding=RotaryEncoding(constant_keys=True, **encoding), **options)
    alone = spaces.regular(spaces.POINT["D4 on a point"](), 2)
    with pytest.raises(ValueError, match=r"constant_keys=True.* no offsets to rotate by"):
        ea.GroupSelfAttention(alone, alone, encoding=RotaryEncoding(constant_keys=True))
    with pytest.raises(TypeError, match="constant_keys: got 1, needed True or False"):
        RotaryEncoding(constant_keys=1)
