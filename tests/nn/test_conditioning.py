"""Norms and gates whose numbers depend on a condition."""

import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    ConditionedFieldNorm,
    ConditionedGate,
    DropPath,
    FieldLayerNorm,
    PointTransformerBlock,
    PositionEmbedding,
    TimestepEmbedding,
    TransformerBlock,
)
from escnn_attention.models import FieldTransformer, HybridNet, PlatonicTransformer, PointTransformer
from tests import spaces
from tests.layers import assert_formula, drawn, redrawn

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)
N = 5
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def mixture(gspace):
    """A type drawn at random: the regular representation, irreps, a quotient and an induced one."""
    some = [gspace.regular_repr, gspace.trivial_repr, *gspace.fibergroup.irreps()[-2:]]
    if gspace is C4:
        some += [gspace.quotient_repr(2), gspace.induced_repr(2, gspace.fibergroup.subgroup(2)[0].irrep(1))]
    elif gspace is D4:
        some += [gspace.quotient_repr((None, 2)), gspace.induced_repr((None, 4), group.cyclic_group(4).irrep(1))]
    drawn = [some[int(i)] for i in torch.randint(len(some), (3,))]
    return FieldType(gspace, [*drawn, gspace.trivial_repr, gspace.fibergroup.irreps()[-1]])


def error(module, x, condition):
    """Of the group on the fibers; a condition of vectors is the same for all elements."""
    return spaces.fibers_error(lambda x: module(x, condition), x)


def make_norm(scope):
    return lambda fields: ConditionedFieldNorm(fields, N, scope)


MAKE = {"norm": make_norm("position"), "sample": make_norm("sample"), "gate": lambda fields: ConditionedGate(fields, N)}


def scale_each_pose(module):
    plain, size = getattr(module.plain, "modulation", module.plain), module.in_type.size
    plain.field, plain.fields, plain.invariants = torch.arange(size), size, None
    plain.linear = redrawn(torch.nn.Linear(N, size))


def test_a_shift_of_vectors_would_break_it():
    fields = FieldType(C4, [C4.trivial_repr, C4.irrep(1)])
    module, x, condition = redrawn(MAKE["norm"](fields)), spaces.random_field(fields, 4, 4), torch.randn(2, N).double()
    assert error(module, x, condition) < 1e-10
    module.plain.modulation.invariants.fill_(1)
    assert error(module, x, condition) > 1e-2


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_fields_as_a_condition_move_with_the_features(kind):
    fields, trivial = mixture(D4), spaces.scalars(D4, N)
    module, x = redrawn(MAKE[kind](fields)), spaces.random_field(fields, 4, 4)
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


@pytest.mark.parametrize("scope", ["position", "sample", "gate"])
@pytest.mark.parametrize("at_positions", [False, True])
def test_by_the_formula(scope, at_positions):
    """Numbers and gradients, of the norm without parameters."""
    fields = FieldType(C4, [C4.regular_repr, C4.irrep(1), C4.trivial_repr, C4.quotient_repr(2)])
    options, x = {"scope": scope, "kind": "layer", "eps": 0.1}, torch.randn(2, 9, 3, 3).double()
    module = redrawn(ConditionedGate(fields, N) if scope == "gate" else ConditionedFieldNorm(fields, N, **options))
    condition = torch.randn(2, N, *([3, 3] if at_positions else [])).double()
    linear = getattr(module.plain, "modulation", module.plain).linear
    tensors = [x.requires_grad_(), condition.requires_grad_(), linear.weight, linear.bias]
    full = condition if at_positions else condition[..., None, None].expand(2, N, 3, 3)
    numbers = torch.einsum("ri,bihw->brhw", linear.weight, full) + linear.bias.view(1, -1, 1, 1)
    scale = numbers[:, [0, 0, 0, 0, 1, 1, 2, 3, 3]]
    if scope == "gate":
        expected = scale * x
    else:
        normed = FieldLayerNorm(fields, **options, affine=False).double()(fields(x)).tensor
        shift = torch.cat([numbers, 0 * x[:, :1]], 1)[:, [4, 4, 4, 4, 7, 7, 5, 6, 6]]  # of the invariants alone
        expected = (1 + scale) * normed + shift
    assert_formula(module(fields(x), condition).tensor, expected, tensors, **TIGHT)


BATCH = torch.tensor([0, 0, 1, 1, 1, 2])


