"""Projections to poses and from them, and the queries, keys and values of heads that they make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType

import escnn_attention as ea
from escnn_attention import PairKernel, RotaryEncoding
from escnn_attention.groups.fibers import fibers, frames, invariant_vectors
from escnn_attention.plain.projections import FromPoses, PoseLinear, Scalars, ToPoses
from tests import spaces
from tests.layers import Case, on_points, vectors
from tests.nn import spheres
from tests.nn.attention import TOLERANCE, attention_for, turned_error
from tests.nn.points import mixed

GSPACES = {
    name: make for name, make in spaces.ALL.items() if name not in {"octahedral on a point", "D4 about an odd axis"}
} | {
    "a product": lambda: gspaces.no_base_space(group.direct_product(group.dihedral_group(3), group.cyclic_group(2))),
}
every_gspace = pytest.mark.parametrize("make", GSPACES.values(), ids=GSPACES)


def rich_type(gspace):
    """Fields of all kinds, interleaved, one of them not orthogonal."""
    last = gspace.fibergroup.irreps()[-1]
    trivial = gspace.trivial_repr
    two = group.directsum([last, trivial], name="a vector and a scalar")
    basis = np.eye(two.size) + np.triu(np.ones((two.size, two.size)), 1)
    oblique = group.change_basis(two, basis, name="oblique", supported_nonlinearities=[])
    fields = [last, oblique, gspace.regular_repr, trivial, last, oblique, trivial]
    return FieldType(gspace, fields)


def to_poses(field_type, fields, **options):
    order = fibers(field_type.gspace).order
    return ToPoses(frames(field_type), field_type.size, fields, order, **options).double()


def from_poses(field_type, fields, *, bias=False, **options):
    order = fibers(field_type.gspace).order
    invariants = invariant_vectors(field_type) if bias else None
    return FromPoses(
        frames(field_type, dual=True), field_type.size, fields, order, invariants=invariants, **options
    ).double()


def both_ways(field_type, bias=False, **options):
    """Projections to two regular fields and from them, each with its types of input and output."""
    poses = spaces.regular(field_type.gspace, 2)
    return (
        (to_poses(field_type, 2, bias=int(bias), **options), field_type, poses),
        (from_poses(field_type, 2, bias=bias, **options), poses, field_type),
    )


def matrix_of(projection, in_type):
    """The matrix of the map of escnn's channels."""
    module, basis = PoseLinear(projection, projection.order), torch.eye(in_type.size, dtype=torch.float64)[None]
    with torch.no_grad():
        return (module(basis) - module(torch.zeros_like(basis)))[0].numpy()


def span(projection, in_type):
    """The matrices of all weights with one entry of one, flat, one a row."""
    rows = []
    for i in range(projection.weight.numel()):
        with torch.no_grad():
            projection.weight.zero_().view(-1)[i] = 1
        rows.append(matrix_of(projection, in_type).ravel())
    return np.stack(rows)


def intertwiners(in_type, out_type):
    """All equivariant maps by brute force: the null space of M ρ(g) - ρ'(g) M."""
    rho, rho_ = in_type.representation, out_type.representation
    n, m = in_type.size, out_type.size
    group_ = in_type.fibergroup
    equations = [
        np.kron(np.eye(m), np.asarray(rho(g)).T) - np.kron(np.asarray(rho_(g)), np.eye(n))
        for g in group_.generators or group_.elements
    ]
    _, s, vh = np.linalg.svd(np.concatenate(equations))
    return vh[np.concatenate([s, np.zeros(n * m - len(s))]) < 1e-9 if len(s) < n * m else s < 1e-9]


def check_intertwines(projection, in_type, out_type):
    matrix = matrix_of(projection, in_type)
    for g in in_type.fibergroup.elements:
        left = matrix @ np.asarray(in_type.representation(g))
        right = np.asarray(out_type.representation(g)) @ matrix
        assert np.abs(left - right).max() <= 1e-13 * max(1.0, np.abs(matrix).max()) * in_type.size


@pytest.mark.sampled(8)
@every_gspace
def test_both_directions_intertwine(make):
    for projection, *types in both_ways(rich_type(make()), bias=True):
        check_intertwines(projection, *types)


def rank(matrix):
    return np.linalg.matrix_rank(matrix, tol=1e-8)


