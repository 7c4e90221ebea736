"""Batch norm of fields."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor, InnerBatchNorm
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import (
    FieldBatchNorm,
    FieldLayerNorm,
    PointTransformerBlock,
    SphereTransformerBlock,
    TransformerBlock,
)
from escnn_attention.functional import norms
from tests import spaces
from tests.layers import assert_formula, redrawn

C4 = gspaces.rot2dOnR2(4)


def offset(field_type, size=4):
    """Features whose mean is far from zero."""
    x = spaces.random_field(field_type, *spaces.shape_of(field_type.gspace, size))
    x.tensor = 2 * x.tensor + 5
    return x


def a_mean_of_irreps(plain):
    plain.mean.fill_(1)


def a_bias_on_irreps(plain):
    plain.invariants.fill_(1)


def a_scale_for_each_channel(plain):
    size = len(plain.field)
    plain.field, plain.weight = torch.arange(size), torch.nn.Parameter(torch.randn(size).double())


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (partial(FieldLayerNorm, kind="layer"), a_mean_of_irreps),
        (partial(FieldLayerNorm, kind="layer"), a_bias_on_irreps),
        (partial(FieldLayerNorm, kind="rms"), a_scale_for_each_channel),
        (partial(FieldLayerNorm, scope="sample", kind="layer", num_groups=2), a_mean_of_irreps),
        (FieldBatchNorm, a_mean_of_irreps),
    ],
)
def test_what_would_break_it(make, spoil):
    gspace = gspaces.flipRot2dOnR2(4)
    vector = gspace.irrep(1, 1)
    field_type = FieldType(gspace, [vector, gspace.trivial_repr, gspace.regular_repr, vector])
    module, x = redrawn(make(field_type)), offset(field_type)
    assert spaces.grid_error(module, x) < 1e-10
    spoil(module.plain)
    assert spaces.grid_error(module, x) > 1e-3


def test_one_scale_a_field_and_one_shift_an_invariant():
    field_type = FieldType(C4, [C4.regular_repr, C4.irrep(1), C4.trivial_repr, C4.quotient_repr(2)])
    module = FieldLayerNorm(field_type, kind="layer")
    assert [tuple(p.shape) for p in module.parameters()] == [(4,), (3,)]
    with torch.no_grad():
        module.plain.weight.zero_()
        module.plain.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    y = module(spaces.random_field(field_type, 2, 2, dtype=torch.float32)).tensor
    assert y[0, :, 0, 0].tolist() == pytest.approx([1, 1, 1, 1, 0, 0, 2, 3, 3])
    assert not list(FieldLayerNorm(field_type, affine=False).parameters())


def test_wrong_arguments():
    field_type, vector = spaces.regular(C4, 4), FieldType(C4, [C4.irrep(1), C4.trivial_repr])
    for error, message, in_type, options in (
        (TypeError, "in_type: .*escnn.nn.FieldType", spaces.random_field(field_type, 2, 2), {}),
        (ValueError, "in_type: .*regular fields only", vector, {"scope": "pose"}),
        (ValueError, "in_type: .*single field of irrep_1", vector, {"kind": "fields"}),
        (ValueError, "kind: .*with scope=", field_type, {"scope": "pose", "kind": "fields"}),
        (ValueError, "scope: .*'position'", field_type, {"scope": "batch"}),
        (ValueError, "kind: .*'layer'", field_type, {"kind": "batch"}),
        *((ValueError, "eps: got", field_type, {"eps": eps}) for eps in (-1e-5, float("nan"), "1e-5")),
        (ValueError, "num_groups: got 3, needed a number that divides the 4 fields", field_type, {"num_groups": 3}),
        (ValueError, "num_groups: got 0", field_type, {"num_groups": 0}),
        (TypeError, r"num_groups: got 2\.0", field_type, {"num_groups": 2.0}),
        (ValueError, 'num_groups: got 2 with scope="pose"', field_type, {"num_groups": 2, "scope": "pose"}),
        (ValueError, 'num_groups: got 2 with kind="fields"', field_type, {"num_groups": 2, "kind": "fields"}),
    ):
        with pytest.raises(error, match=message):
            FieldLayerNorm(in_type, **options)


def test_representations_that_are_not_orthogonal_are_refused():
    oblique = group.change_basis(C4.irrep(1), np.array([[1.0, 1.0], [0.0, 1.0]]), name="oblique")
    with pytest.raises(ValueError, match=r"in_type: .*channel 4 .*not orthogonal"):
        FieldLayerNorm(FieldType(C4, [C4.regular_repr, oblique]))
    turned = group.change_basis(C4.irrep(1), np.array([[0.6, 0.8], [-0.8, 0.6]]), name="turned")
    FieldLayerNorm(FieldType(C4, [turned]))


@pytest.mark.parametrize("make", [lambda: gspaces.flipRot2dOnR2(-1), gspaces.rot3dOnR3], ids=["O(2)", "SO(3)"])
def test_fields_of_a_continuous_group(make):
    """No element changes the norm of an irrep, and scalars alone have a mean."""
    gspace = make()
    field_type = FieldType(gspace, [*gspace.fibergroup.irreps()[:4], gspace.trivial_repr])
    norm = redrawn(FieldLayerNorm(field_type, kind="layer"))
    x = spaces.random_field(field_type, *spaces.shape_of(gspace, 3))
    for g in list(gspace.fibergroup.testing_elements())[1:20:6]:
        turned = norm(x.transform_fibers(g)).tensor
        torch.testing.assert_close(turned, norm(x).transform_fibers(g).tensor, atol=1e-7, rtol=1e-7)
    assert norm.plain.mean.tolist() == [float(c in (0, field_type.size - 1)) for c in range(field_type.size)]


@pytest.mark.parametrize(
    ("representations", "kind", "served"),
    [(3 * ["regular"], "layer", True), (3 * ["regular"], "rms", True), (["regular", "irrep_0"], "layer", False)],
)
def test_kernels_serve_fields_of_one_size(monkeypatch, request, representations, kind, served):
    pytest.importorskip("triton")
    field_type = FieldType(C4, [C4.fibergroup.representations[name] for name in representations])
    module, x = redrawn(FieldLayerNorm(field_type, kind=kind)), offset(field_type)
    expected = module(x).tensor
    launched = []
    request.getfixturevalue("interpreted_kernels")
    monkeypatch.setattr(norms, "_launch", lambda *a, to=norms._launch: launched.append(a[0]) or to(*a))
    torch.testing.assert_close(module(x).tensor, expected)
    assert launched == ["norm"] * served


@pytest.mark.parametrize("scope", ["position", "sample"])
def test_means_over_fields_of_a_representation(scope):
    gspace = gspaces.flipRot2dOnR2(4)
    vector, sign = gspace.irrep(1, 1), gspace.irrep(1, 0)
    fields = FieldType(gspace, [vector, sign, gspace.trivial_repr, vector, sign, gspace.trivial_repr, vector])
    norm = FieldLayerNorm(fields, scope, kind="fields", eps=0.0).double()
    x = spaces.random_field(fields, 3, 3)
    with torch.no_grad():
        norm.plain.weight.copy_(torch.randn(7))
        norm.plain.bias.copy_(torch.randn(2))
    assert spaces.grid_error(norm, x) < 1e-12
    with torch.no_grad():
        norm.plain.weight.fill_(1)
        norm.plain.bias.zero_()
    over = (1,) if scope == "position" else (1, 2, 3)
    kinds = [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    y = x.tensor.clone()
    for channels in kinds:
        y[:, channels] -= y[:, channels].mean(over, keepdim=True)
    y = y / y.square().mean(over, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x).tensor, y)
    # The mean over components of different kinds is not equivariant.
    norm.plain.alike = norm.plain.alike.roll(1)
    assert spaces.grid_error(norm, x) > 1e-3


SCALAR, SIGN, VECTOR = C4.trivial_repr, C4.irrep(2), C4.irrep(1)


def with_a_mean(module):
    """With the mean of all permutation fields taken away, also that of few scalars."""
    for part in module.modules():
        if isinstance(part, FieldLayerNorm):
            part.plain.kind = "layer"
    return module


@pytest.mark.parametrize("scope", ["position", "sample", "pose"])
def test_types_of_regular_fields_have_a_mean_and_no_others(scope):
    for gspace in (C4, gspaces.trivialOnR2(), gspaces.octaOnR3()):
        fields = spaces.regular(gspace, 3)
        one, other = FieldLayerNorm(fields, scope), FieldLayerNorm(fields, scope, kind="layer")
        assert one.plain.kind == "layer"
        assert one.state_dict().keys() == other.state_dict().keys()
        x = offset(fields)
        assert torch.equal(one.double()(x).tensor, other.double()(x).tensor)
    if scope != "pose":
        for fields in (
            [SCALAR, VECTOR],
            3 * [SCALAR],
            [C4.regular_repr, VECTOR],
            2 * [C4.quotient_repr(2)],
        ):
            assert FieldLayerNorm(FieldType(C4, fields), scope).plain.kind == "rms"


@given(data=st.data())
def test_scalars_are_kept_up_to_one_scale(data):
    """The output is the input divided by one number, and so the ratios of all scalars and of all lengths."""
    gspace = data.draw(st.sampled_from(list(spaces.PLANE.values())))()
    others = data.draw(spaces.field_types(gspace))
    fields = FieldType(gspace, [gspace.trivial_repr, *others.representations])
    x = offset(fields)
    ratio = x.tensor / FieldLayerNorm(fields).double()(x).tensor
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))


def test_norms_that_leave_nothing_are_refused():
    regular, one = C4.regular_repr, gspaces.trivialOnR2().regular_repr
    refused = [
        ([SCALAR], {}, 'rms" makes a sign'),
        ([SIGN], {}, 'rms" makes a sign'),
        ([SCALAR], {"kind": "layer"}, 'layer" makes the only scalar zero'),
        ([SCALAR, VECTOR], {"kind": "layer"}, 'layer" makes the only scalar zero'),
        (2 * [SCALAR], {"kind": "layer"}, 'layer" makes a sign'),
        ([C4.quotient_repr(2)], {"kind": "layer"}, 'layer" makes a sign'),
        (2 * [SCALAR], {"kind": "fields"}, 'fields" makes a sign'),
        ([regular], {"scope": "pose"}, 'rms" makes a sign'),
        (2 * [regular], {"scope": "pose", "kind": "layer"}, 'layer" makes a sign'),
    ]
    for fields, options, message in refused:
        with pytest.raises(ValueError, match=f"^in_type: .*{message}.*more fields"):
            FieldLayerNorm(FieldType(C4, fields), **options)
    with pytest.raises(ValueError, match="in_type: got"):
        FieldLayerNorm(
            FieldType(gspaces.no_base_space(group.cyclic_group(4)), [group.cyclic_group(4).irrep(0)]), "sample"
        )
    # Over positions there is more than one number, and two channels have a direction.
    FieldLayerNorm(FieldType(C4, [SCALAR]), "sample")
    for fields in 2 * [SCALAR], [C4.quotient_repr(2)]:
        assert FieldLayerNorm(FieldType(C4, fields)).plain.kind == "rms"
    assert FieldLayerNorm(FieldType(gspaces.trivialOnR2(), 2 * [one])).plain.kind == "rms"
    assert FieldLayerNorm(spaces.regular(C4, 2), "pose").plain.kind == "rms"


def seen(layer, x, at):
    """How much the first channel at a position changes the others: tripled, of the other sign, and by its gradient."""
    elsewhere = torch.ones_like(x.tensor[:, 0], dtype=torch.bool)
    elsewhere[at] = False

    def output(tensor):
        y = layer(GeometricTensor(tensor, x.type, x.coords)).tensor.movedim(1, -1)
        return y[elsewhere]

    tensor = x.tensor.clone().requires_grad_()
    given = output(tensor)
    (gradient,) = torch.autograd.grad(given.square().sum(), tensor)
    found = [gradient[:, 0][at].abs() / given.square().sum()]
    for factor in (3.0, -1.0):
        changed = x.tensor.clone()
        changed[:, 0][at] *= factor
        found.append((output(changed) - given).abs().max() / given.abs().max())
    return min(value.item() for value in found)


LONE = {
    "a scalar and a vector": [SCALAR, VECTOR],
    "two scalars": 2 * [SCALAR],
    "two scalars and a vector": [*2 * [SCALAR], VECTOR],
    "a sign and a scalar": [SIGN, SCALAR],
    "a sign and a vector": [SIGN, VECTOR],
}
ERASED = ("a scalar and a vector", "two scalars", "a sign and a scalar")
"""Of which a norm with a mean leaves nothing, or a sign."""
BLOCKS = {
    "grid": lambda f: TransformerBlock(f, f, 1, 3, norm="pre", norm_eps=1e-12),
    "grid, sample": lambda f: TransformerBlock(f, f, 1, 3, norm="pre", norm_scope="sample"),
    "grid, GSA-Net": lambda f: TransformerBlock(f, f, 1, 3, norm="gsa"),
    "points": lambda f: PointTransformerBlock(f, f, norm_eps=1e-12),
    "points, convolution": lambda f: PointTransformerBlock(f, f, kernel_features=4, norm_eps=1e-12),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("make", BLOCKS)
@pytest.mark.parametrize("name", LONE)
def test_blocks_tell_neighbours_of_a_lone_field(make, name):
    if make == "grid, GSA-Net" and name != "two scalars":
        pytest.skip("of fields with pointwise nonlinearities only")
    torch.manual_seed(0)
    fields = FieldType(C4, LONE[name])
    block = BLOCKS[make](fields).double()
    if make.startswith("grid"):
        x, at = spaces.random_field(fields, 4, 4), (0, 1, 2)
        assert spaces.grid_error(block, x) < 1e-12
    else:
        x = GeometricTensor(torch.randn(6, fields.size).double(), fields, torch.randn(6, 2).double())
        at = (1,)
        for g in spaces.generators(C4):
            torch.testing.assert_close(block(x.transform(g)).tensor, block(x).transform_fibers(g).tensor)
    assert seen(block, x, at) > 1e-5
    if make in ("grid", "points", "points, convolution") and name in ERASED:
        assert seen(with_a_mean(block), x, at) < 1e-8  # the negative control


def test_blocks_on_the_sphere_tell_neighbours_of_a_lone_field():
    torch.manual_seed(0)
    space = gspaces.rot3dOnR3()
    fields = FieldType(space, [space.trivial_repr, space.fibergroup.irrep(1)])
    block = SphereTransformerBlock(fields, fields, samples=4).double()
    coords = torch.nn.functional.normalize(torch.randn(6, 3).double(), dim=1)
    x = GeometricTensor(torch.randn(6, 4).double(), fields, coords)
    assert seen(block, x, (1,)) > 1e-4
    assert seen(with_a_mean(block), x, (1,)) < 1e-6  # the negative control


def test_is_torchs_on_scalars_and_escnns_on_regular_fields():
    scalars, regular = spaces.scalars(C4, 3), spaces.regular(C4, 3)
    of_torch, of_escnn = torch.nn.BatchNorm2d(3).double(), InnerBatchNorm(regular).double()
    for fields, other, module, tolerance in (
        (scalars, lambda x: of_torch(x.tensor), of_torch, 1e-7),
        # escnn's running variance counts components of a field as torch counts positions
        (regular, lambda x: of_escnn(x).tensor, of_escnn, 1e-6),
    ):
        ours = FieldBatchNorm(fields).double()
        for _ in range(3):
            x = spaces.random_field(fields, 4, 4)
            torch.testing.assert_close(ours(x).tensor, other(x))
        ours.eval(), module.eval()
        torch.testing.assert_close(ours(x).tensor, other(x), rtol=tolerance, atol=tolerance)


def test_vectors_are_divided_by_their_length():
    vectors = FieldType(C4, 2 * [C4.irrep(1)])
    x = spaces.random_field(vectors, 5, 5)
    y = FieldBatchNorm(vectors, eps=0.0).double()(x).tensor.unflatten(1, (2, 2))
    torch.testing.assert_close(y.square().mean((0, 2, 3, 4)), torch.ones(2).double())
    torch.testing.assert_close(
        y / y.norm(dim=2, keepdim=True), (z := x.tensor.unflatten(1, (2, 2))) / z.norm(dim=2, keepdim=True)
    )


def test_half_precision_takes_its_statistics_in_single():
    fields = spaces.scalars(C4, 1)
    x = fields(1000 + torch.randn(4, 1, 8, 8)).tensor
    norm = FieldBatchNorm(fields).plain
    assert (norm(x.bfloat16()).float() - norm(x.bfloat16().float())).abs().max() < 0.02


def test_bad_arguments():
    fields = spaces.scalars(C4, 1)
    with pytest.raises(ValueError, match="momentum: got 0"):
        FieldBatchNorm(fields, momentum=0)
    with pytest.raises(ValueError, match="eps: got -1"):
        FieldBatchNorm(fields, eps=-1)
    with pytest.raises(ValueError, match="got 1 position"):
        FieldBatchNorm(fields)(fields(torch.randn(1, 1, 1, 1)))


def test_transforms_take_it_in_eval_mode():
    """In training it remembers statistics, which they forbid."""
    norm = FieldBatchNorm(spaces.mixed(C4))
    x = torch.randn(3, norm.in_type.size, 2, 2)

    def loss(x):
        return norm(norm.in_type(x)).tensor.square().sum()

    with pytest.raises(RuntimeError, match=r"FieldBatchNorm remembers statistics.*call eval\(\)"):
        torch.func.grad(loss)(x)
    norm.eval()
    expected = x.clone().requires_grad_()
    loss(expected).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), expected.grad)


NORMS = [
    *(("pose", kind, 1, True) for kind in ("layer", "rms")),
    *itertools.product(["sample"], ["layer", "rms"], [1, 2, 4], [True, False]),
    *itertools.product(["position"], ["layer", "rms"], [1, 2], [True, False]),
    *(("position", "layer", 4, True), ("position", "rms", 4, True), ("position", "rms", 4, False)),
]
"""Scopes, kinds, numbers of groups, and whether all four fields are regular."""


@pytest.mark.sampled(20)
@pytest.mark.parametrize("space", [(), (4,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize(("scope", "kind", "num_groups", "alike"), NORMS)
def test_is_the_formula(scope, kind, num_groups, alike, space):
    """Numbers and gradients, group by group, or pose by pose."""
    quotient = C4.quotient_repr(2)
    fields = spaces.regular(C4, 4) if alike else FieldType(C4, [VECTOR, quotient, quotient, C4.regular_repr])
    plain = redrawn(FieldLayerNorm(fields, scope, kind=kind, eps=0.1, num_groups=num_groups)).plain
    space = space if space or alike else (5,)  # of a single position some groups would leave nothing
    x = (1 + torch.randn(2, fields.size, *space)).double().requires_grad_()
    over, ones = tuple(range(1, x.dim())) if scope == "sample" else (1,), len(space) * [1]
    ends = [0, *(fields.fields_end[g * 4 // num_groups - 1] for g in range(1, num_groups + 1))]
    parts = [list(range(start, end)) for start, end in itertools.pairwise(ends)]
    if scope == "pose":
        parts = [list(range(pose, 16, 4)) for pose in range(4)]
    y, expected = x.clone(), x.clone()
    for part in parts:
        permuted = [c for c in part if alike or c > 1]  # not the vector
        if kind == "layer" and permuted:
            y[:, permuted] = x[:, permuted] - x[:, permuted].mean(over, keepdim=True)
        expected[:, part] = y[:, part] / (y[:, part].square().mean(over, keepdim=True) + 0.1).sqrt()
    expected = expected * plain.weight[plain.field].view(-1, *ones)
    assert (plain.bias is None) == (kind == "rms")
    if kind == "layer":
        expected = expected + (plain.invariants @ plain.bias).view(-1, *ones)
    assert_formula(plain(x), expected, [x, *plain.parameters()])


def test_groups_erase_nothing():
    """A group norm of a scalar at one position would be zero, or a sign."""
    scalars = spaces.scalars(C4, 4)
    instance = FieldLayerNorm(scalars, "sample", num_groups=4)
    assert instance(scalars(torch.randn(2, 4, 2, 1))).tensor.any()
    for kind in ("layer", "rms"):
        with pytest.raises(ValueError, match=r"input: .*which num_groups=4"):
            FieldLayerNorm(scalars, "sample", kind=kind, num_groups=4)(scalars(torch.randn(2, 4, 1, 1)))
        with pytest.raises(ValueError, match=f'in_type: .* of which kind="{kind}" makes'):
            FieldLayerNorm(scalars, kind=kind, num_groups=4)
    regular = spaces.regular(C4, 4)
    assert FieldLayerNorm(regular, "sample", num_groups=4)(regular(torch.randn(2, 16, 1, 1))).tensor.std() > 0.5


def test_means_over_fields_without_positions():
    fields = spaces.regular(gspaces.no_base_space(group.cyclic_group(4)), 3)
    x = spaces.random_field(fields)
    position, sample = (FieldLayerNorm(fields, scope, kind="fields").double() for scope in ("position", "sample"))
    assert torch.equal(sample(x).tensor, position(x).tensor)
