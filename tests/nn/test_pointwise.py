"""The ends of branches, and blocks, layers and networks with them."""

import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

import escnn_attention as ea
from escnn_attention import GELU, PoseLinear, SiLU
from escnn_attention.models import GSANet, HybridNet, PointTransformer
from escnn_attention.nn.pointwise import activation_of, depth_rates, plain_activation
from tests import spaces
from tests.layers import CASES, drawn
from tests.nn.points import cloud

C4 = gspaces.rot2dOnR2(4)

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "relu": lambda x: x * (x > 0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_is_the_formula(name):
    field_type = FieldType(C4, [C4.quotient_repr(2), C4.regular_repr])
    x = spaces.random_field(field_type, 3, 3)
    expected = FORMULAS[name](x.tensor)
    torch.testing.assert_close(activation_of(field_type, name)(x).tensor, expected)
    torch.testing.assert_close(plain_activation(name)(x.tensor), expected)
    assert (x.tensor < 0).any()  # and the input is left as it was


def test_names():
    fields = spaces.regular(C4, 1)
    assert isinstance(activation_of(fields, "silu"), SiLU)
    assert isinstance(activation_of(fields, "gelu"), GELU)
    for make in (lambda name: activation_of(fields, name), plain_activation):
        with pytest.raises(ValueError, match=r"activation: .*needed one of"):
            make("tanh")


def test_fields_without_pointwise_nonlinearities_are_refused():
    """Rightly: on them the function does not commute with the group."""
    gspace = gspaces.flipRot2dOnR2(4)
    field_type = FieldType(gspace, [gspace.regular_repr, gspace.irrep(1, 0), gspace.irrep(1, 1)])
    with pytest.raises(ValueError, match=r"in_type: .*irrep_1,1 does"):
        SiLU(field_type)
    for name in FORMULAS:
        with pytest.raises(ValueError, match=r"every channel .*irrep_1,0, irrep_1,1"):
            activation_of(field_type, name)
    module = SiLU(spaces.regular(gspace, 1))
    module.in_type = module.out_type = FieldType(gspace, [gspace.irrep(1, 1)])
    assert spaces.grid_error(module, spaces.random_field(module.in_type, 3, 3)) > 1e-2


def test_wrong_type_is_refused():
    with pytest.raises(TypeError, match="in_type: got int"):
        SiLU(3)


def test_a_weight_of_its_own_for_every_pose_would_break_it():
    """The negative control: an ordinary 1×1 convolution is not equivariant."""

    class Ordinary(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = torch.nn.Linear(size, size)

        def forward(self, x):
            return self.linear(x.movedim(1, -1)).movedim(-1, 1)

    regular = spaces.regular(C4, 2)
    module = PoseLinear(regular, regular).double()
    module.plain = Ordinary(8).double()
    assert spaces.grid_error(module, spaces.random_field(regular, 3, 3)) > 1e-2


@pytest.mark.parametrize("projection", ["group", "pointwise"])
def test_maps_of_no_points(projection):
    fields = spaces.regular(C4, 2)
    nothing = GeometricTensor(torch.zeros(0, 8), fields, torch.zeros(0, 2))
    assert PoseLinear(fields, fields, projection=projection)(nothing).tensor.shape == (0, 8)


def test_biases():
    regular, vectors = spaces.regular(C4, 2), FieldType(C4, [C4.irrep(1)])
    assert PoseLinear(vectors, regular).plain.projection.bias.shape == (2,)
    assert PoseLinear(regular, spaces.mixed(C4)).plain.projection.bias.shape == (2,)
    assert len(list(PoseLinear(regular, vectors).parameters())) == 1  # nothing invariant to add
    for types in (vectors, regular), (regular, spaces.mixed(C4)):
        module = PoseLinear(*types, bias=False)
        assert len(list(module.parameters())) == 1
        zero = types[0](torch.zeros(1, types[0].size, 2, 2))
        assert not module(zero).tensor.any()


def test_wrong_arguments():
    gspace, continuous = C4, gspaces.rot2dOnR2(-1)
    regular, mixed = spaces.regular(gspace, 1), spaces.mixed(gspace)
    vectors = FieldType(continuous, [continuous.irrep(1)])
    for types, projection, error, message in (
        (("regular", regular), "group", TypeError, "in_type: got str"),
        ((regular, None), "group", TypeError, "out_type: got NoneType"),
        ((regular, spaces.regular(gspaces.rot2dOnR2(3), 1)), "group", ValueError, "out_type: .*C3.*C4"),
        ((mixed, mixed), "group", ValueError, "in_type: .*regular fields only"),
        ((mixed, regular), "pointwise", ValueError, "in_type: .*irrep_0, irrep_2"),
        ((regular, mixed), "pointwise", ValueError, 'out_type: projection="pointwise" needs regular'),
        ((regular, regular), "none", ValueError, "projection: .*needed one of"),
        ((vectors, vectors), "group", NotImplementedError, "gspace: .* continuous"),
    ):
        with pytest.raises(error, match=message):
            PoseLinear(*types, projection=projection)


PARTS = {"layer_scale": 0.5, "drop_path": 0.5, "qk_norm": True}


def test_a_gain_of_each_channel_is_not_equivariant():
    fields = spaces.mixed(C4)
    scale, x = drawn(ea.LayerScale(fields)), spaces.random_field(fields, 3, 3)
    assert spaces.grid_error(scale, x) < 1e-12
    scale.plain.gain = torch.nn.Parameter(torch.randn(fields.size).double())
    scale.plain.field = torch.arange(fields.size)
    assert spaces.grid_error(scale, x) > 1e-2


def test_gains_of_poses_are_not_equivariant():
    """Queries and keys are normalised at each pose by itself: over the poses together they would be, too; but gains of
    poses are not the same from every pose.
    """
    fields = spaces.regular(C4, 2)
    layer, x = drawn(ea.GroupSelfAttention(fields, fields, 1, 3, qk_norm=True)), spaces.random_field(fields, 3, 3)
    assert spaces.grid_error(layer, x) < 1e-12
    plain = layer.plain.qk_norm.forward

    def by_pose(q, k):
        q, k = plain(q, k)
        return q * torch.tensor([1.0, 2.0, 3.0, 4.0]).double()[:, None], k

    layer.plain.qk_norm.forward = by_pose
    assert spaces.grid_error(layer, x) > 1e-2


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_normalised_scores_are_the_formula(backend):
    """The size of queries and keys is no matter: that of their gains is."""
    fields = spaces.regular(C4, 4)
    layer = drawn(
        ea.GroupSelfAttention(fields, fields, 2, 3, qk_norm=True, bias=False, encoding="none", backend=backend)
    )
    x = spaces.random_field(fields, 3, 3)
    y = layer(x).tensor
    q, k, _ = layer.plain.to_heads(x.tensor.movedim(1, -1))
    for normed, gain in ((q, layer.plain.qk_norm.queries), (k, layer.plain.qk_norm.keys)):
        unit = normed / gain[:, None, None, None]
        torch.testing.assert_close(unit.square().mean(-1), torch.ones_like(unit[..., 0]), rtol=1e-2, atol=0)
    with torch.no_grad():
        for rows in (slice(0, 4), slice(8, 12)):  # queries and keys of both heads
            layer.plain.project_in.weight[rows] *= 1e3
        torch.testing.assert_close(layer(x).tensor, y, rtol=1e-4, atol=1e-4)
        layer.plain.qk_norm.queries.mul_(3)
        assert (layer(x).tensor - y).abs().max() > 1e-3


def test_keys_have_a_bias_where_they_are_normalised():
    fields = spaces.regular(C4, 4)
    with_norm, without = (ea.GroupSelfAttention(fields, fields, 2, 3, qk_norm=on).plain for on in (True, False))
    assert len(with_norm.project_in.bias) - len(without.project_in.bias) == 4
    assert without.qk_norm is None
    state = with_norm.state_dict()
    assert {n for n in state if n not in without.state_dict()} == {"qk_norm.queries", "qk_norm.keys"}


def test_stochastic_depth_drops_samples_and_clouds():
    fields = spaces.mixed(C4)
    torch.manual_seed(0)
    drop = ea.DropPath(fields, 0.25)
    y = drop(fields(torch.ones(4000, fields.size, 1, 1))).tensor.flatten(1)
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    batch = torch.arange(4000) // 4
    z = drop(GeometricTensor(torch.ones(4000, fields.size), fields, torch.randn(4000, 2)), batch).tensor.flatten(1)
    assert torch.equal(z, z[::4].repeat_interleave(4, 0))
    assert (z == 0).double().mean().item() == pytest.approx(0.25, abs=0.05)
    alone = GeometricTensor(torch.ones(9, fields.size), fields, torch.randn(9, 2))
    assert {len(drop(alone).tensor.unique()) for _ in range(20)} == {1}
    assert torch.equal(drop.eval()(alone).tensor, alone.tensor)


@pytest.mark.parametrize("points", [False, True])
def test_blocks_drop_both_branches_by_sample(points):
    torch.manual_seed(0)
    fields = spaces.regular(C4, 2)
    if points:
        block, x = ea.PointTransformerBlock(fields, fields, drop_path=0.5), cloud(fields, 40)
        x = GeometricTensor(x.tensor.float(), fields, x.coords.float())
        arguments, rows = {"batch": torch.arange(40) // 4}, 10
    else:
        block, x = ea.TransformerBlock(fields, fields, 1, 3, norm="pre", drop_path=0.5), None
        x, arguments, rows = spaces.random_field(fields, 2, 2, batch=10, dtype=torch.float32), {}, 10
    with torch.no_grad():
        change = [(block(x, **arguments).tensor - x.tensor).view(rows, -1).abs().amax(1) for _ in range(20)]
    same = (torch.cat(change) == 0).double().mean().item()
    assert same == pytest.approx(0.25, abs=0.1)  # neither branch


@pytest.mark.slow
def test_networks_take_the_parts_of_blocks():
    x = torch.randn(3, 2, 9, 9)
    block = {**PARTS, "norm_kind": "batch"}
    gsa = GSANet(
        C4, 2, 3, channels=6, blocks=(2, 1), pool=(True, False), num_heads=2, kernel_size=3, block=block,
        norm_between=True,
    )  # fmt: skip
    outline = {"widths": (2, 2), "convolutions": (1, 0), "attention": (0, 3)}
    hybrid = HybridNet(C4, 2, 3, **outline, num_heads=1, kernel_size=None, block=block)
    points = PointTransformer(
        C4, 2, 3, fields=2, num_blocks=3, num_heads=1, attention={**block, "layer_scale": 0.25, "drop_path": 0.5}
    )
    for network, arguments in ((gsa, (x,)), (hybrid, (x,)), (points, (torch.randn(9, 2), torch.randn(9, 2)))):
        parts = list(network.modules())
        assert not any(isinstance(m, ea.FieldLayerNorm) for m in parts)
        assert any(isinstance(m, ea.FieldBatchNorm) for m in parts)
        assert len([m for m in parts if isinstance(m, ea.LayerScale)]) == 6
        rates = [m.plain.p for m in parts if isinstance(m, ea.DropPath)]
        assert sorted({0.0, *rates}) == [0.0, 0.25, 0.5]
        assert sum(getattr(m, "qk_norm", None) is not None for m in parts) == 3
        network(*arguments)
        torch.testing.assert_close(network.eval().export()(*arguments), network(*arguments), rtol=1e-4, atol=1e-5)


def test_without_the_parts_nothing_is_added():
    for name in ("TransformerBlock", "PointTransformerBlock", "SphereTransformerBlock", "GSANet", "PointTransformer"):
        module = CASES[name].make()
        assert not any(isinstance(m, (ea.LayerScale, ea.FieldBatchNorm)) for m in module.modules())
        assert not any("gain" in key or "qk_norm" in key for key in module.state_dict())


def test_rates_rise_by_equal_steps():
    assert depth_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert depth_rates(0.3, 1) == [0.3]


FIELDS = spaces.regular(C4, 2)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("layer_scale: got 0.*positive gain", lambda: ea.TransformerBlock(FIELDS, FIELDS, 1, 3, layer_scale=0)),
        ("drop_path: got 1", lambda: ea.TransformerBlock(FIELDS, FIELDS, 1, 3, drop_path=1)),
        ("drop_path: got 1", lambda: ea.PointTransformerBlock(FIELDS, FIELDS, drop_path=1)),
        ("norm_kind: got 'group'", lambda: ea.TransformerBlock(FIELDS, FIELDS, 1, 3, norm_kind="group")),
        (
            "norm_scope: got 'pose'",
            lambda: ea.TransformerBlock(FIELDS, FIELDS, norm_kind="batch", norm_scope="pose", kernel_size=None),
        ),
        ("initial: got -1", lambda: ea.LayerScale(FIELDS, -1)),
        ("p: got 2", lambda: ea.DropPath(FIELDS, 2)),
        (
            "qk_norm: got True, but the scores of this PairKernel",
            lambda: ea.PointSelfAttention(FIELDS, FIELDS, encoding=ea.PairKernel("none"), qk_norm=True),
        ),
        (
            "qk_norm: got True, but a ConvolutionalEncoding begins",
            lambda: ea.GroupSelfAttention(FIELDS, FIELDS, 1, 3, encoding="convolutional", qk_norm=True),
        ),
    ],
)
def test_bad_arguments(message, make):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_parts():
    for name in ("qk_norm", "bias"):
        with pytest.raises(TypeError, match=rf"{name}: .*needed True or"):
            ea.GroupSelfAttention(FIELDS, FIELDS, kernel_size=None, **{name: 1})
    with pytest.raises(TypeError, match=r"gain: .*such option"):
        HybridNet(C4, 1, 2, block={"gain": 1})
    with pytest.raises(TypeError, match=r"query: .*such option"):
        GSANet(C4, 1, 2, channels=6, blocks=(1,), block={"query": "own"})
