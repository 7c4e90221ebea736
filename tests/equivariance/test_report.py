"""Reports of how exactly modules commute with their groups."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from escnn import gspaces, nn
from escnn.group import SO2

import escnn_attention
from escnn_attention import (
    AntialiasedPool,
    FieldLayerNorm,
    GroupSelfAttention,
    PointSelfAttention,
    PointTransformerBlock,
    SiLU,
    assert_equivariant,
    equivariance_report,
)
from escnn_attention.equivariance.features import features_on_grid
from escnn_attention.equivariance.report import convolution_beside, inner_layers
from escnn_attention.models import EquivariantClassifier, FieldUNet, ResidualBlock
from tests import spaces


class Pointwise(nn.EquivariantModule):
    """Whatever function of the features."""

    def __init__(self, in_type, function):
        super().__init__()
        self.in_type = self.out_type = in_type
        self.function = function

    def forward(self, input):
        return nn.GeometricTensor(self.function(input.tensor), self.out_type)

    def evaluate_output_shape(self, input_shape):
        return input_shape


def ramp(x):
    """Depends on the position along one axis."""
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def first_channel(x):
    """Depends on the order of the poses."""
    return x + x[:, :1]


@pytest.fixture(scope="module")
def c4():
    return spaces.regular(gspaces.rot2dOnR2(4), 1)


@pytest.fixture(scope="module")
def strided(c4):
    return nn.SequentialModule(nn.ReLU(c4), nn.R2Conv(c4, c4, 3, padding=1, stride=2), nn.ReLU(c4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_exact_layers_are_exact(make):
    gspace = make()
    field_type = spaces.mixed(gspace)
    space = spaces.shape_of(gspace, 4)
    report = equivariance_report(FieldLayerNorm(field_type), (1, field_type.size, *space))
    assert report.relative_error <= 1e-14
    assert 0 < report.absolute_error <= 1e-13 or gspace.fibergroup.order() == 1
    # Every element is reported, and marked where the grid does not come back onto itself.
    assert [r.element for r in report.rows if r.exact] == spaces.grid_elements(gspace)
    assert {r.element for r in report.rows} == set(gspace.fibergroup.elements)


@pytest.mark.parametrize("function", [ramp, first_channel])
def test_a_broken_layer_is_reported_by_name(c4, function):
    network = nn.SequentialModule(nn.ReLU(c4), Pointwise(c4, function), nn.ELU(c4))
    report = equivariance_report(network, (2, 4, 5, 5))
    assert report.relative_error > 1e-2
    assert report.layers == ("0 (ReLU)", "1 (Pointwise)", "2 (ELU)")
    assert report.inexact_layers == ("1 (Pointwise)",)
    assert "NOT equivariant" in str(report)
    assert "1 (Pointwise) loses exactness at input size 5×5" in str(report)
    with pytest.raises(AssertionError, match=r"(?s)not equivariant\n.*1 \(Pointwise\) loses"):
        assert_equivariant(network, (2, 4, 5, 5))


def test_the_error_is_that_of_the_definition(c4):
    """The norm of m(g x) - g m(x) over that of m(x), element by element."""
    module = Pointwise(c4, first_channel)
    report = equivariance_report(module, (2, 4, 5, 5), layers=False, seed=3)
    x = c4(torch.randn(2, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    output = module(x).tensor
    for row, g in zip(report.rows, c4.fibergroup.elements, strict=True):
        difference = module(x.transform(g)).tensor - module(x).transform(g).tensor
        assert row.element == g
        assert row.exact
        assert row.absolute == pytest.approx(difference.abs().max().item(), abs=1e-14)
        assert row.mean == pytest.approx(difference.abs().mean().item(), abs=1e-14)
        assert row.scale == pytest.approx(output.abs().max().item())
        assert row.relative == pytest.approx((difference.norm() / output.norm()).item(), abs=1e-14)


def test_strides_are_found_with_the_sizes_at_which_they_are_exact(c4, strided):
    """By the name of the layer, or that of its class where the module is not sequential."""
    for module, name in ((strided, "1 (R2Conv)"), (nn.R2Conv(c4, c4, 3, padding=1, stride=2), "R2Conv")):
        report = equivariance_report(module, (1, 4, 8, 8))
        assert report.inexact_layers == (name,)
        assert report.exact_sizes == {name: ((7, 7), (9, 9))}
        assert report.relative_error > 1e-2
        assert f"{name} loses exactness at input size 8×8" in str(report)
        assert "exact at 7×7, 9×9" in str(report)
        assert equivariance_report(module, (1, 4, 8, 8), layers=False).layers == ()
        assert_equivariant(module, (1, 4, 9, 9))
        exact = equivariance_report(module, (1, 4, 9, 9))
        assert (exact.inexact_layers, exact.exact_sizes) == ((), {})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("size", range(5, 11))
@pytest.mark.slow
def test_the_sizes_that_are_named_are_those_at_which_the_network_is_exact(stride, size):
    space = gspaces.rot2dOnR2(4)
    vectors = nn.FieldType(space, [space.irrep(1)])
    unet = FieldUNet(space, vectors, vectors, widths=(1, 1), convolutions=1, attention=(0, 0))  # at every size
    network = nn.SequentialModule(unet, nn.R2Conv(vectors, vectors, 3, padding=1, stride=stride))
    report = equivariance_report(network, (1, 2, size, size))
    exact = [n for n in range(1, 15) if (n - 1) % stride == 0]
    if size in exact:
        assert report.exact_sizes == {}
        assert report.relative_error < 1e-10
        return
    near = max(n for n in exact if n < size), min(n for n in exact if n > size)
    assert report.exact_sizes == {"1 (R2Conv)": tuple((n, n) for n in near)}
    assert report.relative_error > 1e-3
    assert all(equivariance_report(network, (1, 2, n, n), layers=False).relative_error < 1e-10 for n in near)


def test_pooling_is_found(c4):
    pooling = nn.SequentialModule(nn.SequentialModule(SiLU(c4), nn.PointwiseMaxPool2D(c4, 2)), nn.ReLU(c4))
    assert_equivariant(pooling, (1, 4, 10, 10), 1e-12)
    report = equivariance_report(pooling, (1, 4, 9, 9))
    assert report.layers == ("0.0 (SiLU)", "0.1 (PointwiseMaxPool2D)", "1 (ReLU)")
    assert report.exact_sizes == {"0.1 (PointwiseMaxPool2D)": ((8, 8), (10, 10))}
    shapes = {row.layer: row.input_shape for row in report.rows}
    assert shapes["0.1 (PointwiseMaxPool2D)"] == (1, 4, 9, 9)
    assert shapes["1 (ReLU)"] == (1, 4, 4, 4)


def test_grids_that_are_not_square(c4):
    report = equivariance_report(GroupSelfAttention(c4, c4, kernel_size=3), (1, 4, 4, 6))
    assert report.relative_error <= 1e-13
    assert all(row.exact for row in report.rows)
    pooling = nn.SequentialModule(nn.PointwiseAvgPool2D(c4, 2))
    assert_equivariant(pooling, (1, 4, 4, 6), 1e-12)
    assert equivariance_report(pooling, (1, 4, 5, 7)).exact_sizes == {"0 (PointwiseAvgPool2D)": ((4, 6), (6, 8))}


def test_elements_that_do_not_map_the_grid_are_marked_and_left_out():
    field_type = spaces.regular(gspaces.rot2dOnR2(8), 1)
    report = equivariance_report(GroupSelfAttention(field_type, field_type, kernel_size=3), (1, 8, 9, 9))
    assert [row.exact for row in sorted(report.rows, key=lambda r: r.element.value)] == [True, False] * 4
    interpolated = [row.relative for row in report.rows if not row.exact]
    assert min(interpolated) > 1e-3  # the interpolation errs
    assert report.relative_error <= 1e-13
    assert report.absolute_error <= 1e-12
    assert str(report).count("interpolated") == 4
    assert str(report).endswith("at most 1e-06")
    # Broken for these elements only, nothing is said: it cannot be told from interpolation.
    assert_equivariant(GroupSelfAttention(field_type, field_type, kernel_size=3), (1, 8, 9, 9), 1e-12)


@pytest.mark.slow
def test_a_continuous_group():
    gspace = gspaces.rot2dOnR2(-1)
    vectors = nn.FieldType(gspace, [gspace.irrep(1)])
    network = nn.SequentialModule(nn.R2Conv(vectors, vectors, 3, padding=1), nn.NormNonLinearity(vectors))
    report = equivariance_report(network, (1, 2, 7, 7))
    assert report.relative_error < 1e-6
    assert sum(row.exact for row in report.rows if row.layer == "whole module") == 4
    broken = nn.SequentialModule(Pointwise(vectors, first_channel))
    assert equivariance_report(broken, (1, 2, 7, 7)).inexact_layers == ("0 (Pointwise)",)


@pytest.mark.slow
def test_a_continuous_group_in_space():
    """All turns of the cube map the grid onto itself; the others of the icosahedron are interpolated."""
    gspace = gspaces.rot3dOnR3()
    vectors = nn.FieldType(gspace, [gspace.irrep(1)])
    report = equivariance_report(FieldLayerNorm(vectors), (1, 3, 3, 3, 3))
    assert (sum(row.exact for row in report.rows), len(report.rows)) == (24, 72)
    assert report.relative_error < 1e-7
    assert not equivariance_report(Pointwise(vectors, first_channel), (1, 3, 3, 3, 3)).relative_error < 1e-2


def test_no_base_space():
    field_type = spaces.regular(spaces.POINT["D4 on a point"](), 2)
    assert_equivariant(
        nn.SequentialModule(GroupSelfAttention(field_type, field_type, kernel_size=None)), (3, 16), 1e-13
    )
    report = equivariance_report(nn.SequentialModule(Pointwise(field_type, first_channel)), (3, 16))
    assert report.exact_sizes == {"0 (Pointwise)": ()}
    assert "0 (Pointwise) is not equivariant (relative error " in str(report)
    assert "size" not in str(report)


def test_sets_of_tokens_of_a_continuous_group():
    """Of a block, whose parts are looked at one by one."""
    gspace = gspaces.no_base_space(SO2(1))
    fields = nn.FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1)])
    block = PointTransformerBlock(fields, fields, head_fields=3, hidden_fields=2, samples=4)
    report = equivariance_report(block, (6, 3))
    assert "\nPointTransformerBlock is not equivariant" in str(report)
    assert block(fields(torch.randn(6, 3))).coords is None


def test_to_dict_is_plain_data(strided):
    report = equivariance_report(strided, (1, 4, 8, 8))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["inexact_layers"] == ["1 (R2Conv)"]
    assert data["exact_sizes"] == {"1 (R2Conv)": [[7, 7], [9, 9]]}
    assert data["relative_error"] == report.relative_error
    assert data["absolute_error"] == report.absolute_error
    assert data["tolerance"] == 1e-6
    assert len(data["rows"]) == 4 * 4  # the whole and three layers, four elements
    assert data["rows"][0] == {
        **{key: getattr(report.rows[0], key) for key in ("exact", "absolute", "mean", "scale", "relative")},
        "layer": "whole module",
        "input_shape": [1, 4, 8, 8],
        "element": str(report.rows[0].element),
    }


def test_the_table_lists_every_element_and_layer(strided):
    report = equivariance_report(strided, (1, 4, 9, 9))
    lines = str(report).splitlines()
    assert lines[0].split() == ["element", "absolute", "relative"]
    for element, line in zip(strided.in_type.fibergroup.elements, lines[1:5], strict=True):
        assert line.startswith(str(element))
    assert lines[6].split() == ["layer", "input", "absolute", "relative"]
    assert [line.split()[2] for line in lines[7:10]] == ["9×9", "9×9", "5×5"]
    assert lines[-1].startswith("equivariant: relative error")


@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_not_changed(c4, training):
    network = nn.SequentialModule(
        nn.R2Conv(c4, c4, 3, padding=1, stride=2),
        nn.InnerBatchNorm(c4),
        GroupSelfAttention(c4, c4, kernel_size=None),
        nn.FieldDropout(c4),
    )
    network.train(training)
    # A convolution in eval mode holds tensors that belong to a graph.
    state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    flags = [m.training for m in network.modules()]
    rng = torch.get_rng_state()
    equivariance_report(network, (1, 4, 6, 6))
    assert [m.training for m in network.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    assert list(network.state_dict()) == list(state)
    for name, tensor in network.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])
    assert all(p.grad is None and p.requires_grad for p in network.parameters())


def test_the_seed_decides(c4):
    first, again, other = (equivariance_report(Pointwise(c4, ramp), (1, 4, 5, 5), seed=s) for s in (1, 1, 2))
    assert first.rows == again.rows
    assert first.absolute_error != other.absolute_error


def only_upright(x):
    """NaN unless the largest value is in the first column."""
    return x if x.abs().amax((0, 1, 2)).argmax() == 0 else x * math.nan


@pytest.mark.parametrize("function", [lambda x: x * math.nan, only_upright])
def test_nan_is_a_failure(c4, function):
    network = nn.SequentialModule(nn.ReLU(c4), Pointwise(c4, function))
    seed = next(s for s in range(100) if upright(s))
    report = equivariance_report(network, (1, 4, 5, 5), seed=seed)
    assert math.isnan(report.relative_error)
    assert math.isnan(report.absolute_error)
    assert report.inexact_layers == ("1 (Pointwise)",)
    assert "NOT equivariant" in str(report)
    with pytest.raises(AssertionError, match="NOT equivariant"):
        assert_equivariant(network, (1, 4, 5, 5), seed=seed)


def upright(seed):
    """Whether ``only_upright`` lets the random features of this seed through."""
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).relu()
    return not only_upright(x).isnan().any()


def test_a_layer_that_gives_zeros_is_equivariant(c4):
    assert equivariance_report(Pointwise(c4, torch.zeros_like), (1, 4, 5, 5)).relative_error == 0


def test_the_tolerance_decides(c4):
    nearly = nn.SequentialModule(Pointwise(c4, lambda x: x + 1e-8 * ramp(x)))
    error = equivariance_report(nearly, (1, 4, 5, 5)).relative_error
    assert 1e-9 < error < 1e-6
    assert equivariance_report(nearly, (1, 4, 5, 5), tolerance=error / 2).inexact_layers == ("0 (Pointwise)",)
    assert_equivariant(nearly, (1, 4, 5, 5), tolerance=error)
    with pytest.raises(AssertionError):
        assert_equivariant(nearly, (1, 4, 5, 5), tolerance=error / 2)


def test_wrong_arguments(c4):
    with pytest.raises(TypeError, match=r"module: got ReLU"):
        equivariance_report(torch.nn.ReLU(), (1, 4, 5, 5))
    with pytest.raises(TypeError, match="module"):
        assert_equivariant(torch.nn.ReLU(), (1, 4, 5, 5))
    network = EquivariantClassifier({"relu": nn.ReLU(c4)}, 2)
    with pytest.raises(TypeError, match=r"module: .*its as_fields\(\)"):
        equivariance_report(network, (1, 4, 5, 5))
    for shape in (4, 5, 5), (1, 4, 5), (1, 3, 5, 5), (1, 4, 5, 5, 5):
        with pytest.raises(ValueError, match=r"input_shape: got .*batch, 4"):
            equivariance_report(nn.ReLU(c4), shape)


def test_a_module_that_changes_shapes_differently_says_so(c4):
    with pytest.raises(ValueError, match=r"whole module: .*\(1, 4, 4, 6\)"):
        equivariance_report(Pointwise(c4, lambda x: x.repeat(1, 1, 1, 2)), (1, 4, 3, 4))


def test_reports_are_values(strided):
    report = equivariance_report(strided, (1, 4, 8, 8))
    assert copy.deepcopy(report) == report
    assert isinstance(report, escnn_attention.EquivarianceReport)


def test_clouds_of_points():
    """Every element is exact on points; a layer with a broken table is not equivariant."""
    from escnn_attention import PointSelfAttention

    space = gspaces.flipRot2dOnR2(5)
    fields = nn.FieldType(space, 2 * [space.regular_repr])
    network = nn.SequentialModule(PointSelfAttention(fields, fields, num_heads=2), FieldLayerNorm(fields))
    report = equivariance_report(network, (7, fields.size))
    assert all(row.exact for row in report.rows)
    assert len(report.rows) == 3 * space.fibergroup.order()
    assert report.relative_error < 1e-12
    assert_equivariant(network, (4, fields.size), 1e-12, coords=torch.randn(4, 2))
    attention = network[0]
    assert isinstance(attention, PointSelfAttention)
    attention.plain.quotient = attention.plain.quotient.flip(0)
    report = equivariance_report(network, (7, fields.size))
    assert report.inexact_layers == ("0 (PointSelfAttention)",)
    assert "0 (PointSelfAttention) is not equivariant" in str(report)
    for shape, coords in (((7, fields.size), torch.randn(7, 3)), ((1, fields.size, 5, 5), torch.randn(1, 2))):
        with pytest.raises(ValueError, match="coords"):
            equivariance_report(network, shape, coords=coords)


def test_interpolated_elements_have_the_error_of_a_convolution_beside_them():
    fields = spaces.scalars(gspaces.rot2dOnR2(8), 2)
    net = nn.SequentialModule(GroupSelfAttention(fields, fields, 1, 3))
    state, alike = torch.get_rng_state(), nn.R2Conv(fields, fields, 3, initialize=False)
    report = equivariance_report(net, (1, 2, 15, 15))
    assert torch.equal(torch.get_rng_state(), state)
    assert {basis.dtype for basis in alike.basisexpansion.buffers()} == {torch.float32}
    interpolated = [row.element for row in report.rows if row.layer == "whole module" and not row.exact]
    assert list(report.convolution) == interpolated
    assert len(interpolated) == 4
    x = features_on_grid(net, (1, 2, 15, 15), seed=0, smooth=True)
    convolution = convolution_beside(x, seed=0)
    with torch.no_grad():
        y = convolution(x)
    for g in interpolated:
        error = float((convolution(x.transform(g)).tensor - y.transform(g).tensor).norm().detach() / y.tensor.norm())
        assert report.convolution[g] == pytest.approx(error)
        assert 1e-4 < error < 0.5
        assert f"interpolated; one convolution: {error:.1e}" in str(report)
    assert report.to_dict()["convolution"] == {str(g): error for g, error in report.convolution.items()}


@pytest.mark.usefixtures("double")
def test_the_default_precision_does_not_matter():
    fields = spaces.scalars(gspaces.rot2dOnR2(8), 1)
    assert len(equivariance_report(nn.IdentityModule(fields), (1, 1, 7, 7)).convolution) == 4
    assert torch.get_default_dtype() == torch.float64


def test_no_convolution_where_escnn_has_no_kernel():
    space = gspaces.flipRot2dOnR2(-1)
    fields = nn.FieldType(space, [space.irrep(1, 2).tensor(space.irrep(1, 2))])
    report = equivariance_report(SiLU(spaces.scalars(space, 1)), (1, 1, 7, 7))
    assert report.convolution
    report = equivariance_report(nn.IdentityModule(fields), (1, fields.size, 7, 7))
    assert report.convolution == {}
    assert "interpolated" in str(report)


@pytest.mark.parametrize("make", [lambda: gspaces.rot2dOnR2(4), lambda: spaces.POINT["D4 on a point"]()])
def test_no_convolution_where_nothing_is_interpolated(make):
    space = make()
    fields = spaces.regular(space, 1)
    shape = (1, fields.size, *spaces.shape_of(space, 4))
    report = equivariance_report(nn.IdentityModule(fields), shape)
    assert report.convolution == {}
    assert "one convolution" not in str(report)


def test_in_space():
    space = gspaces.rot3dOnR3()
    fields = nn.FieldType(space, [space.trivial_repr, space.irrep(1), space.irrep(1)])
    convolution = convolution_beside(fields(torch.randn(1, 7, 3, 3, 3)), seed=0)
    assert isinstance(convolution, nn.R3Conv)
    assert convolution.out_type.size == 4


C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 1)


class Branches(nn.EquivariantModule):
    """A convolution beside a pooling that loses exactness at even sizes, in dictionaries and sequences."""

    def __init__(self, pool):
        super().__init__()
        self.in_type = self.out_type = FIELDS
        self.inside = torch.nn.ModuleDict({"first": nn.SequentialModule(nn.ReLU(FIELDS), pool)})

    def forward(self, x):
        return self.inside["first"](x)

    def evaluate_output_shape(self, input_shape):
        return self.inside["first"].evaluate_output_shape(input_shape)


def antialiased():
    return nn.PointwiseAvgPoolAntialiased2D(FIELDS, sigma=0.66, stride=2)


def test_the_report_names_what_is_inside():
    report = equivariance_report(Branches(antialiased()), (1, 4, 8, 8))
    pool = "inside.first.1 (PointwiseAvgPoolAntialiased2D)"
    assert report.inexact_layers == ("Branches", pool)
    assert report.exact_sizes[pool] == ((7, 7), (9, 9))
    sequential = equivariance_report(nn.SequentialModule(nn.ReLU(FIELDS), Branches(antialiased())), (1, 4, 8, 8))
    assert sequential.inexact_layers == ("1 (Branches)", f"1.{pool}")
    exact = equivariance_report(Branches(antialiased()), (1, 4, 9, 9))
    assert (exact.inexact_layers, exact.layers, exact.exact_sizes) == ((), (), {})


def test_inputs_are_those_of_the_layers():
    block = ResidualBlock(FIELDS, FIELDS).eval()
    x = spaces.random_field(FIELDS, 5, 5, dtype=torch.float32)
    found = inner_layers(block, x)
    assert len(found) == 7
    for layer, given in found.values():
        assert given.type == layer.in_type
    assert torch.equal(next(iter(found.values()))[1].tensor, x.tensor)
    assert not any(m._forward_pre_hooks for m in block.modules())


def test_rolls_on_tori():
    """Of a network whose layers are all on one, and of one with a layer that is not; and periods of points."""
    g = gspaces.flipRot2dOnR2(4)
    fields = nn.FieldType(g, [g.regular_repr])
    torus = {"kernel_size": 3, "padding_mode": "circular"}
    on_torus = GroupSelfAttention(fields, fields, **torus)
    report = equivariance_report(on_torus, (1, 8, 5, 6))
    assert list(report.rolls) == ["roll along axis 0", "roll along axis 1"]
    assert max(report.rolls.values()) < 1e-12
    assert "roll along axis 1" in str(report)
    assert "NOT" not in str(report)
    ends = nn.SequentialModule(on_torus, nn.R2Conv(fields, fields, 3, padding=1))
    report = equivariance_report(ends, (1, 8, 5, 6))
    assert min(report.rolls.values()) > 1e-3
    assert "NOT equivariant to rolls" in str(report)
    assert report.to_dict()["rolls"] == report.rolls
    assert equivariance_report(GroupSelfAttention(fields, fields, kernel_size=3), (1, 8, 5, 5)).rolls == {}
    halved = nn.SequentialModule(on_torus, AntialiasedPool(fields, padding_mode="circular"), on_torus)
    assert list(equivariance_report(halved, (1, 8, 6, 8)).rolls) == ["roll by 2 along axis 0", "roll by 2 along axis 1"]
    report = equivariance_report(PointSelfAttention(fields, fields, period=2.0, radius=0.8), (9, 8))
    assert report.rolls["shift by 2.0"] < 1e-12
    assert equivariance_report(PointSelfAttention(fields, fields, radius=0.8), (9, 8)).rolls == {}


def test_elements_that_are_asked_for():
    g = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(g, [g.regular_repr])
    blocks = nn.PointwiseMaxPool2D(fields, 2)  # which leave out a column of odd sides
    half = [g.fibergroup.element(0), g.fibergroup.element(2)]
    report = equivariance_report(blocks, (1, 4, 8, 9), elements=half)
    assert [row.element for row in report.rows if row.layer == "whole module"] == half
    assert report.relative_error > 0.1
    assert equivariance_report(blocks, (1, 4, 8, 9), elements=half[:1]).relative_error < 1e-12
    with pytest.raises(ValueError, match="elements: got none"):
        equivariance_report(blocks, (1, 4, 8, 9), elements=[])
    with pytest.raises(ValueError, match="elements: got one of C8, needed those of C4"):
        equivariance_report(blocks, (1, 4, 8, 9), elements=gspaces.rot2dOnR2(8).fibergroup.elements)


@pytest.mark.parametrize("widths", [(2, 2), (2, 2, 2)])
def test_rolls_of_networks_that_halve_the_grid(widths):
    """Networks of L levels commute with rolls by 2^(L - 1) positions; with zeros beyond the border, with none."""
    g = gspaces.rot2dOnR2(4)
    options = {"widths": widths, "attention": (0,) * (len(widths) - 1) + (1,), "num_heads": 1, "kernel_size": 3}
    torus = FieldUNet(g, 1, 1, **options, padding_mode="circular")
    step, sides = 2 ** (len(widths) - 1), (12, 12)
    report = equivariance_report(torus, (1, 1, *sides), layers=False)
    assert list(report.rolls) == [f"roll by {step} along axis {axis}" for axis in (0, 1)]
    assert max(report.rolls.values()) < 1e-10
    assert "NOT" not in str(report)
    for part in torus.modules():
        if isinstance(part, nn.R2Conv) and part.padding == 1:
            part.padding_mode = "zeros"
    report = equivariance_report(torus, (1, 1, *sides), layers=False)
    assert list(report.rolls) == ["roll along axis 0", "roll along axis 1"]
    assert "NOT equivariant to rolls" in str(report)


def restricted(space, *ids):
    """Attention between restrictions to one subgroup after the other."""
    fields = nn.FieldType(
        space, 2 * [space.irrep(1) if space.fibergroup.name in ("C8", "SO(2)") else space.irrep(1, 1)]
    )
    layers = []
    for id in ids:
        layers += [nn.RestrictionModule(fields, id), nn.DisentangleModule(fields.restrict(id))]
        fields = layers[-1].out_type
        layers.append(GroupSelfAttention(fields, fields, kernel_size=3, head_fields=2))
    return nn.SequentialModule(*layers)


@pytest.mark.parametrize(
    ("make", "ids", "elements"),
    [
        (lambda: gspaces.rot2dOnR2(8), [4, 2], ["0[2pi/8]", "4[2pi/8]"]),
        (lambda: gspaces.flipRot2dOnR2(8), [(None, 4)], [f"(+, {2 * i}[2pi/8])" for i in range(4)]),
        (lambda: gspaces.rot2dOnR2(-1), [2], ["0.0", f"{math.pi}"]),
    ],
)
def test_restrictions_to_subgroups(make, ids, elements):
    network = restricted(make(), *ids)
    report = equivariance_report(network, (1, 4, 5, 5))
    assert list(dict.fromkeys(str(row.element) for row in report.rows)) == elements
    assert report.relative_error < 1e-12
    last = network[len(network) - 1].out_type
    spoiled = nn.SequentialModule(network, Pointwise(last, ramp))
    assert equivariance_report(spoiled, (1, 4, 5, 5)).relative_error > 1e-3


class Restricts(Pointwise):
    """Restricts its features to C2, unseen."""

    def forward(self, input):
        return input.restrict(2)


def test_restrictions_that_no_module_tells(c4):
    with pytest.raises(ValueError, match=r"module: .*C2.*RestrictionModule"):
        equivariance_report(Restricts(c4, None), (1, 4, 3, 3))


def test_layers_of_escnn_that_round_to_single_precision():
    pool = nn.GroupPooling(FIELDS)
    network = nn.SequentialModule(pool, GroupSelfAttention(pool.out_type, FIELDS, kernel_size=3))
    assert_equivariant(network, (1, FIELDS.size, 5, 5), tolerance=1e-12)


def test_elements_of_space_take_one_line():
    space = gspaces.rot3dOnR3()
    norm = FieldLayerNorm(nn.FieldType(space, 2 * [space.irrep(1)]))
    report = equivariance_report(norm, (1, 6, 2, 2, 2))
    assert len(str(report).splitlines()) == len(report.rows) + 3