def test_as_many_clouds_as_points():
    """One row for each is clear in the order of the clouds, and in another order refused."""
    fields = spaces.scalars(C4, 3)
    module = redrawn(ConditionedFieldNorm(fields, N))
    x = GeometricTensor(torch.randn(3, 3).double(), fields, torch.randn(3, 2).double())
    condition = torch.randn(3, N).double()
    torch.testing.assert_close(module(x, condition, torch.arange(3)).tensor, module(x, condition).tensor)
    with pytest.raises(ValueError, match=r"condition: got 3 rows.*condition\[batch\]"):
        module(x, condition, torch.tensor([1, 0, 2]))


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_no_images_and_no_positions(kind):
    module, none = MAKE[kind](FIELDS), torch.empty(0, N)
    assert module(FIELDS(torch.empty(0, 8, 3, 3)), none).shape == (0, 8, 3, 3)
    assert module.export()(torch.empty(0, 8, 3, 3), none).shape == (0, 8, 3, 3)
    with pytest.raises(ValueError, match=r"input: .*no positions"):
        module(FIELDS(torch.empty(2, 8, 0, 5)), torch.empty(2, N))


def test_continuous_groups():
    so2 = gspaces.rot2dOnR2(-1)
    fields = FieldType(so2, [so2.trivial_repr, so2.irrep(1), so2.irrep(2)])
    module, x, condition = redrawn(MAKE["norm"](fields)), spaces.random_field(fields, 3, 3), torch.randn(2, N).double()
    y = module(x, condition)
    for angle in (0.3, 2.0):
        g = so2.fibergroup.element(angle)
        torch.testing.assert_close(module(x.transform_fibers(g), condition).tensor, y.transform_fibers(g).tensor)


def test_bad_conditions():
    norm, x = ConditionedFieldNorm(FIELDS, N), FIELDS(torch.randn(2, 8, 3, 3))
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
    points = GeometricTensor(torch.randn(6, 8), FIELDS, torch.randn(6, 2))
    for bad, batch, match in (
        (torch.randn(2, N), None, "condition: got 2 rows for a single cloud of 6 points"),
        (torch.randn(2, N), BATCH, "condition: got 2 rows, needed one for each of 3 clouds"),
        (torch.randn(3, N, 1), BATCH, r"condition: got shape \(3, 5, 1\)"),
    ):
        with pytest.raises(ValueError, match=match):
            norm(points, bad, batch)


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_autocast_mixes_precisions(kind):
    """Of features in single precision and a condition that a product has rounded."""
    module, x, condition = MAKE[kind](FIELDS), FIELDS(torch.randn(2, 8, 3, 3)), torch.randn(2, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, condition).tensor
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, module(x, condition.float()).tensor, rtol=0.02, atol=0.02)


def block_on(fields, out=None, **options):
    """A block that attends to all positions, between few heads."""
    options = {"norm": "pre", "kernel_size": None, "head_fields": 2, "hidden_fields": 1, "condition": N, **options}
    return TransformerBlock(fields, out or fields, **options)


def grid_error(block, x, condition):
    return spaces.grid_error(lambda x: block(x, condition=condition), x)


@pytest.mark.parametrize("part", ["before", "attention_gate", "feed_forward_norm", "feed_forward_gate"])
def test_a_scale_for_each_pose_in_a_block_would_break_it(part):
    block, x, condition = drawn(block_on(FIELDS)), spaces.random_field(FIELDS, 4, 4), torch.randn(2, N).double()
    assert grid_error(block, x, condition) < 1e-10
    scale_each_pose(getattr(block, part))
    assert grid_error(block, x, condition) > 1e-3


@pytest.mark.parametrize("same", [True, False])
def test_at_first_a_block_is_its_shortcut(same):
    out = FIELDS if same else FieldType(C4, 2 * [C4.irrep(1)])
    x = spaces.random_field(FIELDS, 4, 4, dtype=torch.float32)
    block = block_on(FIELDS, out)
    assert torch.equal(block(x, condition=torch.randn(2, N)).tensor, block.shortcut(x).tensor)
    points = GeometricTensor(torch.randn(6, 8), FIELDS, torch.randn(6, 2))
    block = PointTransformerBlock(FIELDS, out, condition=N)
    y = block(points, batch=BATCH, condition=torch.randn(3, N))
    assert torch.equal(y.tensor, block.shortcut(points).tensor)


@pytest.mark.parametrize("at_positions", [False, True])
def test_a_block_is_the_formula(at_positions):
    """Of its layers, and gradients."""
    block, x = drawn(block_on(FIELDS, layer_scale=0.5)), spaces.random_field(FIELDS, 3, 3)
    condition = torch.randn(2, N, *((3, 3) if at_positions else ())).double()
    x.tensor.requires_grad_()
    given = GeometricTensor(condition, spaces.scalars(C4, N)) if at_positions else condition
    y = x + block.attention_gate(block.after(block.attention(block.before(x, given))), given)
    expected = y + block.feed_forward_gate(block.feed_forward(block.feed_forward_norm(y, given)), given)
    found, wanted = block(x, condition=given).tensor, [x.tensor, *block.parameters()]
    assert_formula(found, expected.tensor, wanted, rtol=1e-10, atol=1e-11)