@pytest.mark.parametrize("name", ["trivial", "flip", "C3", "C4", "D3", "dihedral 3D", "conical"])
def test_both_directions_are_complete(name):
    """As many independent maps as parameters, and they are all the equivariant ones."""
    field_type = rich_type(GSPACES[name]())
    for projection, *types in both_ways(field_type):
        made, all_maps = span(projection, types[0]), intertwiners(*types)
        assert rank(made) == len(made) == len(all_maps) == 2 * field_type.size
        assert rank(np.concatenate([made, all_maps])) == len(made)


@every_gspace
def test_fields_of_one_representation_may_lie_apart(make):
    """The order of the fields is no more than the order of the channels."""
    gspace = make()
    last, trivial, regular = gspace.fibergroup.irreps()[-1], gspace.trivial_repr, gspace.regular_repr
    apart, sorted_ = (
        FieldType(gspace, [last, regular, trivial, last]),
        FieldType(gspace, [last, last, regular, trivial]),
    )
    n, r = last.size, regular.size
    order = [*range(n), *range(2 * n, 2 * n + r + 1), *range(n, 2 * n)]  # of sorted channels, as they lie apart
    for (one, in_type, _), (other, *_) in zip(both_ways(apart), both_ways(sorted_), strict=True):
        with torch.no_grad():
            one.weight.copy_(other.weight[:, order])
        matrix = matrix_of(other, in_type)
        expected = matrix[:, order] if in_type is apart else matrix[order]
        np.testing.assert_allclose(matrix_of(one, in_type), expected, atol=1e-12)


@every_gspace
def test_pointwise_leaves_the_poses_alone(make):
    for projection, in_type, out_type in both_ways(spaces.regular(make(), 3), kind="pointwise", bias=True):
        assert projection.weight.shape == (len(out_type), len(in_type))
        expected = np.kron(projection.weight.detach().numpy(), np.eye(projection.order))
        np.testing.assert_allclose(matrix_of(projection, in_type), expected, atol=1e-12)


@pytest.mark.sampled
@every_gspace
@pytest.mark.parametrize("kind", ["group", "pointwise"])
def test_biases_are_invariant(make, kind):
    gspace = make()
    order = gspace.fibergroup.order()
    field_type = rich_type(gspace) if kind == "group" else spaces.regular(gspace, 2)
    reading = to_poses(field_type, 3, kind=kind, bias=2)
    writing = from_poses(field_type, 3, kind=kind, bias=True)
    assert reading.bias.shape == (2,)
    assert writing.bias.shape == (invariant_vectors(field_type).shape[1],)
    for projection in reading, writing:
        assert not projection.bias.any()  # it starts at zero
        with torch.no_grad():
            projection.bias.normal_()
    with torch.no_grad():
        constant = reading(torch.zeros(1, 1, field_type.size).double())[0, 0, 0]
        # One number a field, on every pose; the last field, the keys of an attention, has none.
        assert torch.equal(constant, torch.nn.functional.pad(reading.bias, (0, 1)).expand(order, 3))
        vector = writing(torch.zeros(1, 1, 1, order, 3).double())[0, 0].numpy()
    assert np.abs(vector).max() > 0.01
    for g in gspace.fibergroup.elements:
        np.testing.assert_allclose(np.asarray(field_type.representation(g)) @ vector, vector, atol=1e-9)


@pytest.mark.parametrize("made", [torch.float32, torch.bfloat16])
def test_exact_after_a_change_of_precision(made):
    for projection, *types in both_ways(rich_type(gspaces.flipRot2dOnR2(3, axis=0.2)), bias=True):
        check_intertwines(projection.to(made).double(), *types)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("name", ["trivial", "C4", "D3", "octahedral"])
def test_unit_variance_stays_unit_variance(name, kind):
    gspace = GSPACES[name]()
    order = gspace.fibergroup.order()
    if kind == "pointwise":
        field_type = spaces.regular(gspace, 20)
    else:
        field_type = FieldType(gspace, 10 * [gspace.trivial_repr, gspace.regular_repr, gspace.fibergroup.irreps()[-1]])
    with torch.no_grad():
        poses = to_poses(field_type, 30, kind=kind)(torch.randn(1, 50, field_type.size).double())
        features = from_poses(field_type, 30, kind=kind)(torch.randn(1, 1, 50, order, 30).double())
    assert poses.var().item() == pytest.approx(1, rel=0.2)
    assert features.var().item() == pytest.approx(1, rel=0.2)


