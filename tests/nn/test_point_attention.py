"""Attention on points: the formula written out, equivariance, neighbourhoods, gradients, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    FourierEncoding,
    GroupSelfAttention,
    LogMotion,
    LogPolar,
    MLPEncoding,
    Offset,
    Pair,
    PairKernel,
    PointAttentiveConv,
    PointSelfAttention,
    Samples,
)
from escnn_attention.groups.fibers import fibers
from escnn_attention.models import PointTransformer
from tests.layers import BATCH, assert_formula, drawn, served
from tests.nn.points import cloud, error_of, mixed, worst_error
from tests.spaces import generators

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


@pytest.mark.parametrize("table", ["inverse_action", "quotient"])
def test_a_broken_action_is_not_equivariant(table):
    torch.manual_seed(6)
    space = gspaces.rot2dOnR2(5)
    in_type = mixed(space, 2)
    x = cloud(in_type, 6)
    for kind in (PointSelfAttention, PointAttentiveConv):
        layer = kind(in_type, in_type, num_heads=2, head_fields=2).double()
        assert worst_error(layer, x) < 1e-12
        broken = getattr(layer.plain, table)
        if table == "quotient":  # the numbers of the tables are those of all layers
            layer.plain.quotient = broken.flip(0)
        else:
            broken.copy_(broken.flip(0))
        assert worst_error(layer, x) > 1e-3


@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "none"])
@pytest.mark.parametrize("options", [{}, {"query": "all"}, {"keys": "own", "shared_scores": True}], ids=str)
@pytest.mark.parametrize("kind", ["regular_repr", "trivial_repr"])
def test_on_a_grid_it_is_group_self_attention(kind, options, encoding):
    """The points of a 5×5 grid, with the weights of the layer on grids, by all backends of both."""
    torch.manual_seed(12)
    in_type, out_type = FieldType(D4, 2 * [getattr(D4, kind)]), FieldType(D4, 2 * [D4.regular_repr])
    options = {"num_heads": 2, "head_fields": 3, "encoding": encoding, **options}
    on_grid = GroupSelfAttention(in_type, out_type, kernel_size=None, **options).double()
    on_points = PointSelfAttention(in_type, out_type, length_scale=4.0, **options).double()
    on_points.load_state_dict(on_grid.state_dict())
    x = torch.randn(1, in_type.size, 5, 5, dtype=torch.float64)
    i, j = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
    coords = torch.stack([j - 2, 2 - i], dim=-1).flatten(0, 1).double()
    points = GeometricTensor(x[0].flatten(1).T.contiguous(), in_type, coords)
    expected = on_grid(GeometricTensor(x, in_type)).tensor[0].flatten(1).T
    for _, found in served(lambda: on_points(points).tensor, on_points):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    for _, found in served(lambda: on_grid(in_type(x)).tensor, on_grid):
        torch.testing.assert_close(found[0].flatten(1).T, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("space", "name"),
    [(lambda: D4, "R2PointConv"), (lambda: gspaces.rot2dOnR3(4), "R3PointConv")],
)
@pytest.mark.slow
def test_it_mixes_with_point_convolutions_of_escnn(space, name):
    pytest.importorskip("torch_geometric")
    torch.manual_seed(16)
    space = space()
    scalars, hidden = FieldType(space, [space.trivial_repr]), FieldType(space, 2 * [space.regular_repr])
    options = {"width": 2.0, "n_rings": 2, "frequencies_cutoff": 2.0}
    before = getattr(nn, name)(scalars, hidden, **options)
    attention = PointSelfAttention(hidden, hidden, num_heads=2)
    after = getattr(nn, name)(hidden, mixed(space), **options)
    x = GeometricTensor(torch.randn(8, 1), scalars, torch.randn(8, space.dimensionality))
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 2, 5], [1, 2, 3, 0, 5, 6, 7, 4, 2, 1]])

    def worst(network) -> float:
        return error_of(network, x, space.fibergroup.elements)

    # escnn holds the bases of its kernels in float32.
    assert worst(lambda x: after(attention(before(x, edges), edges), edges)) < 1e-5

    def broken(x):
        y = attention(before(x, edges), edges)
        return after(GeometricTensor(y.tensor.roll(1, dims=1), hidden, y.coords), edges)

    assert worst(broken) > 1e-2


def test_bad_arguments():
    fields = FieldType(C4, 2 * [C4.regular_repr])
    for error, message, arguments in (
        (ValueError, "radius", {"radius": 0.0}),
        (ValueError, "radius", {"radius": "far"}),
        (TypeError, "num_neighbours", {"num_neighbours": 2.5}),
        (ValueError, "num_neighbours", {"num_neighbours": 0}),
        (ValueError, "length_scale", {"length_scale": -1.0}),
        (TypeError, "relation", {"relation": "offset"}),
        (ValueError, "relation", {"relation": Pair(), "encoding": "rotary"}),
        (ValueError, "relation", {"relation": Pair(), "encoding": "absolute"}),
        (ValueError, "normalization", {"normalization": "sum"}),
        (ValueError, "backend", {"backend": "blocked"}),
        (ValueError, "num_heads", {"num_heads": 3}),
        (ValueError, "encoding", {"encoding": "sine"}),
        (ValueError, "query", {"query": "none"}),
    ):
        with pytest.raises(error, match=message):
            PointSelfAttention(fields, fields, **arguments)
    none, other = gspaces.no_base_space(C4.fibergroup), gspaces.rot2dOnR3(4)
    nowhere, in_space = FieldType(none, [none.regular_repr]), FieldType(other, [other.regular_repr])
    for message, call in (
        (r"base space.* PointSelfAttention", lambda: PointAttentiveConv(nowhere, nowhere)),
        ("plane", lambda: PointSelfAttention(in_space, in_space, relation=LogPolar())),
        ("PointAttentiveConv got Rotary", lambda: PointAttentiveConv(fields, fields, encoding="rotary")),
        ("PointAttentiveConv got Absolute", lambda: PointAttentiveConv(fields, fields, encoding="absolute")),
        ("cont", lambda: PairKernel(content="product")),
        ("cont", lambda: PairKernel(content="none", location="none")),
        ("hidd", lambda: PairKernel(hidden=0)),
        ("product", lambda: PairKernel("none", combine="product")),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# A periodic box: the space, the sides, and whether the group maps the box onto itself.
BOXES = {
    "trivial": (gspaces.trivialOnR2, (2.0, 3.0), True),
    "C2": (lambda: gspaces.rot2dOnR2(2), (2.0, 3.0), True),
    "flip": (gspaces.flip2dOnR2, (2.0, 3.0), True),
    "C4": (lambda: C4, 2.5, True),
    "D4": (lambda: D4, 2.5, True),
    "inversion": (gspaces.invOnR3, (2.0, 2.5, 3.0), True),
    "C4 on R3": (lambda: gspaces.rot2dOnR3(4), (2.5, 2.5, 3.0), True),
    "octahedral": (gspaces.octaOnR3, 2.5, True),
    "C4, unequal": (lambda: C4, (2.0, 3.0), False),
    "C3": (lambda: gspaces.rot2dOnR2(3), 2.5, False),
    "C8": (lambda: gspaces.rot2dOnR2(8), 2.5, False),
    "flip about an odd axis": (lambda: gspaces.flip2dOnR2(axis=0.3), 2.5, False),
    "C4 on R3, unequal": (lambda: gspaces.rot2dOnR3(4), (2.0, 3.0, 2.5), False),
    "octahedral, unequal": (gspaces.octaOnR3, (2.5, 2.5, 3.0), False),
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), 2.5, False),
}
PERIODIC = [name for name, (_, _, good) in BOXES.items() if good]
RULES: list[dict] = [{"radius": 0.9}, {"num_neighbours": 4}, {"radius": 1.0, "cutoff": True}, {}]


def in_box(name, kind, seed=0, number=16, **options):
    """A layer in a periodic box, features at points in and out of the box, and its sides."""
    make, period, _ = BOXES[name]
    space = make()
    fields = mixed(space)
    torch.manual_seed(seed)
    options = {"num_heads": 2, "head_fields": 2, "period": period, "length_scale": 0.7, **options}
    layer = kind(fields, fields, **options).double()
    x = cloud(fields, number, seed=seed, spread=3.0)
    dim = space.dimensionality
    return layer, x, torch.tensor(dim * [period] if isinstance(period, float) else period, dtype=torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [PointSelfAttention, PointAttentiveConv])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", PERIODIC)
def test_a_periodic_box(name, rule, kind):
    """Equivariant to the group, and invariant to whole periods of every point and to translations of all."""
    seed = int(torch.randint(2**16, ()))
    for encoding in ("mlp", "fourier", PairKernel(hidden=3)):
        layer, x, sides = in_box(name, kind, seed, encoding=encoding, **rule)
        batch = torch.arange(16) % 2
        y = layer(x, batch=batch).tensor
        assert worst_error(layer, x, batch=batch) < 1e-10

        def changed(coords, layer=layer, x=x, batch=batch, y=y):
            moved = layer(GeometricTensor(x.tensor, x.type, coords), batch=batch).tensor
            return float((moved - y).norm() / y.norm())

        whole = torch.randint(-5, 6, x.coords.shape) * sides
        assert changed(x.coords + whole) < 1e-10
        assert changed(x.coords + torch.randn(len(sides)).double()) < 1e-10
        assert changed(x.coords + whole + 0.1 * torch.randn(x.coords.shape).double()) > 1e-6
    options = {"radius": None, "num_neighbours": None, "cutoff": False, **rule}
    outside, *_ = in_box(name, kind, seed, encoding=PairKernel(hidden=3), **{**options, "period": None})
    within = x.coords - sides * (x.coords / sides).floor()
    y, z = (outside(GeometricTensor(x.tensor, x.type, at), batch=batch).tensor for at in (within, x.coords))
    assert (z - y).norm() / y.norm() > 1e-3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["auto", "neighbours", "reference"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_periodic_box_is_edges_to_the_nearest_images(rule, backend):
    """The formula between images of points that lie side by side, with gradients of their coordinates."""
    layer, x, sides = in_box("D4", PointSelfAttention, 3, number=5, backend=backend, encoding="mlp", **rule)
    coords = x.coords.requires_grad_()
    y = layer(GeometricTensor(x.tensor, x.type, coords)).tensor
    # One query at a time, with every other point moved to its nearest image, in space without a period.
    plain, *_ = in_box("D4", PointSelfAttention, 3, period=None, encoding="mlp", **rule)
    plain.load_state_dict(layer.state_dict())
    rows = []
    for i in range(len(coords)):
        shift = ((coords - coords[i]) / sides).round().detach() * sides
        rows.append(plain(GeometricTensor(x.tensor, x.type, coords - shift)).tensor[i])
    assert_formula(y, torch.stack(rows), [coords])
    assert not torch.allclose(plain(x).tensor, y)


def test_a_relation_with_a_period_is_the_same():
    for rule in RULES:
        layer, x, _ = in_box("C4", PointSelfAttention, 1, **rule)
        other, *_ = in_box("C4", PointSelfAttention, 1, **{**rule, "period": None, "relation": Offset(2.5)})
        assert torch.equal(layer(x).tensor, other(x).tensor)
        assert "period=2.5" in repr(layer)
    assert "period" not in repr(in_box("C4", PointSelfAttention, period=None)[0])


def test_boxes_that_there_are_not():
    for name in BOXES.keys() - set(PERIODIC):
        options = {"samples": 8} if name == "SO(2)" else {}
        make, period, _ = BOXES[name]
        space = make()
        scalars = FieldType(space, [space.trivial_repr])
        with pytest.raises(ValueError, match=r"period.*map onto itself"):
            PointSelfAttention(scalars, scalars, head_fields=2, period=period, **options)
    for error, message, options in (
        (ValueError, "radius.*half a side, 1.25", {"radius": 1.3}),
        (ValueError, "period.*3 sides", {"period": (2.5, 2.5, 2.5)}),
        (ValueError, "period.*positive", {"period": -1.0}),
        (TypeError, "period", {"period": "far"}),
        (ValueError, "period.*Rotary.*None", {"encoding": "rotary"}),
        (ValueError, "period.*Absolute.*None", {"encoding": "absolute"}),
        (ValueError, "period.*relation=Pair", {"relation": Pair()}),
        (ValueError, "period.*relation=Offset", {"relation": Offset(3.0)}),
    ):
        with pytest.raises(error, match=message):
            in_box("C4", PointSelfAttention, **options)
    layer, x, _ = in_box("C4", PointSelfAttention, radius=1.25)
    assert layer(x).tensor.isfinite().all()
    with pytest.raises(ValueError, match=r"positions.*periodic"):
        PointTransformer(C4, 2, 1, positions=True, attention={"period": 2.5})
    with pytest.raises(ValueError, match=r"positions.*periodic"):
        PointTransformer(C4, 2, 1, positions=True, relation=Offset(2.5))


CONTINUOUS = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1, maximum_frequency=3), lambda group, n: group.irrep(n), (4, 32)),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1, maximum_frequency=3), lambda group, n: group.irrep(1, n), (8, 64)),
    "SO(3)": (gspaces.rot3dOnR3, lambda group, n: group.irrep(n), (12, 60)),
    "O(3)": (gspaces.flipRot3dOnR3, lambda group, n: group.irrep(n % 2, n), (24, 120)),
    "SO(2) about an axis": (gspaces.rot2dOnR3, lambda group, n: group.irrep(n), (4, 32)),
    "O(2) with half turns": (gspaces.dihedralOnR3, lambda group, n: group.irrep(1, n), (8, 64)),
    "O(2) with mirrors": (gspaces.conicalOnR3, lambda group, n: group.irrep(1, n), (8, 64)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((PointSelfAttention, name) for name in CONTINUOUS),
        (PointAttentiveConv, "SO(2)"),
        *(pytest.param(PointAttentiveConv, name, marks=pytest.mark.exhaustive) for name in list(CONTINUOUS)[1:]),
    ],
)
def test_samples_of_continuous_groups(name, kind):
    """Exact for the elements that permute the samples; the error of others falls with their number."""
    build, irrep, numbers = CONTINUOUS[name]
    space = build()
    group = space.fibergroup
    scalars = FieldType(space, 2 * [space.trivial_repr])
    out_type = FieldType(space, [space.trivial_repr, irrep(group, 1)])
    np.random.seed(0)
    random = [group.sample() for _ in range(2)]
    for in_type in (scalars, out_type):
        x = cloud(in_type, 5)
        errors = []
        for number in numbers:
            torch.manual_seed(1)
            layer = kind(
                in_type,
                out_type,
                head_fields=2,
                samples=number,
                encoding=MLPEncoding(hidden=4),
                length_scale=3.0,
            ).double()
            own = fibers(space, Samples(number)).elements[1 :: max(1, number // 3)]
            assert error_of(layer, x, own) < 1e-11
            errors.append(error_of(layer, x, random))
        assert errors[-1] < 0.4 * errors[0]
        assert errors[-1] < (0.05 if "2" in name else 0.5)
    # With an action that is not that of the group nothing is exact.
    layer.plain.inverse_action[:] = layer.plain.inverse_action.flip(0)
    assert error_of(layer, x, own) > 1e-2


def test_the_check_says_that_samples_are_not_all_elements():
    space = gspaces.rot2dOnR2(-1)
    scalars, vectors = FieldType(space, [space.trivial_repr]), FieldType(space, [space.irrep(1)])
    with pytest.raises(AssertionError, match="permute"):
        PointSelfAttention(scalars, vectors, samples=3).check_equivariance()


def test_samples_are_of_continuous_groups():
    finite, continuous = C4, gspaces.rot2dOnR2(-1)
    fields = FieldType(finite, [finite.regular_repr])
    with pytest.raises(ValueError, match="samples"):
        PointSelfAttention(fields, fields, samples=4)
    scalars = FieldType(continuous, [continuous.trivial_repr])
    with pytest.raises(NotImplementedError, match="samples"):
        PointSelfAttention(scalars, scalars)


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": FourierEncoding(3), "keys": "own"},
        {"encoding": PairKernel(hidden=4), "relation": LogMotion()},
        {"encoding": PairKernel(hidden=4), "relation": LogMotion(), "registers": 2},
    ],
)
def test_samples_of_a_subgroup_are_that_subgroup(options):
    """SO(2) at 4 samples is C4 with the same weights, for fields that the two have in common."""
    torch.manual_seed(3)
    rotations, quarter = gspaces.rot2dOnR2(-1), C4
    sampled = FieldType(rotations, [rotations.trivial_repr, rotations.irrep(1)])
    finite = FieldType(quarter, [quarter.trivial_repr, quarter.irrep(1)])
    arguments = {"num_heads": 2, "head_fields": 2, **options}
    a = PointSelfAttention(sampled, sampled, samples=4, **arguments).double()
    b = PointSelfAttention(finite, finite, **arguments).double()
    b.load_state_dict(a.state_dict())
    x = cloud(sampled, 5)
    y = a(x).tensor
    z = b(GeometricTensor(x.tensor, finite, x.coords)).tensor
    ratio = (y - y.mean(0)).norm() / (z - z.mean(0)).norm()  # How sums over poses are weighed.
    torch.testing.assert_close(y - y.mean(0), ratio * (z - z.mean(0)), rtol=1e-9, atol=1e-10)


def test_samples_have_registers():
    torch.manual_seed(5)
    space = gspaces.rot2dOnR2(-1)
    fields = FieldType(space, [space.trivial_repr, space.irrep(1)])
    layer = PointSelfAttention(fields, fields, head_fields=2, samples=4, registers=2).double()
    x, own = cloud(fields, 5), fibers(space, Samples(4)).elements
    assert error_of(layer, x, own) < 1e-11
    y = layer(x).tensor
    layer.plain.backend = "reference"
    torch.testing.assert_close(layer(x).tensor, y)
    with torch.no_grad():
        layer.plain.registers.values.add_(1.0)
    assert (layer(x).tensor - y).norm() > 1e-2 * y.norm()
    layer.plain.inverse_action[:] = layer.plain.inverse_action.flip(0)
    assert error_of(layer, x, own) > 1e-3


def test_samples_turned_at_random():
    """One turn of the samples is exact when it is carried along; many are equivariant on average."""
    torch.manual_seed(4)
    space = gspaces.rot2dOnR2(-1, maximum_frequency=2)
    in_type = FieldType(space, [space.trivial_repr, space.irrep(1)])
    layer = PointSelfAttention(
        in_type, in_type, head_fields=2, samples=Samples(3, turn="random"), encoding=MLPEncoding(hidden=4)
    ).double()
    x = cloud(in_type, 5)
    element = space.fibergroup.element(1.0)
    layer.eval()
    assert torch.equal(layer(x).tensor, layer(x).tensor)
    fixed = error_of(layer, x, [element])
    layer.train()
    assert not torch.equal(layer(x).tensor, layer(x).tensor)
    # The turn g of x, and the turn of g⁻¹x that gives the same samples as its points see them.
    turn = layer.plain.transformation
    angles = 2 * math.pi * torch.arange(16, dtype=torch.float64) / 16
    draws = [type(turn.draw())(angle.view(1)) for angle in angles]  # Evenly, and so with the mean over all of them.
    with torch.no_grad():
        means = []
        for points in (x, x.transform(element)):
            outs = []
            for drawn in draws:
                turn.draw = lambda drawn=drawn: drawn
                outs.append(layer(points).tensor)
            means.append(torch.stack(outs).mean(0))
        y = GeometricTensor(means[0], in_type, x.coords).transform_fibers(element).tensor
        assert float((means[1] - y).norm() / y.norm()) < min(1e-4, fixed / 100)
        turn.draw = lambda: draws[0]
        y = layer(x)
        moved = type(draws[0])(draws[0].vector + 1.0, draws[0].component)
        turn.draw = lambda: moved
        z = layer(x.transform(element)).tensor
    torch.testing.assert_close(z, y.transform_fibers(element).tensor, rtol=1e-9, atol=1e-10)


def test_attention_maps_follow_the_group():
    """The pose h of the query becomes gh, and so do those of the keys."""
    fields = mixed(D4)
    layer, x = drawn(PointSelfAttention(fields, fields, head_fields=4, radius=1.5)), cloud(fields, 7)
    elements = list(D4.fibergroup.elements)
    for g in generators(D4):
        moved = [elements.index(g @ h) for h in elements]
        before, after = (layer.attention_maps(z, range(7)) for z in (x, x.transform(g)))
        torch.testing.assert_close(after[:, :, moved][..., moved, :], before)
    assert (after - before).abs().max() > 1e-4


def test_attention_maps_of_points_that_there_are_not():
    layer = PointSelfAttention(mixed(D4), mixed(D4), head_fields=4).double()
    x = cloud(layer.in_type, 5)
    for positions, poses in (([5], None), ([[0, 1]], None), ([0], [8])):
        message = "positions: got" if poses is None else "poses: got 8"
        with pytest.raises(ValueError, match=message):
            layer.attention_maps(x, positions, poses)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("encoding", ["mlp", "rotary", "absolute", "none"])
@pytest.mark.parametrize("modes", [("own", "all"), ("all", "all"), ("own", "own")], ids="-".join)
def test_sets_of_tokens_have_no_places(encoding, modes):
    """Equivariant, in any order, and as a network on the only point of a space that is one."""
    point = gspaces.no_base_space(D4.fibergroup)
    fields = FieldType(point, [point.regular_repr, point.irrep(1, 1), point.trivial_repr])
    options = {"head_fields": 4, "encoding": encoding, "query": modes[0], "keys": modes[1]}
    layer = drawn(PointSelfAttention(fields, fields, 2, **options))
    x = fields(torch.randn(9, fields.size).double())
    found = layer(x, batch=BATCH)
    assert found.coords is None
    for backend in ("reference", "neighbours"):
        layer.plain.backend = backend
        torch.testing.assert_close(layer(x, batch=BATCH).tensor, found.tensor)
    for g in generators(D4):
        moved = layer(x.transform(g), batch=BATCH).tensor
        torch.testing.assert_close(moved, found.transform(g).tensor)
    assert (moved - found.tensor).abs().max() > 1e-4 or (encoding, modes) == ("none", ("all", "all"))  # invariant
    order = torch.randperm(9)
    torch.testing.assert_close(layer(fields(x.tensor[order]), batch=BATCH[order]).tensor, found.tensor[order])
    single = drawn(GroupSelfAttention(fields, fields, 2, None, **options))
    single.load_state_dict(layer.state_dict())
    alone = layer(x, batch=torch.arange(9)).tensor
    mapped = torch.func.vmap(lambda t: layer(fields(t), batch=torch.arange(9)).tensor)(x.tensor[None])
    torch.testing.assert_close(mapped[0], alone)
    torch.testing.assert_close(single(x).tensor, alone)
    assert (alone - found.tensor).abs().max() > 1e-4
    assert layer.check_equivariance()
    assert layer.attention_maps(x, [0], batch=BATCH).shape[-1] == 9


@pytest.mark.parametrize(
    "options", [{"radius": 1.0}, {"period": 2.0}, {"encoding": PairKernel()}, {"relation": Pair()}], ids=str
)
def test_places_of_tokens_that_there_are_not(options):
    point = gspaces.no_base_space(D4.fibergroup)
    fields = FieldType(point, [point.regular_repr])
    with pytest.raises(ValueError, match=f"{next(iter(options))}: .* no base space"):
        PointSelfAttention(fields, fields, head_fields=4, **options)