def test_times():
    embedding = TimestepEmbedding(6, scale=10.0).double()
    t = torch.tensor([0.0, 0.3], dtype=torch.float64)
    angles = 10 * t[:, None] * torch.tensor([1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)], dtype=torch.float64)
    torch.testing.assert_close(embedding(t), embedding.layers(torch.cat([angles.cos(), angles.sin()], 1)))
    with pytest.raises(ValueError, match=r"n: .*even"):
        TimestepEmbedding(5)
    with pytest.raises(ValueError, match="scale: got 0"):
        TimestepEmbedding(6, scale=0)
    with pytest.raises(ValueError, match="times: got shape"):
        embedding(t[:, None])


@pytest.mark.parametrize("network", [False, True])
def test_conditions_of_hidden_positions_reach_no_gradient(network):
    if network:
        layer = FieldTransformer(FIELDS, FIELDS, fields=2, num_heads=1, num_decoder_layers=1, condition=N)
    else:
        layer = block_on(FIELDS, kernel_size=3)
    layer, x, mask = drawn(layer), spaces.random_field(FIELDS, 3, 3), torch.rand(2, 3, 3) < 0.6
    mask[:, 0, 0] = True
    condition = torch.randn(2, N, 3, 3).double()
    found = []
    for value in (0.0, torch.nan):
        layer.zero_grad()
        given = condition.masked_fill(~mask.unsqueeze(1), value).requires_grad_()
        y = layer(x, mask=mask, condition=given).tensor
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)


def test_crops_of_a_block():
    block, x = drawn(block_on(FIELDS, kernel_size=3, crop=1)), spaces.random_field(FIELDS, 5, 5)
    condition = torch.randn(2, N).double()
    assert block(x, condition=condition).shape == (2, 8, 3, 3)
    assert block(x, torch.ones(2, 5, 5, dtype=torch.bool), condition).shape == (2, 8, 3, 3)
    with pytest.raises(ValueError, match=r"condition: .*crop=1"):
        block(x, condition=torch.randn(2, N, 5, 5).double())


def test_attention_maps_of_a_block():
    block, x, condition = drawn(block_on(FIELDS)), spaces.random_field(FIELDS, 3, 3), torch.randn(2, N).double()
    for mask in (None, torch.rand(2, 3, 3) < 0.7):
        maps = block.attention_maps(x, [(1, 1)], mask=mask, condition=condition)
        inside = block.attention.attention_maps(block.before(x, condition), [(1, 1)], mask=mask)
        torch.testing.assert_close(maps, inside)
    with pytest.raises(ValueError, match="condition: TransformerBlock got None"):
        block.attention_maps(x, [(1, 1)])
    with pytest.raises(TypeError, match="input: TransformerBlock got Tensor"):
        block.attention_maps(x.tensor, [(1, 1)])


@pytest.mark.parametrize("make", [lambda: C4, gspaces.octaOnR3], ids=["C4", "octahedral"])
def test_blocks_at_points_are_equivariant_for_any_weights(make):
    gspace = make()
    fields, d = mixture(gspace), gspace.dimensionality
    block = drawn(PointTransformerBlock(fields, fields, head_fields=d + 1, hidden_fields=1, condition=N))
    x = GeometricTensor(torch.randn(6, fields.size).double(), fields, torch.randn(6, d).double())
    scalars = GeometricTensor(torch.randn(6, N).double(), spaces.scalars(gspace, N), x.coords)
    for condition in (torch.randn(3, N).double(), scalars):
        y = block(x, batch=BATCH, condition=condition)
        for g in spaces.generators(gspace):
            turned = condition.transform(g) if isinstance(condition, GeometricTensor) else condition
            z = block(x.transform(g), batch=BATCH, condition=turned).tensor
            assert (z - y.transform_fibers(g).tensor).abs().max() < 1e-10
    block.attention_gate.plain.field = torch.arange(fields.size) % block.attention_gate.plain.fields
    y = block(x, batch=BATCH, condition=scalars)
    errors = [
        block(x.transform(g), batch=BATCH, condition=scalars.transform(g)).tensor - y.transform_fibers(g).tensor
        for g in spaces.generators(gspace)
    ]
    assert max(float(e.detach().abs().max()) for e in errors) > 1e-3  # the negative control