def test_scalars_are_a_linear_layer():
    scalars = Scalars(4, 6, bias=3).double()
    x = torch.randn(2, 5, 4).double()
    assert scalars(x).shape == (1, 2, 5, 1, 6)
    assert not scalars.bias.any()
    with torch.no_grad():
        scalars.bias.normal_()
    bias = torch.cat([scalars.bias, torch.zeros(3).double()])
    torch.testing.assert_close(scalars(x)[0, :, :, 0], x @ scalars.weight.T + bias)
    assert Scalars(4, 6).bias is None
    assert Scalars(400, 200)(torch.randn(1, 50, 400)).var().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("bias", [0, 4])
def test_groups_are_the_fields_taken_apart(kind, bias):
    gspace = gspaces.rot2dOnR2(3)
    field_type, x = spaces.regular(gspace, 2), torch.randn(2, 5, 6).double()
    whole = to_poses(field_type, 6, kind=kind, bias=bias)
    apart = to_poses(field_type, 6, kind=kind, bias=bias, groups=3)
    apart.load_state_dict(whole.state_dict())
    torch.testing.assert_close(apart(x), whole(x).view(2, 5, 3, 3, 2).movedim(-2, 0))
    back, back_apart = from_poses(field_type, 6, kind=kind), from_poses(field_type, 6, kind=kind, groups=3)
    back_apart.load_state_dict(back.state_dict())
    torch.testing.assert_close(back_apart(apart(x)), back(whole(x)))
    scalars, scalars_apart = Scalars(6, 6, bias=4).double(), Scalars(6, 6, bias=4, groups=2).double()
    scalars_apart.load_state_dict(scalars.state_dict())
    torch.testing.assert_close(scalars_apart(x), scalars(x).view(2, 5, 1, 2, 3).movedim(-2, 0))


D3 = gspaces.flipRot2dOnR2(3)
SCALES = ea.Scales(2, 2)


def grid(encoding, layer=ea.GroupSelfAttention, channels=3, types=None, **options):
    in_type = spaces.scalars(D3, 2) if layer is ea.LiftingSelfAttention else spaces.mixed(D3)
    types = types or (in_type, spaces.regular(D3, 1))
    return Case(
        lambda: layer(*types, 2, 3, head_fields=channels, encoding=encoding, **options),
        shape=(1, 4, 4),
    )


def dilation(encoding, channels=3):
    fields = SCALES.repeat(spaces.regular(D3, 1))
    return Case(
        lambda: ea.DilationSelfAttention(fields, fields, SCALES, 2, 3, head_fields=channels, encoding=encoding),
        shape=(1, 5, 5),
    )


def points(encoding, layer=ea.PointSelfAttention, channels=3, types=None, **options):
    types = types or 2 * (mixed(D3),)
    return on_points(lambda: layer(*types, 2, head_fields=channels, encoding=encoding, **options))


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
    "points, scalars, count": (points("mlp", types=(spaces.scalars(D3, 2), mixed(D3)), normalization="count"), 3),
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


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", BIASED)
def test_keys_have_a_bias_exactly_where_it_matters(name, monkeypatch):
    """What is added to all keys, channel by channel: to the keys themselves, and by the parameter."""
    case, biased = BIASED[name]
    module = case.drawn()
    core, inputs = module.plain, case.inputs(module)
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

            def shifted(*given, made=core.project_in.in_parts, number=number):
                *others, keys = made(*given)
                return [*others, keys + number]

            with monkeypatch.context() as patch:
                patch.setattr(core.project_in, "in_parts", shifted)
                changed = case.output(module, *inputs)
            assert ((changed - y).norm() > 1e-6 * y.norm()) == (channel < biased), channel
            if channel < biased:
                core.project_in.bias[-heads * biased :].view(heads, biased)[:, channel] += 1.5
                torch.testing.assert_close(case.output(module, *inputs), changed, rtol=1e-9, atol=1e-11)
                core.project_in.bias[-heads * biased :].view(heads, biased)[:, channel] -= 1.5


