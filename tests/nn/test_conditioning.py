"""Norms and gates whose numbers depend on a condition."""

import math

import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import ConditionedFieldNorm, ConditionedGate, FieldLayerNorm, sequence_space
from tests import spaces

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
SPACES = {
    "C4": lambda: C4,
    "C8": lambda: gspaces.rot2dOnR2(8),
    "D4": lambda: D4,
    "octahedral": gspaces.octaOnR3,
    "icosahedral": gspaces.icoOnR3,
    "octahedral sequences": lambda: sequence_space(group.octa_group()),
}
N = 5
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.double()


def candidates(gspace):
    """The regular representation, irreps, a quotient and an induced one."""
    some = [gspace.regular_repr, gspace.trivial_repr, *gspace.fibergroup.irreps()[-2:]]
    if gspace.fibergroup == C4.fibergroup or gspace.fibergroup == gspaces.rot2dOnR2(8).fibergroup:
        return [*some, gspace.quotient_repr(2), gspace.induced_repr(2, gspace.fibergroup.subgroup(2)[0].irrep(1))]
    if gspace.fibergroup == D4.fibergroup:
        return [*some, gspace.quotient_repr((None, 2)), gspace.induced_repr((None, 4), group.cyclic_group(4).irrep(1))]
    return some


def mixture(gspace):
    """A type drawn at random."""
    some = candidates(gspace)
    drawn = [some[int(i)] for i in torch.randint(len(some), (3,))]
    return FieldType(gspace, [*drawn, gspace.trivial_repr, gspace.fibergroup.irreps()[-1]])


def at(gspace):
    return spaces.shape_of(gspace, 2 if gspace.dimensionality == 3 else 4)


def error(module, x, condition):
    """Of the group on the fibers; a condition of vectors is the same for all elements."""
    with torch.no_grad():
        y = module(x, condition)
        return max(
            float((module(x.transform_fibers(g), condition).tensor - y.transform_fibers(g).tensor).abs().max())
            for g in spaces.generators(x.type.gspace)
        )


def make_norm(scope):
    return lambda fields: ConditionedFieldNorm(fields, N, scope)


MAKE = {"norm": make_norm("position"), "sample": make_norm("sample"), "gate": lambda fields: ConditionedGate(fields, N)}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", SPACES)
def test_equivariant_for_any_weights(name, kind):
    gspace = SPACES[name]()
    fields = mixture(gspace)
    module, x = drawn(MAKE[kind](fields)), spaces.random_field(fields, *at(gspace))
    condition = torch.randn(2, N).double()
    assert error(module, x, condition) < 1e-10
    assert module(x, condition).tensor.std() > 1e-2
    difference = module(x, condition).tensor - module(x, condition.flip(0)).tensor
    assert difference.abs().max() > 1e-2  # the condition does something


@pytest.mark.parametrize("kind", MAKE)
def test_a_scale_for_each_pose_would_break_it(kind):
    """The negative control."""
    fields = spaces.regular(C4, 2)
    module, x, condition = drawn(MAKE[kind](fields)), spaces.random_field(fields, 4, 4), torch.randn(2, N).double()
    plain = module.plain if kind == "gate" else module.plain.modulation
    plain.field, plain.fields, plain.invariants = torch.arange(fields.size), fields.size, None
    plain.linear = drawn(torch.nn.Linear(N, fields.size))
    assert error(module, x, condition) > 1e-2


def test_a_shift_of_vectors_would_break_it():
    fields = FieldType(C4, [C4.trivial_repr, C4.irrep(1)])
    module, x, condition = drawn(MAKE["norm"](fields)), spaces.random_field(fields, 4, 4), torch.randn(2, N).double()
    assert error(module, x, condition) < 1e-10
    module.plain.modulation.invariants.fill_(1)
    assert error(module, x, condition) > 1e-2


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_fields_as_a_condition_move_with_the_features(kind):
    fields, trivial = mixture(D4), spaces.scalars(D4, N)
    module, x = drawn(MAKE[kind](fields)), spaces.random_field(fields, 4, 4)
    condition = spaces.random_field(trivial, 4, 4)
    y = module(x, condition)
    for g in D4.fibergroup.elements:
        turned = module(x.transform(g), condition.transform(g)).tensor
        torch.testing.assert_close(turned, y.transform(g).tensor, **TIGHT)
    still = module(x.transform(g), condition).tensor
    assert (still - y.transform(g).tensor).abs().max() > 1e-2  # the negative control
    torch.testing.assert_close(module(x, condition.tensor).tensor, y.tensor)


def test_at_first_it_is_the_norm_and_the_gate_is_closed():
    fields = mixture(D4)
    x, condition = spaces.random_field(fields, 3, 3), torch.randn(2, N).double()
    for scope in ("position", "sample"):
        norm = FieldLayerNorm(fields, scope, affine=False).double()
        assert torch.equal(ConditionedFieldNorm(fields, N, scope).double()(x, condition).tensor, norm(x).tensor)
    assert not ConditionedGate(fields, N).double()(x, condition).tensor.any()


