"""Attention on points as PyTorch computes it: the formula written out, backends, gradients, precisions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    Encoding,
    LiftedMotion,
    LogPolar,
    MLPEncoding,
    Pair,
    PairKernel,
    PointAttentiveConv,
    PointLift,
    PointSelfAttention,
    RotaryEncoding,
    Samples,
    working_memory,
)
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.geometry.points import Cloud
from tests.nn.points import ENCODINGS, cloud, mixed, worst_error, written_out

C3, C4 = gspaces.rot2dOnR2(3), gspaces.rot2dOnR2(4)


def attention(space, **options):
    """A layer on regular, trivial and other fields."""
    fields = mixed(space)
    return PointSelfAttention(fields, fields, **options).double()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("query", "keys", "shared"),
    [("own", "all", False), ("all", "all", False), ("own", "own", False), ("all", "own", False), ("own", "own", True)],
)
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("edge_dim", [None, 2])
def test_the_formula(encoding, query, keys, shared, normalization, edge_dim):
    """Values and gradients, of edges with features and without."""
    encoding = encoding if not shared or encoding in ("mlp", "shared", "separable", "fourier") else "none"
    space = gspaces.flipRot2dOnR2(3) if keys == "all" and query == "own" else gspaces.rot2dOnR2(3)
    in_type = FieldType(space, 2 * [space.trivial_repr]) if shared and edge_dim is None else mixed(space)
    out_type = FieldType(space, 2 * [space.regular_repr])
    options = {"query": query, "keys": keys, "normalization": normalization, "edge_dim": edge_dim}
    options["shared_scores"] = shared
    layer = PointSelfAttention(
        in_type, out_type, 2, head_fields=3, encoding=ENCODINGS[encoding](), length_scale=0.7, **options
    ).double()
    if normalization == "count" and isinstance(layer.plain.encoding, Encoding):
        # No softmax takes out what all keys of a query share: the formula has the term of the poses, or a bias.
        assert (layer.plain.encoding.poses() is None) == (encoding == "none" or query == keys == "own")
        assert len(layer.plain.project_in.bias) == len(layer.plain.project_in.weight)
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 2, 1, 3, 0], [1, 1, 1, 0, 3, 2, 1]])  # one of them twice
    measure = torch.rand(4, dtype=torch.float64) + 0.5
    features = None if edge_dim is None else torch.randn(7, edge_dim, dtype=torch.float64, requires_grad=True)
    leaves = [*layer.parameters(), *([] if features is None else [features])]
    weight = torch.randn(4, out_type.size, dtype=torch.float64)

    def outcomes(y):
        return [y, *torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True)]

    expected = outcomes(written_out(layer, x, edges, measure, features))
    assert features is None or expected[-1].abs().min() > 0
    for backend in ("auto", "neighbours"):
        layer.plain.backend = backend
        found = outcomes(layer(x, edges, measure=measure, edge_attr=features).tensor)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-9, atol=1e-10)


PUBLISHED = {
    "LieTransformer": ("dot", "mlp", "sum"),
    "2232": ("concat", "raw", "mlp"),
    "product": ("dot", "mlp", "product"),
    "both": ("concat", "mlp", "mlp"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kernel", PUBLISHED)
@pytest.mark.parametrize("last_activation", [False, True])
@pytest.mark.parametrize("normalization", ["softmax", "count"])
def test_kernels_with_biases_and_a_last_activation(kernel, last_activation, normalization):
    """As published: against the formula, values and gradients, for the compiled loop and without it."""
    encoding = PairKernel(*PUBLISHED[kernel], hidden=4, biases=True, last_activation=last_activation)
    layer = attention(gspaces.rot2dOnR2(2), head_fields=3, encoding=encoding, normalization=normalization)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = cloud(layer.in_type, 4)
    edges = torch.tensor([[0, 1, 2, 2, 1, 3], [1, 1, 1, 0, 3, 2]])
    names, leaves = zip(*layer.named_parameters(), strict=True)
    weight = torch.randn(4, layer.out_type.size, dtype=torch.float64)
    biases = [name for name in names if name.endswith(("hidden_bias", "last_bias"))]
    # One for the last layer where a constant that is added to all scores does not drop out, or is not only added.
    changes = last_activation or normalization == "count"
    last = {"LieTransformer": changes, "2232": changes, "product": True, "both": changes + last_activation}[kernel]
    assert len(biases) == (2 if kernel == "both" else 1) + last
    expected = written_out(layer, x, edges)
    gradients = torch.autograd.grad((expected * weight).sum(), leaves)
    for backend in ("auto", "neighbours"):
        layer.plain.backend = backend
        y = layer(x, edges).tensor
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
        for name, a, b in zip(names, torch.autograd.grad((y * weight).sum(), leaves), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=name)
    assert worst_error(layer, x) < 1e-10
    with torch.no_grad():
        for name in biases:
            layer.get_parameter(name).zero_()
        assert (layer(x, edges).tensor - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("relation", [Pair(), LogPolar()])
def test_other_relations(relation):
    layer = attention(C4, num_heads=1, head_fields=2, relation=relation)
    x = cloud(layer.in_type, 4)
    edges = torch.tensor([[0, 1, 2, 3, 3, 2], [1, 1, 0, 0, 2, 3]])
    torch.testing.assert_close(layer(x, edges).tensor, written_out(layer, x, edges), rtol=1e-10, atol=1e-11)
    assert worst_error(layer, x) < 1e-12
    moved = GeometricTensor(x.tensor, x.type, x.coords + 1.0)
    assert float((layer(moved).tensor - layer(x).tensor).abs().max()) > 1e-3  # No translations.
    scaled = GeometricTensor(x.tensor, x.type, 3 * x.coords)
    same = torch.allclose(layer(scaled).tensor, layer(x).tensor, rtol=1e-9, atol=1e-10)
    assert same == isinstance(relation, LogPolar)


def test_scalings_and_rotations_of_the_plane_need_no_fiber_group():
    space = gspaces.trivialOnR2()
    in_type = FieldType(space, 3 * [space.trivial_repr])
    layer = PointSelfAttention(in_type, in_type, relation=LogPolar()).double()
    x = cloud(in_type, 6)
    angle = 0.731
    turn = 2.5 * torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
    moved = GeometricTensor(x.tensor, in_type, x.coords @ turn.T)
    torch.testing.assert_close(layer(moved).tensor, layer(x).tensor, rtol=1e-10, atol=1e-11)
    with pytest.raises(ValueError, match="origin"):
        layer(GeometricTensor(x.tensor, in_type, torch.zeros_like(x.coords)))


def test_who_serves(monkeypatch):
    """The compiled loop, but for forces, which are differentiated twice."""
    from escnn_attention.functional.points import native as native_points

    if native_points.why_not_built(torch.float32):
        pytest.skip("no compiler")
    served = []
    attend = native_points.attend
    monkeypatch.setattr(native_points, "attend", lambda *a: served.append(True) or attend(*a))
    layer = attention(C3, head_fields=2)
    x = cloud(layer.in_type, 5)
    layer(x)
    assert len(served) == 1
    moving = GeometricTensor(x.tensor, x.type, x.coords.clone().requires_grad_())
    layer(moving)
    assert len(served) == 1
    with torch.no_grad():
        layer(moving)
    assert len(served) == 2
    layer.plain.backend = "neighbours"
    layer(x)
    assert len(served) == 2
    with pytest.raises(ValueError, match=r"backend: .*their own"):
        attention(C3, head_fields=2, keys="own", backend="native")(x)


def test_fused_attention_refuses_edges():
    layer = attention(C3, head_fields=2, encoding="none", backend="dense")
    x = cloud(layer.in_type, 4)
    layer(x)
    with pytest.raises(ValueError, match="backend: 'dense' cannot"):
        layer(x, torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]))


def test_dense_is_chosen_for_large_clouds(monkeypatch):
    in_type = FieldType(C4, 2 * [C4.regular_repr])
    layer = PointSelfAttention(in_type, in_type, num_heads=1, encoding="fourier").double()
    calls = []
    dense = BETWEEN_POINTS.backends["dense"]
    watched = replace(dense, attention=lambda call: calls.append("dense") or dense.attention(call))
    monkeypatch.setitem(BETWEEN_POINTS.backends, "dense", watched)
    x = cloud(in_type, 80)
    y = layer(x).tensor
    assert calls == ["dense"]
    layer.plain.backend = "neighbours"
    torch.testing.assert_close(layer(x).tensor, y, rtol=1e-9, atol=1e-10)
    assert calls == ["dense"]


def test_pieces_and_recomputation_change_nothing():
    space = gspaces.flipRot2dOnR2(3)
    in_type = mixed(space)
    for layer in (
        PointSelfAttention(in_type, in_type, num_heads=2, head_fields=2, query="all"),
        PointAttentiveConv(in_type, in_type, num_heads=2, head_fields=2),
    ):
        layer.double()
        x = cloud(in_type, 11)
        outcomes = []
        for limit in (None, 4000):
            with working_memory(limit):
                coords = x.coords.clone().requires_grad_()
                y = layer(GeometricTensor(x.tensor, in_type, coords)).tensor
                force = torch.autograd.grad(y.sum(), coords, create_graph=True)[0]
                outcomes.append(
                    (y, force, *torch.autograd.grad(force.square().sum(), list(layer.parameters()), allow_unused=True))
                )
        for a, b in zip(*outcomes, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gradients_by_coordinates_and_features():
    in_type = FieldType(C3, [C3.regular_repr])
    x = cloud(in_type, 3)
    edges = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    for layer in (
        PointSelfAttention(in_type, in_type, encoding=MLPEncoding(hidden=3)),
        PointSelfAttention(in_type, in_type, head_fields=2, encoding=RotaryEncoding(), keys="own"),
        PointAttentiveConv(in_type, in_type, encoding=PairKernel(hidden=3), kernel_features=2),
    ):
        plain = layer.double().export()
        arguments = (x.tensor.clone().requires_grad_(), x.coords.clone().requires_grad_())
        for check, tolerance in ((torch.autograd.gradcheck, 1e-5), (torch.autograd.gradgradcheck, 1e-4)):
            assert check(lambda a, b, plain=plain: plain(a, b, edges), arguments, atol=tolerance, fast_mode=True)


@pytest.mark.parametrize("encoding", ["fourier", "rotary", "absolute"])
def test_forces_are_differentiated_once_more(encoding):
    """Also in clouds that are large enough for fused attention, which is chosen without them."""
    space = gspaces.flip2dOnR2()
    in_type = FieldType(space, [space.regular_repr, space.trivial_repr])
    layer = PointSelfAttention(in_type, in_type, head_fields=2, encoding=encoding).double()
    x = cloud(in_type, 64)
    coords = x.coords.clone().requires_grad_()
    (force,) = torch.autograd.grad(
        layer(GeometricTensor(x.tensor, in_type, coords)).tensor.square().sum(), coords, create_graph=True
    )
    force.square().sum().backward()
    assert coords.grad.isfinite().all()
    assert coords.grad.any()
    torch.testing.assert_close(layer(GeometricTensor(x.tensor, in_type, coords)).tensor, layer(x).tensor)


@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "2232", "absolute"])
def test_half_precision_far_from_the_origin(encoding):
    layer = attention(C4, head_fields=2, encoding=ENCODINGS[encoding](), num_neighbours=4).float()
    x = cloud(layer.in_type, 20)
    far = 0.0 if encoding == "absolute" else 1000.0
    points = GeometricTensor(x.tensor.float(), x.type, x.coords.float() + far)
    expected = layer(points).tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed_precision = layer(points).tensor
    half = layer.bfloat16()(GeometricTensor(points.tensor.bfloat16(), x.type, points.coords)).tensor
    for y in (mixed_precision, half):
        assert float(((y.float() - expected).norm() / expected.norm()).detach()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_motions_under_autocast_far_from_the_origin(dtype):
    space = gspaces.rot2dOnR2(-1)
    lift = PointLift(FieldType(space, [space.irrep(1)]), 3)
    layer = PointSelfAttention(lift.out_type, lift.out_type, relation=LiftedMotion())
    points, *_ = lift(GeometricTensor(torch.randn(6, 2), lift.in_type, torch.randn(6, 2) + 1000))
    expected = layer(points).tensor
    with torch.autocast("cpu", dtype):
        y = layer(points).tensor.float()
    assert float(((y - expected).norm() / expected.norm()).detach()) < 0.02


def test_samples_turned_in_half_precision():
    space = gspaces.rot2dOnR2(-1)
    in_type = FieldType(space, 2 * [space.irrep(1)])
    layer = PointSelfAttention(in_type, in_type, num_neighbours=4, samples=Samples(8, turn="random"))
    drawn = layer.plain.transformation.draw()
    layer.plain.transformation.draw = lambda: drawn
    points = GeometricTensor(torch.randn(20, 4), in_type, torch.randn(20, 2) + 1000)
    expected = layer(points).tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(((layer(points).tensor.float() - expected).norm() / expected.norm()).detach()) < 0.03


def test_a_head_of_one_channel_compares_query_and_key():
    """A linear function of the two would leave nothing of the query."""
    x = cloud(mixed(C3), 4)
    edges = torch.tensor([[0, 1, 2, 2, 1, 3], [1, 1, 1, 0, 3, 2]])
    for combine in ("sum", "product", "mlp"):
        layer = attention(C3, num_heads=2, head_fields=1, encoding=PairKernel("concat", "mlp", combine, hidden=4))
        torch.testing.assert_close(layer(x, edges).tensor, written_out(layer, x, edges), rtol=1e-10, atol=1e-11)
        encoding = layer.plain.encoding
        (gradient,) = torch.autograd.grad(layer(x).tensor.square().sum(), encoding.of_query)
        assert float(gradient.abs().max()) > 1e-9


def test_a_point_at_the_position_of_another_has_gradients():
    in_type = FieldType(C4, [C4.regular_repr])
    layer = PointSelfAttention(in_type, in_type, radius=1.0).double()
    coords = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    layer(GeometricTensor(torch.randn(3, 4).double(), in_type, coords)).tensor.sum().backward()
    assert coords.grad.isfinite().all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("encoding", ["LieTransformer", "product", "location only", "2232"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["all", "own"])
def test_pairs_seen_both_ways_round(encoding, query, keys):
    """With the inversion of space a kernel of whole clouds is evaluated for half of the poses."""
    batch = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    edges = (batch[:, None] == batch).nonzero().T
    for make, halved in (
        (lambda: gspaces.flipRot2dOnR2(2), True),
        (lambda: gspaces.rot2dOnR2(4), True),
        (lambda: gspaces.invOnR3(), True),
        (lambda: gspaces.rot2dOnR2(3), False),
        (lambda: gspaces.rot2dOnR3(2), False),
    ):
        space = make()
        layer = attention(space, head_fields=2, encoding=ENCODINGS[encoding](), query=query, keys=keys)
        assert (layer.plain.opposite is not None) == halved
        x = cloud(layer.in_type, 7)
        leaves = [x.tensor.requires_grad_(), x.coords.requires_grad_(), *layer.parameters()]
        whole, listed = layer(x, batch=batch).tensor, layer(x, edges).tensor
        torch.testing.assert_close(whole, listed, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(
            torch.autograd.grad(whole.sin().sum(), leaves),
            torch.autograd.grad(listed.sin().sum(), leaves),
            rtol=1e-10,
            atol=1e-10,
        )
    layer = attention(space, head_fields=2, encoding=PairKernel(), relation=Pair())
    call = layer.plain.call(x.tensor, layer.plain._points(Cloud(x.coords)), None)
    assert call.bias.tables.halves is None  # Pairs of positions are not opposite to each other.