SAMPLES = {"types": 2 * (vectors(gspaces.rot2dOnR2(-1)),), "samples": 5}
POSED = {
    "grid, absolute": grid("absolute", keys="own"),
    "grid, absolute, scalars": grid("absolute", types=(spaces.scalars(D3, 2), spaces.regular(D3, 1))),
    "grid, absolute, samples": grid("absolute", keys="own", **SAMPLES),
    "points, absolute, softmax": points("absolute", keys="own"),
    # The separable encoding splits its channels differently where there are poses.
    **{
        f"points, {name}, count": points(name, keys="own", normalization="count")
        for name in ("mlp", "rotary", "absolute")
    },
    "points, samples": points(ea.MLPEncoding(per_head=False), keys="own", normalization="count", **SAMPLES),
}


@pytest.mark.parametrize("name", POSED)
def test_a_constant_term_of_the_pose_is_a_bias(name, monkeypatch):
    """A layer without such a term gives the same as one that has it, with the term added to its bias."""
    case, is_grid = POSED[name], name.startswith("grid")
    module = case.drawn()
    decides = "self_attention.has_pose_term" if is_grid else "point_attention._drops_out"
    monkeypatch.setattr(f"escnn_attention.nn.{decides}", lambda *_, **__: is_grid)
    if "scalars" in name:
        monkeypatch.setattr("escnn_attention.nn.self_attention.sees_scalars", lambda *_: False)
    posed = case.drawn()
    for parameter in posed.parameters():
        torch.nn.init.normal_(parameter)
    own = module.state_dict()
    assert not [n for n in own if "encoding.pose_" in n]
    assert [n for n in posed.state_dict() if "encoding.pose_" in n]
    module.load_state_dict({n: t for n, t in posed.state_dict().items() if n in own and t.shape == own[n].shape})
    inputs = case.inputs(module)
    expected = case.output(posed, *inputs)
    core, bias = module.plain, posed.plain.project_in.bias.detach()
    core.project_in.bias.data.copy_(bias)
    assert (case.output(module, *inputs) - expected).norm() > 1e-3 * expected.norm()  # the term does something
    encoding, (pose, *_) = posed.plain.encoding, posed.plain.quotient[0] if posed.plain.relative is None else [0]
    terms = encoding.poses() if posed.plain.relative is None else encoding.poses(posed.plain.relative[0])
    term = terms[:, pose].expand(core.num_heads, -1).flatten()  # of the pose h⁻¹h
    of_fields = dict(zip(core.needs.fields, core.project_in.bias.split(term.numel()), strict=False))
    with torch.no_grad():
        if encoding.absolute:
            of_fields["queries"].data.add_(term)
        if getattr(core, "normalization", "softmax") == "count":
            of_fields["keys"].data.add_(term)
    torch.testing.assert_close(case.output(module, *inputs), expected, rtol=1e-10, atol=1e-12)


def test_constants_of_a_kernel_that_drop_out_are_no_parameters():
    constants = {"plain.encoding.bias", "plain.encoding.of_pose"}
    options = {"head_fields": 3, "encoding": PairKernel("dot", "raw", "sum"), "keys": "own", "query": "all"}
    layer = ea.PointSelfAttention(*2 * [mixed(D3)], **options)
    counted = ea.PointSelfAttention(*2 * [mixed(D3)], **options, normalization="count")
    assert not constants & set(layer.state_dict())
    assert constants < set(counted.state_dict())