@pytest.mark.parametrize("scope", ["position", "sample"])
@pytest.mark.parametrize("at_positions", [False, True])
def test_by_the_formula(scope, at_positions):
    """Numbers and gradients, by loops over fields."""
    fields = FieldType(C4, [C4.regular_repr, C4.irrep(1), C4.trivial_repr, C4.quotient_repr(2)])
    module, x = drawn(ConditionedFieldNorm(fields, N, scope, kind="rms", eps=0.1)), torch.randn(2, 9, 3, 3).double()
    condition = torch.randn(2, N, *([3, 3] if at_positions else [])).double()
    weight, bias = module.plain.modulation.linear.weight, module.plain.modulation.linear.bias
    tensors = [x.requires_grad_(), condition.requires_grad_(), weight, bias]
    full = condition if at_positions else condition[..., None, None].expand(2, N, 3, 3)
    numbers = torch.einsum("ri,bihw->brhw", weight, full) + bias.view(1, -1, 1, 1)
    expected, start = [], 0
    over = (1,) if scope == "position" else (1, 2, 3)
    normed = x / (x.square().mean(over, keepdim=True) + 0.1).sqrt()
    shifts = iter(range(4, 7))
    for f, representation in enumerate(fields.representations):
        part = normed[:, start : start + representation.size]
        shift = 0 if representation == C4.irrep(1) else numbers[:, [next(shifts)]]
        expected.append((1 + numbers[:, [f]]) * part + shift)
        start += representation.size
    expected = torch.cat(expected, 1)
    y = module(fields(x), condition).tensor
    torch.testing.assert_close(y, expected, **TIGHT)
    for a, b in zip(
        torch.autograd.grad(y.sin().sum(), tensors), torch.autograd.grad(expected.sin().sum(), tensors), strict=True
    ):
        torch.testing.assert_close(a, b, **TIGHT)


BATCH = torch.tensor([0, 0, 1, 1, 1, 2])


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_at_points_by_cloud_and_by_point(kind):
    fields = mixture(C4)
    module = drawn(MAKE[kind](fields))
    x = GeometricTensor(torch.randn(6, fields.size).double(), fields, torch.randn(6, 2).double())
    condition = torch.randn(3, N).double()
    y = module(x, condition, BATCH)
    assert y.coords is x.coords
    for cloud in range(3):
        here = cloud == BATCH
        part = GeometricTensor(x.tensor[here], fields, x.coords[here])
        torch.testing.assert_close(module(part, condition[[cloud]]).tensor, y.tensor[here])
    of_points = condition[BATCH]
    trivial = GeometricTensor(of_points, spaces.scalars(C4, N), x.coords)
    for given, batch in ((of_points, None), (of_points, BATCH), (trivial, None), (trivial, BATCH)):
        torch.testing.assert_close(module(x, given, batch).tensor, y.tensor)
    assert (module(x, condition.roll(1, 0), BATCH).tensor - y.tensor).abs().max() > 1e-2
    assert error(lambda x, c: module(x, c, BATCH), x, condition) < 1e-10


def test_as_many_clouds_as_points():
    """One row for each is clear in the order of the clouds, and in another order refused."""
    fields = spaces.scalars(C4, 3)
    module = drawn(ConditionedFieldNorm(fields, N))
    x = GeometricTensor(torch.randn(3, 3).double(), fields, torch.randn(3, 2).double())
    condition = torch.randn(3, N).double()
    torch.testing.assert_close(module(x, condition, torch.arange(3)).tensor, module(x, condition).tensor)
    with pytest.raises(ValueError, match=r"condition: got 3 rows.*condition\[batch\]"):
        module(x, condition, torch.tensor([1, 0, 2]))


def test_sequences():
    tokens = sequence_space(D4.fibergroup)
    fields = FieldType(tokens, [tokens.regular_repr, *tokens.fibergroup.irreps()])
    module, x = drawn(ConditionedFieldNorm(fields, N)), spaces.random_field(fields, 7)
    condition = torch.randn(2, N).double()
    assert error(module, x, condition) < 1e-10
    assert error(module, x, torch.randn(2, N, 7).double()) < 1e-10


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_exports(kind):
    fields = mixture(C4)
    module, x, condition = drawn(MAKE[kind](fields)), spaces.random_field(fields, 3, 3), torch.randn(2, N).double()
    plain = module.export()
    program = torch.export.export(plain, (x.tensor, condition), strict=False).module()
    for found in (plain(x.tensor, condition), program(x.tensor, condition)):
        torch.testing.assert_close(found, module(x, condition).tensor)


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_no_images_and_no_positions(kind):
    fields = spaces.regular(C4, 2)
    module, none = MAKE[kind](fields), torch.empty(0, N)
    assert module(fields(torch.empty(0, 8, 3, 3)), none).shape == (0, 8, 3, 3)
    assert module.export()(torch.empty(0, 8, 3, 3), none).shape == (0, 8, 3, 3)
    with pytest.raises(ValueError, match="input: a grid of 0×5 has no positions"):
        module(fields(torch.empty(2, 8, 0, 5)), torch.empty(2, N))