def test_blocks_at_points_by_cloud_by_point_and_masked():
    fields = FieldType(C4, [C4.regular_repr, C4.irrep(1)])
    block = drawn(PointTransformerBlock(fields, fields, num_heads=1, head_fields=2, hidden_fields=1, condition=N))
    x = GeometricTensor(torch.randn(6, 6).double(), fields, torch.randn(6, 2).double())
    condition = torch.randn(3, N).double()
    y = block(x, batch=BATCH, condition=condition).tensor
    for cloud in range(3):
        here = cloud == BATCH
        part = GeometricTensor(x.tensor[here], fields, x.coords[here])
        torch.testing.assert_close(block(part, condition=condition[[cloud]]).tensor, y[here])
        if cloud == 1:
            torch.testing.assert_close(block(part, condition=condition[BATCH][here]).tensor, y[here])
    plain = block.export()
    for rows in (condition, condition[BATCH]):
        torch.testing.assert_close(block(x, batch=BATCH, condition=rows).tensor, y)
        torch.testing.assert_close(plain(x.tensor, x.coords, batch=BATCH, condition=rows), y)
    of_points = GeometricTensor(condition[BATCH], spaces.scalars(C4, N), x.coords)
    for given, batch in ((condition[BATCH], None), (of_points, None), (of_points, BATCH)):
        expected = block(x, batch=batch, condition=condition[BATCH]).tensor
        torch.testing.assert_close(block(x, batch=batch, condition=given).tensor, expected)
    assert (block(x, batch=BATCH, condition=condition.roll(1, 0)).tensor - y).abs().max() > 1e-2
    mask = torch.tensor([True, True, True, False, True, True])
    spoilt = GeometricTensor(torch.where(mask[:, None], x.tensor, torch.nan), fields, x.coords)
    less = GeometricTensor(x.tensor[mask], fields, x.coords[mask])
    expected = block(less, batch=BATCH[mask], condition=condition).tensor
    for rows in (condition, condition[BATCH]):
        found = block(spoilt, batch=BATCH, mask=mask, condition=rows).tensor
        torch.testing.assert_close(found[mask], expected)
        assert not found[~mask].any()
        torch.testing.assert_close(plain(spoilt.tensor, x.coords, batch=BATCH, mask=mask, condition=rows), found)
    single = block(spoilt, mask=mask, condition=condition[:1]).tensor
    torch.testing.assert_close(single[mask], block(less, condition=condition[:1]).tensor)


def test_bad_arguments():
    x, c, pre = FIELDS(torch.randn(2, 8, 3, 3)), torch.randn(2, N), PointTransformerBlock
    points, clouds = GeometricTensor(torch.randn(6, 8), FIELDS, torch.randn(6, 2)), torch.tensor([0, 1])
    with_one, without = (pre(FIELDS, FIELDS, condition=n) for n in (N, None))
    hybrid = {"widths": (2, 2), "convolutions": (1, 0), "attention": (0, 1)}
    sizes = {"fields": 2, "num_blocks": 1, "num_heads": 1}
    for message, call in (
        ("n: got 0", lambda: ConditionedGate(FIELDS, 0)),
        ("scope: got 'batch'", lambda: ConditionedFieldNorm(FIELDS, N, "batch")),
        ("condition: got 5 with norm='gsa', needed norm=\"pre\"", lambda: block_on(FIELDS, norm="gsa")),
        ('condition: got 5 with norm_kind="batch"', lambda: block_on(FIELDS, norm_kind="batch")),
        ('condition: got 5 with norm_kind="batch"', lambda: pre(FIELDS, FIELDS, condition=N, norm_kind="batch")),
        *(("condition: got 0, needed at least 1", lambda m=m: m(FIELDS, FIELDS, condition=0)) for m in (block_on, pre)),
        ("condition: TransformerBlock got None", lambda: block_on(FIELDS)(x)),
        (r"condition: got shape \(2, 4\)", lambda: block_on(FIELDS)(x, condition=torch.randn(2, 4))),
        ("condition: TransformerBlock .*has none", lambda: block_on(FIELDS, condition=None)(x, condition=c)),
        ("condition: PointTransformerBlock got None", lambda: with_one(points)),
        ("condition: PointTransformerBlock .*has none", lambda: without(points, condition=c)),
        ("condition: got None", lambda: with_one.export()(points.tensor, points.coords)),
        ("^batch: .*on a grid", lambda: ConditionedFieldNorm(FIELDS, N)(x, c, clouds)),
        ("^batch: .*on a grid", lambda: ConditionedGate(FIELDS, N)(x, c, clouds)),
        *(
            ("^batch: .*on a grid", lambda m=m: m(x, clouds))
            for m in (DropPath(FIELDS, 0.5), PositionEmbedding(FIELDS))
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    none = r"condition: .*no such option \(.* does without\)"
    for message, call in (
        (r"n: got 2\.0", lambda: ConditionedFieldNorm(FIELDS, 2.0)),
        (r"in_type: .*FieldType", lambda: ConditionedGate(C4, 3)),
        (none, lambda: HybridNet(C4, 1, 2, **hybrid, block={"condition": 3})),
        (none, lambda: PointTransformer(C4, 2, 1, **sizes, attention={"condition": 3})),
        (none, lambda: PlatonicTransformer(C4, 2, 1, **sizes, block={"condition": 3})),
    ):
        with pytest.raises(TypeError, match=message):
            call()