CONSTANT = {
    "grid": lambda encoding: grid(encoding, channels=4, query="all"),
    "grid, keys own": lambda encoding: grid(encoding, channels=4, keys="own"),
    "lifting": lambda encoding: grid(encoding, ea.LiftingSelfAttention, channels=4),
    "dilation": lambda encoding: dilation(encoding, channels=4),
    "points": lambda encoding: points(encoding, channels=4, keys="own", num_neighbours=4),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_keys_are_keys_with_nothing_but_a_bias_of_one(name):
    case, full = (CONSTANT[name](RotaryEncoding(constant_keys=some)) for some in (True, False))
    module, other = case.drawn(), full.make().double()
    core = module.plain
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
    leaves = [core.project_in.bias, *inputs], [other.plain.project_in.bias, *inputs]
    got, needed = (torch.autograd.grad(t.sin().sum(), of) for t, of in zip((y, expected), leaves, strict=True))
    torch.testing.assert_close(got[0], needed[0][: 2 * fields], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(got[1:], needed[1:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("keys", ["own", "all"])
def test_constant_keys_commute_with_the_group(keys):
    layer = attention_for(spaces.PLANE["D6"](), encoding=RotaryEncoding(constant_keys=True), size=3, keys=keys)
    torch.nn.init.normal_(layer.plain.project_in.bias)
    x = spaces.random_field(layer.in_type, 4, 4)
    assert turned_error(layer, x) < TOLERANCE
    # A constant that differs from pose to pose is no constant field.
    make = layer.plain.to_heads
    layer.plain.to_heads = lambda x, **options: (lambda q, k, v: (q, k + torch.arange(12.0).double().view(-1, 1), v))(
        *make(x, **options)
    )
    assert turned_error(layer, x) > 1e-3


def test_constant_keys_need_rotations_of_all_channels():
    fields = spaces.regular(D3, 1)
    for options, encoding in (({"head_fields": 3}, {}), ({"head_fields": 4}, {"num_frequencies": 1})):
        with pytest.raises(ValueError, match=r"constant_keys=True.* rotates 2 of the .* set head_fields"):
            ea.GroupSelfAttention(fields, fields, encoding=RotaryEncoding(constant_keys=True, **encoding), **options)
    alone = spaces.regular(spaces.POINT["D4 on a point"](), 2)
    with pytest.raises(ValueError, match=r"constant_keys=True.* no offsets to rotate by"):
        ea.GroupSelfAttention(alone, alone, encoding=RotaryEncoding(constant_keys=True), kernel_size=None)
    with pytest.raises(TypeError, match=r"constant_keys: .*needed True or"):
        RotaryEncoding(constant_keys=1)


def test_parameters_keep_their_order():
    """Optimizers in checkpoints know them by their numbers."""
    space = gspaces.rot2dOnR2(4)
    regular = FieldType(space, [space.regular_repr])
    for layer in (ea.GroupSelfAttention(regular, regular, kernel_size=3), ea.PointSelfAttention(regular, regular)):
        names = [name.split(".")[1] for name, _ in layer.named_parameters()]
        assert sorted(names, key=["project_in", "project_out", "encoding"].index) == names


@pytest.mark.parametrize("kind", ["regular", "mixed"])
@pytest.mark.parametrize("groups", [1, 2])
def test_expanded_weights_are_kept_in_evaluation_and_follow_the_weights(monkeypatch, groups, kind):
    gspace = GSPACES["D3"]()
    in_type = rich_type(gspace) if kind == "mixed" else spaces.regular(gspace, 2)
    made = to_poses(in_type, 4, groups=groups, bias=2)
    x, expanded = torch.randn(1, 5, in_type.size, dtype=torch.float64), []
    of_frames = type(made.frames)._expanded
    monkeypatch.setattr(type(made.frames), "_expanded", lambda *args: (expanded.append(1), of_frames(*args))[1])
    made.eval()
    for step in range(3):
        with torch.no_grad():
            first, again = made(x), made(x)
            assert torch.equal(first, again)
            assert len(expanded) == step + 1
        torch.testing.assert_close(first, made.train()(x))  # in which nothing is kept
        expanded[step + 1 :] = []
        made.eval().weight.data.add_(1)


def pose_linear(kind, to):  # to poses, or from them
    t = spaces.regular(gspaces.rot2dOnR2(3), 2)
    made = ToPoses(frames(t), 6, 4, 3, kind=kind, bias=4) if to else FromPoses(frames(t, dual=True), 6, 4, 3, kind=kind)
    return PoseLinear(made, 3)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("space", [(), (5,), (4, 3), (2, 3, 4)])
def test_positions_are_mapped_one_by_one(space, kind):
    for module, size_in, size_out in (pose_linear(kind, True), 6, 12), (pose_linear(kind, False), 12, 6):
        x = torch.randn(2, size_in, *space)
        y = module(x)
        assert y.shape == (2, size_out, *space)
        for index in [()] if not space else [(0,) * len(space), tuple(n - 1 for n in space)]:
            here = (..., *index)
            torch.testing.assert_close(y[here], module(x[here]))


def test_a_regular_field_keeps_its_poses_together():
    """Channel field · |H| + pose, as escnn has it."""
    module, x = pose_linear("group", True), torch.randn(1, 6)
    with torch.no_grad():
        module.projection.bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(module(0 * x)[0], torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat_interleave(3))
    module = pose_linear("pointwise", False)
    with torch.no_grad():
        module.projection.weight.zero_()[1, 2] = 1  # from field 2 to field 1
    x = torch.arange(12.0)[None]
    assert module(x).tolist() == [[0, 0, 0, 6, 7, 8]]