def test_continuous_groups():
    so2 = gspaces.rot2dOnR2(-1)
    fields = FieldType(so2, [so2.trivial_repr, so2.irrep(1), so2.irrep(2)])
    module, x, condition = drawn(MAKE["norm"](fields)), spaces.random_field(fields, 3, 3), torch.randn(2, N).double()
    y = module(x, condition)
    for angle in (0.3, 2.0):
        g = so2.fibergroup.element(angle)
        torch.testing.assert_close(module(x.transform_fibers(g), condition).tensor, y.transform_fibers(g).tensor)


def test_poses_as_a_scope_and_means_over_fields():
    fields = spaces.regular(D4, 3)
    x, condition = spaces.random_field(fields, 4, 4), torch.randn(2, N).double()
    for options in ({"scope": "pose"}, {"kind": "fields"}, {"kind": "rms"}, {"kind": "layer"}):
        assert error(drawn(ConditionedFieldNorm(fields, N, **options)), x, condition) < 1e-10


def test_bad_arguments():
    fields = spaces.regular(C4, 2)
    with pytest.raises(TypeError, match=r"n: got 2\.0"):
        ConditionedFieldNorm(fields, 2.0)
    with pytest.raises(ValueError, match="n: got 0"):
        ConditionedGate(fields, 0)
    with pytest.raises(TypeError, match=r"in_type: .*FieldType"):
        ConditionedGate(C4, 3)
    with pytest.raises(ValueError, match="scope: got 'batch'"):
        ConditionedFieldNorm(fields, N, "batch")


def test_bad_conditions():
    fields = spaces.regular(C4, 2)
    norm, x = ConditionedFieldNorm(fields, N), fields(torch.randn(2, 8, 3, 3))
    for bad, error, match in (
        (None, TypeError, "condition: got NoneType, needed a tensor"),
        (torch.randn(2, N + 1), ValueError, r"condition: got shape \(2, 6\), needed \(2, 5\)"),
        (torch.randn(1, N), ValueError, r"condition: got shape \(1, 5\), needed \(2, 5\)"),
        (torch.randn(2, N, 3), ValueError, r"condition: got shape"),
        (torch.randn(2, N).double(), TypeError, r"condition: got torch\.float64, needed torch\.float32"),
        (torch.zeros(2, N, dtype=torch.long), TypeError, r"condition: got torch\.int64"),
        (spaces.random_field(spaces.regular(C4, 1), 3, 3), ValueError, "condition: got fields of regular"),
        (spaces.random_field(spaces.scalars(C4, N), 4, 4), ValueError, r"condition: got fields on a grid of shape"),
        (spaces.random_field(spaces.scalars(D4, N), 3, 3), ValueError, "condition: its gspace"),
        (torch.randn(2, N, device="meta"), ValueError, "condition: got a tensor on meta"),
    ):
        with pytest.raises(error, match=match):
            norm(x, bad)
    points = GeometricTensor(torch.randn(6, 8), fields, torch.randn(6, 2))
    for bad, batch, match in (
        (torch.randn(2, N), None, "condition: got 2 rows for a single cloud of 6 points"),
        (torch.randn(2, N), BATCH, "condition: got 2 rows, needed one for each of 3 clouds"),
        (torch.randn(3, N, 1), BATCH, r"condition: got shape \(3, 5, 1\)"),
    ):
        with pytest.raises(ValueError, match=match):
            norm(points, bad, batch)


def test_half_precision():
    fields = spaces.regular(C4, 2)
    norm, x, condition = ConditionedFieldNorm(fields, N), fields(torch.randn(2, 8, 3, 3)), torch.randn(2, N)
    with torch.no_grad():
        norm.plain.modulation.linear.weight.normal_()
    y = norm(x, condition).tensor
    half = norm.bfloat16()(fields(x.tensor.bfloat16()), condition.bfloat16()).tensor
    assert half.dtype == torch.bfloat16
    assert (half.float() - y).abs().max() < 0.2
    with torch.autocast("cpu", torch.bfloat16):
        assert math.isfinite(float(norm.float()(x, condition.bfloat16()).tensor.detach().sum()))


def test_repr():
    fields = spaces.regular(C4, 2)
    assert repr(ConditionedFieldNorm(fields, 5)).endswith("n=5, scope='position', eps=1e-05)")
    assert repr(ConditionedGate(fields, 5)).endswith("n=5)")
