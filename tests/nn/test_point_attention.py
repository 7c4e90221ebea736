"""Attention on points: the formula written out, equivariance, neighbourhoods, gradients, errors."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType, GeometricTensor
from hypothesis import given, settings
from hypothesis import strategies as st

from escnn_attention import (
    Encoding,
    FourierEncoding,
    LogPolar,
    MLPEncoding,
    Pair,
    PairKernel,
    PointAttentiveConv,
    PointSelfAttention,
    QuadraticEncoding,
    RotaryEncoding,
    Samples,
    working_memory,
)
from escnn_attention.functional import BACKENDS
from escnn_attention.groups.fibers import fibers

SPACES = {
    "trivial": lambda: gspaces.trivialOnR2(),
    "C3": lambda: gspaces.rot2dOnR2(3),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
    "flip": lambda: gspaces.flip2dOnR2(),
    "C5 on R3": lambda: gspaces.rot2dOnR3(5),
    "inversion": lambda: gspaces.invOnR3(),
    "D3 on R3": lambda: gspaces.dihedralOnR3(3),
}
ENCODINGS = {
    "mlp": lambda: MLPEncoding(hidden=5),
    "shared": lambda: MLPEncoding(hidden=5, layers=2, per_head=False),
    "separable": lambda: "separable",
    "fourier": lambda: FourierEncoding(3),
    "rotary": lambda: RotaryEncoding(),
    "absolute": lambda: "absolute",
    "none": lambda: "none",
    "quadratic": lambda: QuadraticEncoding(),
    "LieTransformer": lambda: PairKernel(hidden=4),
    "2232": lambda: PairKernel("concat", "raw", "mlp", hidden=4),
    "product": lambda: PairKernel("concat", "mlp", "product", hidden=4),
    "location only": lambda: PairKernel("none", "mlp", "sum", hidden=4),
    "raw sum": lambda: PairKernel("dot", "raw", "sum", hidden=4),
    "content only": lambda: PairKernel("concat", "none", "mlp", hidden=4),
}


def mixed(space, fields: int = 1) -> FieldType:
    """Regular, trivial and other fields."""
    action = space.basespace_action
    return FieldType(space, fields * [space.regular_repr, space.trivial_repr, action])


def cloud(field_type: FieldType, number: int, seed: int = 0, spread: float = 1.0) -> GeometricTensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, field_type.size, generator=generator, dtype=torch.float64)
    coords = spread * torch.randn(number, field_type.gspace.dimensionality, generator=generator, dtype=torch.float64)
    return GeometricTensor(x, field_type, coords)


def error_of(layer, x: GeometricTensor, elements, **arguments) -> float:
    with torch.no_grad():
        y, worst = layer(x, **arguments), 0.0
        for element in elements:
            z = layer(x.transform(element), **arguments)
            worst = max(worst, float((z.tensor - y.transform_fibers(element).tensor).norm() / y.tensor.norm()))
    return worst


def worst_error(layer, x: GeometricTensor, **arguments) -> float:
    return error_of(layer, x, layer.space.fibergroup.elements, **arguments)


def written_out(layer, x: GeometricTensor, edges: torch.Tensor, measure: torch.Tensor | None = None) -> torch.Tensor:
    """The layer by its formula: a loop over queries, poses and keys."""
    core, group = layer.plain, fibers(layer.space)
    order, heads = group.order, layer.num_heads
    q, v, k = core.project_in(x.tensor.unsqueeze(0)).squeeze(1).unflatten(0, (3, heads))  # M, N, P, C
    channels, poses = q.shape[-1], k.shape[2]
    actions = [torch.as_tensor(group.action[group.inverse[h]]) for h in range(order)]
    points = x.coords / core.length_scale
    out = q.new_zeros(heads, len(points), order, channels)
    encoding = core.encoding
    for i in range(len(points)):
        keys = [int(j) for j, target in edges.T.tolist() if target == i]
        for h in range(order):
            for m in range(heads):
                for t in [h] if core.query == "own" else range(order):
                    tilde = t if q.shape[2] > 1 else 0
                    if core.query == "all" and q.shape[2] == 1 and t > 0:
                        continue
                    scores, values, mass = [], [], []
                    for j in keys:
                        for p in range(poses):
                            if core.keys == "own" and poses > 1 and p != tilde:
                                continue
                            a, b = points[i] @ actions[h].T, points[j] @ actions[h].T
                            pose = int(group.quotient[h, p])
                            seen = core.relation(a, b)
                            s = score(encoding, m, q[m, i, tilde], k[m, j, p], seen, pose, a, b, group, h, tilde)
                            mass.append(1.0 if measure is None else float(measure[j]))
                            scores.append(s)
                            value = v[m, j, p]
                            if core.values is not None:
                                matrices = core.values.weight[m, pose if poses > 1 else 0]
                                value = torch.einsum("f,fic,c->i", core.values.kernel(seen), matrices, value)
                            values.append(value)
                    if not scores:
                        continue
                    s, mu = torch.stack(scores), torch.tensor(mass, dtype=torch.float64)
                    alpha = (s + mu.log()).softmax(0) if core.normalization == "softmax" else s * mu / mu.sum()
                    out[m, i, h] += alpha @ torch.stack(values)
    return core.project_out(out.unsqueeze(1)).squeeze(0)


def score(encoding, m, q, k, seen, pose, a, b, group, h, tilde):
    """Of one key, for one head."""
    root = math.sqrt(len(q))

    def of(table):
        return table[m if len(table) > 1 else 0]

    if not isinstance(encoding, PairKernel):
        table = encoding.poses()
        if encoding.absolute:
            own = 0.0 if table is None else of(table)[int(group.quotient[h, tilde])]
            q = q + of(encoding.offsets(a)) + own
            k = k + of(encoding.offsets(b)) + (0.0 if table is None else of(table)[pose])
            return q @ k / root
        if table is not None:
            k = k + of(table)[pose]
        if isinstance(encoding, RotaryEncoding):
            angle = of(encoding.rotations()) @ seen
            n = len(angle)
            first, second = k[:n].clone(), k[n : 2 * n].clone()
            k = torch.cat(
                [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos(), k[2 * n :]]
            )
        elif (offset := encoding.offsets(seen)) is not None:
            k = k + of(offset)
        return q @ k / root
    f = torch.nn.functional.silu
    c = None
    if encoding.content == "dot":
        c = (q @ k / root).view(1)
    elif encoding.content == "concat":
        c = (encoding.of_query[m] @ q + encoding.of_key[m] @ k) / math.sqrt(2)
    location = None
    if encoding.location != "none":
        location = encoding.of_offset[m] @ seen + encoding.bias[m]
        if encoding.num_poses > 1:
            location = location + encoding.of_pose[m][:, pose]
        if encoding.location == "mlp":
            location = (encoding.read_location[m] @ f(encoding.within[m] @ f(location))).view(1)
    if encoding.combine == "mlp":
        total = encoding.join_bias[m]
        if c is not None:
            total = total + encoding.join_content[m] @ c
        if location is not None:
            total = total + (encoding.join_location[m] @ location if encoding.location == "mlp" else location)
        return encoding.read_both[m] @ f(encoding.join_within[m] @ f(total))
    if c is not None:
        c = c[0] if encoding.content == "dot" else encoding.read_content[m] @ f(c)
    if location is not None:
        location = location[0]
    if c is None or location is None:
        return location if c is None else c
    return c + location if encoding.combine == "sum" else c * location


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["all", "own"])
@pytest.mark.parametrize("normalization", ["softmax", "count"])
def test_the_formula(encoding, query, keys, normalization):
    torch.manual_seed(1)
    space = gspaces.flipRot2dOnR2(3) if keys == "all" and query == "own" else gspaces.rot2dOnR2(3)
    in_type, out_type = mixed(space), FieldType(space, 2 * [space.regular_repr])
    layer = PointSelfAttention(
        in_type,
        out_type,
        num_heads=2,
        head_fields=3,
        query=query,
        keys=keys,
        encoding=ENCODINGS[encoding](),
        length_scale=0.7,
        normalization=normalization,
    ).double()
    if normalization == "count" and isinstance(layer.plain.encoding, Encoding):
        # No softmax takes out what all keys of a query share: the formula has the term of the poses.
        assert (layer.plain.encoding.poses() is None) == (encoding == "none")
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 2, 1, 3], [1, 1, 1, 0, 3, 2]])
    measure = torch.rand(4, dtype=torch.float64) + 0.5
    expected = written_out(layer, x, edges, measure)
    for backend in ("auto", "neighbours"):
        layer.plain.backend = backend
        y = layer(x, edges, measure=measure).tensor
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("encoding", ["mlp", "2232", "LieTransformer"])
@pytest.mark.parametrize("lifts", [False, True])
@pytest.mark.parametrize("query", ["own", "all"])
def test_counts_convolutions_and_lifting(encoding, lifts, query):
    torch.manual_seed(2)
    space = gspaces.rot2dOnR3(3)
    in_type = FieldType(space, 3 * [space.trivial_repr]) if lifts else mixed(space)
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 3, 2, 0], [1, 1, 0, 0, 3, 2]])
    for kind in (PointSelfAttention, PointAttentiveConv):
        for normalization in ("softmax", "count"):
            layer = kind(
                in_type,
                mixed(space),
                num_heads=2,
                head_fields=2,
                query=query,
                encoding=ENCODINGS[encoding](),
                normalization=normalization,
            ).double()
            measure = torch.rand(4, dtype=torch.float64) + 0.5
            expected = written_out(layer, x, edges, measure)
            torch.testing.assert_close(layer(x, edges, measure=measure).tensor, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("relation", [Pair(), LogPolar()])
def test_other_relations(relation):
    torch.manual_seed(3)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    layer = PointSelfAttention(in_type, in_type, num_heads=1, head_fields=2, relation=relation).double()
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 3, 3, 2], [1, 1, 0, 0, 2, 3]])
    torch.testing.assert_close(layer(x, edges).tensor, written_out(layer, x, edges), rtol=1e-10, atol=1e-11)
    assert worst_error(layer, x) < 1e-12
    moved = GeometricTensor(x.tensor, in_type, x.coords + 1.0)
    assert float((layer(moved).tensor - layer(x).tensor).abs().max()) > 1e-3  # No translations.
    scaled = GeometricTensor(x.tensor, in_type, 3 * x.coords)
    same = torch.allclose(layer(scaled).tensor, layer(x).tensor, rtol=1e-9, atol=1e-10)
    assert same == isinstance(relation, LogPolar)


def test_scalings_and_rotations_of_the_plane_need_no_fiber_group():
    torch.manual_seed(4)
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


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "quadratic", "2232"])
def test_equivariance(space, encoding):
    torch.manual_seed(5)
    space = SPACES[space]()
    in_type = mixed(space, 2)
    x = cloud(in_type, 9)
    batch = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    for query in ("own", "all"):
        # A quadratic encoding needs a channel for every coordinate and one more.
        head_fields = 4 if encoding == "quadratic" else 2
        arguments = {"num_heads": 2, "head_fields": head_fields, "query": query, "radius": 1.5}
        layer = PointSelfAttention(in_type, in_type, encoding=ENCODINGS[encoding](), **arguments).double()
        assert worst_error(layer, x, batch=batch) < 1e-12
        moved = GeometricTensor(x.tensor, in_type, x.coords + torch.randn(x.coords.shape[1]).double())
        y = layer(x, batch=batch).tensor
        torch.testing.assert_close(layer(moved, batch=batch).tensor, y, rtol=1e-9, atol=1e-10)
        order = torch.randperm(9)
        shuffled = GeometricTensor(x.tensor[order], in_type, x.coords[order])
        torch.testing.assert_close(layer(shuffled, batch=batch[order]).tensor, y[order], rtol=1e-9, atol=1e-10)
        if encoding != "rotary":
            layer = PointAttentiveConv(in_type, in_type, encoding=ENCODINGS[encoding](), **arguments).double()
            assert worst_error(layer, x, batch=batch) < 1e-12


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_equivariance_of_random_layers(data):
    name = data.draw(st.sampled_from(list(SPACES)))
    space = SPACES[name]()
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    in_type, out_type = (mixed(space, data.draw(st.integers(1, 2))) for _ in range(2))
    encoding = data.draw(st.sampled_from(list(ENCODINGS)))
    rule = data.draw(
        st.sampled_from([{}, {"radius": 1.0}, {"num_neighbours": 3}, {"radius": 1.0, "num_neighbours": 2}])
    )
    layer = PointSelfAttention(
        in_type,
        out_type,
        num_heads=data.draw(st.integers(1, 3)),
        head_fields=data.draw(st.integers(4, 5)),
        query=data.draw(st.sampled_from(["own", "all"])),
        keys=data.draw(st.sampled_from(["own", "all"])),
        normalization=data.draw(st.sampled_from(["softmax", "count"])),
        encoding=ENCODINGS[encoding](),
        **rule,
    ).double()
    x = cloud(in_type, data.draw(st.integers(1, 7)), seed=data.draw(st.integers(0, 2**16)))
    assert worst_error(layer, x) < 1e-11


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
        setattr(layer.plain, table, broken.flip(0))
        assert worst_error(layer, x) > 1e-3


@pytest.mark.parametrize("encoding", ["fourier", "rotary", "absolute", "none", "mlp", "separable"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("scalars", [False, True])
def test_backends_agree(encoding, query, keys, scalars):
    torch.manual_seed(7)
    space = gspaces.flipRot2dOnR2(2)
    in_type = FieldType(space, 3 * [space.trivial_repr]) if scalars else mixed(space)
    layer = PointSelfAttention(
        in_type, mixed(space), num_heads=2, head_fields=3, query=query, keys=keys, encoding=ENCODINGS[encoding]()
    ).double()
    x = cloud(in_type, 12)
    batch = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 2, 2, 2])
    measure = torch.rand(12, dtype=torch.float64) + 0.5
    results = []
    factorises = encoding not in ("mlp", "separable")
    for backend in ["neighbours", "reference"] + ["dense"] * factorises:
        layer.plain.backend = backend
        coords = x.coords.clone().requires_grad_()
        y = layer(GeometricTensor(x.tensor, in_type, coords), batch=batch, measure=measure).tensor
        grads = torch.autograd.grad(y.square().sum(), [coords, *layer.parameters()], allow_unused=True)
        results.append((y, *[g for g in grads if g is not None]))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["native"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("query", ["own", "all"])
def test_the_compiled_loop_agrees(backend, encoding, query):
    """Values and gradients of everything, for whole clouds, searched neighbours and edges, with and without poses."""
    torch.manual_seed(19)
    space = gspaces.flipRot2dOnR2(2)
    batch = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 2, 2, 2])
    edges = torch.tensor([[0, 3, 4, 4, 8, 8, 8], [0, 3, 3, 4, 4, 8, 0]])
    edges = torch.cat([edges, torch.arange(12).expand(2, -1)], dim=1)
    for in_type in (mixed(space), FieldType(space, 3 * [space.trivial_repr])):
        x = cloud(in_type, 12)
        for rule, given_edges in (({}, None), ({"radius": 1.2}, None), ({"num_neighbours": 3}, None), ({}, edges)):
            layer = PointSelfAttention(
                in_type, mixed(space), head_fields=4, query=query, encoding=ENCODINGS[encoding](), **rule
            ).double()
            results = []
            for name in (backend, "neighbours"):
                layer.plain.backend = name
                leaves = [x.tensor.clone().requires_grad_(), x.coords.clone().requires_grad_(), *layer.parameters()]
                y = layer(GeometricTensor(leaves[0], in_type, leaves[1]), given_edges, batch).tensor
                grads = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)
                results.append([y, *(torch.zeros(1) if g is None else g for g in grads)])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_who_serves(monkeypatch):
    """The compiled loop, but for forces, which are differentiated twice."""
    from escnn_attention.functional.points import native as native_points

    if native_points.why_unsupported_grid(torch.zeros(1)):
        pytest.skip("no compiler")
    served = []
    attend = native_points.attend
    monkeypatch.setattr(native_points, "attend", lambda *a: served.append(True) or attend(*a))
    space = gspaces.rot2dOnR2(3)
    in_type = mixed(space)
    x = cloud(in_type, 5)
    layer = PointSelfAttention(in_type, in_type, head_fields=2).double()
    layer(x)
    assert len(served) == 1
    layer(GeometricTensor(x.tensor, in_type, x.coords.clone().requires_grad_()))
    assert len(served) == 1
    with torch.no_grad():
        layer(GeometricTensor(x.tensor, in_type, x.coords.clone().requires_grad_()))
    assert len(served) == 2
    layer.plain.backend = "neighbours"
    layer(x)
    assert len(served) == 2
    with pytest.raises(ValueError, match="backend: 'native' cannot serve this call: queries see keys of their own"):
        PointSelfAttention(in_type, in_type, head_fields=2, keys="own", backend="native").double()(x)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_backends_for_whole_clouds_refuse_edges(backend):
    space = gspaces.rot2dOnR2(2)
    in_type = mixed(space)
    layer = PointSelfAttention(in_type, in_type, head_fields=2, encoding="none", backend=backend).double()
    layer(cloud(in_type, 4))
    with pytest.raises(ValueError, match=f"backend: '{backend}' cannot"):
        layer(cloud(in_type, 4), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]))


def test_dense_is_chosen_for_large_clouds(monkeypatch):
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, 2 * [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type, num_heads=1, encoding="fourier").double()
    calls = []
    dense = BACKENDS["points/dense"]
    watched = replace(dense, attention=lambda call: calls.append("dense") or dense.attention(call))
    monkeypatch.setitem(BACKENDS, "points/dense", watched)
    x = cloud(in_type, 80)
    y = layer(x).tensor
    assert calls == ["dense"]
    layer.plain.backend = "neighbours"
    torch.testing.assert_close(layer(x).tensor, y, rtol=1e-9, atol=1e-10)
    assert calls == ["dense"]


def test_pieces_and_recomputation_change_nothing():
    torch.manual_seed(8)
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
    torch.manual_seed(9)
    space = gspaces.rot2dOnR2(3)
    in_type = FieldType(space, [space.regular_repr])
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 3, 2], [1, 1, 0, 0, 2]])
    for layer in (
        PointSelfAttention(in_type, in_type, encoding=MLPEncoding(hidden=3)),
        PointSelfAttention(in_type, in_type, head_fields=2, encoding=RotaryEncoding(), keys="own"),
        PointAttentiveConv(in_type, in_type, encoding=PairKernel(hidden=3), kernel_features=2),
    ):
        plain = layer.double().export()
        arguments = (x.tensor.clone().requires_grad_(), x.coords.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda a, b, plain=plain: plain(a, b, edges), arguments)
        assert torch.autograd.gradgradcheck(
            lambda a, b, plain=plain: plain(a, b, edges), arguments, atol=1e-4, fast_mode=True
        )


@pytest.mark.parametrize("encoding", ["fourier", "rotary", "absolute"])
def test_forces_are_differentiated_once_more(encoding):
    """Also in clouds that are large enough for fused attention, which is chosen without them."""
    torch.manual_seed(17)
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


def test_no_table_of_all_offsets_where_none_is_read(monkeypatch):
    from escnn_attention.geometry.points import Cloud

    sizes = []
    offsets = Cloud.offsets.fget
    monkeypatch.setattr(Cloud, "offsets", property(lambda self: sizes.append(self.num_positions) or offsets(self)))
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    for arguments in ({"encoding": "rotary", "num_neighbours": 3}, {"encoding": "rotary"}, {"encoding": "none"}):
        layer = PointSelfAttention(in_type, in_type, head_fields=2, **arguments)
        layer(GeometricTensor(torch.randn(64, 4), in_type, torch.randn(64, 2)))
    assert max(sizes, default=0) <= 1


@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "2232", "absolute"])
def test_half_precision_far_from_the_origin(encoding):
    torch.manual_seed(18)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    layer = PointSelfAttention(in_type, in_type, head_fields=2, encoding=ENCODINGS[encoding](), num_neighbours=4)
    x = cloud(in_type, 20)
    far = 0.0 if encoding == "absolute" else 1000.0
    points = GeometricTensor(x.tensor.float(), in_type, x.coords.float() + far)
    expected = layer(points).tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed_precision = layer(points).tensor
    half = layer.bfloat16()(GeometricTensor(points.tensor.bfloat16(), in_type, points.coords)).tensor
    for y in (mixed_precision, half):
        assert float(((y.float() - expected).norm() / expected.norm()).detach()) < 0.05


def test_samples_turned_in_half_precision():
    torch.manual_seed(19)
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
    torch.manual_seed(20)
    space = gspaces.rot2dOnR2(3)
    in_type = mixed(space)
    x = cloud(in_type, 4)
    edges = torch.tensor([[0, 1, 2, 2, 1, 3], [1, 1, 1, 0, 3, 2]])
    for combine in ("sum", "product", "mlp"):
        kernel = PairKernel("concat", "mlp", combine, hidden=4)
        layer = PointSelfAttention(in_type, in_type, num_heads=2, head_fields=1, encoding=kernel).double()
        torch.testing.assert_close(layer(x, edges).tensor, written_out(layer, x, edges), rtol=1e-10, atol=1e-11)
        encoding = layer.plain.encoding
        (gradient,) = torch.autograd.grad(layer(x).tensor.square().sum(), encoding.of_query)
        assert float(gradient.abs().max()) > 1e-9


def test_a_point_at_the_position_of_another_has_gradients():
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type, radius=1.0).double()
    coords = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    layer(GeometricTensor(torch.randn(3, 4).double(), in_type, coords)).tensor.sum().backward()
    assert coords.grad.isfinite().all()


def test_points_that_have_nothing_to_attend_to():
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type)
    x = GeometricTensor(torch.randn(3, in_type.size), in_type, torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"edge_index: no edge leads to point 0 \(2 such of 3 points\)"):
        layer(x, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"edge_index: no edge leads to point 0 \(3 such of 3 points\)"):
        layer(x, torch.zeros(2, 0, dtype=torch.long))
    # An edge from a point that is not there does not count, and a point that is not there needs none.
    edges, mask = torch.tensor([[0, 1, 2], [1, 0, 2]]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"edge_index: no edge leads to point 0 \(1 such"):
        layer(x, edges, mask=mask)
    assert not layer(x, torch.tensor([[0, 1, 2], [0, 0, 2]]), mask=mask).tensor[1].any()
    with pytest.raises(ValueError, match="mask: hides all points"):
        layer(x, mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="input: got a cloud without points"):
        layer(GeometricTensor(x.tensor[:0], in_type, x.coords[:0]))


def test_masked_points_are_not_there():
    torch.manual_seed(10)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = torch.tensor([True, False, True, True, True, False])
    for rule in ({}, {"radius": 1.5}, {"num_neighbours": 2}):
        layer = PointSelfAttention(in_type, in_type, head_fields=2, **rule).double()
        x = cloud(in_type, 6)
        x.tensor[~mask] = torch.nan
        x.coords[1] = torch.nan
        y = layer(x, batch=batch, mask=mask).tensor
        alone = GeometricTensor(x.tensor[mask], in_type, x.coords[mask])
        torch.testing.assert_close(y[mask], layer(alone, batch=batch[mask]).tensor, rtol=1e-10, atol=1e-11)
        assert not y[~mask].any()
    everyone = torch.combinations(torch.arange(6), with_replacement=True).T
    edges = torch.cat([everyone, everyone.flip(0)], dim=1).unique(dim=1)
    layer = PointSelfAttention(in_type, in_type, head_fields=2).double()
    torch.testing.assert_close(layer(x, edges, mask=mask).tensor, layer(x, mask=mask).tensor, rtol=1e-9, atol=1e-10)


def test_not_a_number_stays_where_it_is_seen():
    space = gspaces.rot2dOnR2(4)
    in_type = FieldType(space, [space.regular_repr])
    layer = PointSelfAttention(in_type, in_type, radius=1.0).double()
    coords = torch.tensor([[0.0, 0.0], [0.5, 0.0], [5.0, 0.0], [5.5, 0.0], [5.2, 0.0]]).double()
    x = torch.randn(5, 4).double()
    x[0] = torch.nan
    y = layer(GeometricTensor(x, in_type, coords)).tensor
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()


def test_a_measure_of_two_is_two_points():
    torch.manual_seed(11)
    space = gspaces.rot2dOnR2(3)
    in_type = mixed(space)
    x = cloud(in_type, 4)
    twice = GeometricTensor(torch.cat([x.tensor, x.tensor[:1]]), in_type, torch.cat([x.coords, x.coords[:1]]))
    measure = torch.tensor([2.0, 1.0, 1.0, 1.0]).double()
    for normalization in ("softmax", "count"):
        layer = PointSelfAttention(in_type, in_type, head_fields=2, normalization=normalization).double()
        torch.testing.assert_close(layer(x, measure=measure).tensor, layer(twice).tensor[:4], rtol=1e-10, atol=1e-11)


def test_on_a_grid_it_is_group_self_attention():
    """The points of a 5×5 grid, with the weights of the layer on grids."""
    from escnn_attention import GroupSelfAttention

    torch.manual_seed(12)
    space = gspaces.flipRot2dOnR2(4)
    in_type = FieldType(space, 2 * [space.regular_repr])
    on_grid = GroupSelfAttention(in_type, in_type, num_heads=2, query="all").double()
    on_points = PointSelfAttention(in_type, in_type, num_heads=2, query="all", length_scale=4.0).double()
    on_points.load_state_dict(on_grid.state_dict())
    x = torch.randn(1, in_type.size, 5, 5, dtype=torch.float64)
    i, j = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
    coords = torch.stack([j - 2, 2 - i], dim=-1).flatten(0, 1).double()
    points = GeometricTensor(x[0].flatten(1).T.contiguous(), in_type, coords)
    expected = on_grid(GeometricTensor(x, in_type)).tensor[0].flatten(1).T
    torch.testing.assert_close(on_points(points).tensor, expected, rtol=1e-9, atol=1e-10)


def test_export_state_and_copies():
    torch.manual_seed(13)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    x = cloud(in_type, 6)
    for kind in (PointSelfAttention, PointAttentiveConv):
        for encoding in ("mlp", "LieTransformer"):
            layer = kind(in_type, in_type, head_fields=2, encoding=ENCODINGS[encoding](), num_neighbours=3).double()
            y = layer(x).tensor
            other = kind(in_type, in_type, head_fields=2, encoding=ENCODINGS[encoding](), num_neighbours=3).double()
            other.load_state_dict(layer.state_dict())
            torch.testing.assert_close(other(x).tensor, y)
            torch.testing.assert_close(copy.deepcopy(layer)(x).tensor, y)
            buffer = io.BytesIO()
            torch.save(layer.export(), buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
            torch.testing.assert_close(loaded(x.tensor, x.coords), y)
            assert layer.evaluate_output_shape((6, in_type.size)) == y.shape
            assert len(layer.check_equivariance()) == len(list(space.fibergroup.testing_elements()))


def test_dropout_is_for_training():
    torch.manual_seed(14)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    layer = PointSelfAttention(in_type, in_type, head_fields=2, dropout=0.5).double()
    x = cloud(in_type, 6)
    assert not torch.equal(layer(x).tensor, layer(x).tensor)
    layer.eval()
    assert torch.equal(layer(x).tensor, layer(x).tensor)


def test_precisions():
    torch.manual_seed(15)
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space)
    layer = PointSelfAttention(in_type, in_type, head_fields=2, radius=2.0)
    x = cloud(in_type, 6)
    single = layer(GeometricTensor(x.tensor.float(), in_type, x.coords.float())).tensor
    double = copy.deepcopy(layer).double()(x).tensor
    assert float((single - double).norm() / double.norm()) < 1e-5


@pytest.mark.parametrize(
    ("space", "name"),
    [(lambda: gspaces.flipRot2dOnR2(4), "R2PointConv"), (lambda: gspaces.rot2dOnR3(4), "R3PointConv")],
)
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


@pytest.mark.parametrize("encoding", ["LieTransformer", "product", "location only", "2232"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["all", "own"])
def test_pairs_seen_both_ways_round(encoding, query, keys):
    """With the inversion of space a kernel of whole clouds is evaluated for half of the poses."""
    torch.manual_seed(17)
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
        layer = PointSelfAttention(
            mixed(space), mixed(space), head_fields=2, encoding=ENCODINGS[encoding](), query=query, keys=keys
        ).double()
        assert (layer.plain.opposite is not None) == halved
        x = cloud(layer.in_type, 7)
        leaves = [x.tensor.requires_grad_(), x.coords.requires_grad_(), *layer.parameters()]
        whole, listed = layer(x, batch=batch).tensor, layer(x, edges).tensor
        torch.testing.assert_close(whole, listed, rtol=1e-10, atol=1e-11)
        for gradients in zip(
            torch.autograd.grad(whole.sin().sum(), leaves), torch.autograd.grad(listed.sin().sum(), leaves), strict=True
        ):
            torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    layer = PointSelfAttention(mixed(space), mixed(space), head_fields=2, encoding=PairKernel(), relation=Pair())
    assert layer.plain._halves() is None  # Pairs of positions are not opposite to each other.


def test_bad_arguments():
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, 2 * [space.regular_repr])
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
    none = gspaces.no_base_space(space.fibergroup)
    nowhere = FieldType(none, [none.regular_repr])
    with pytest.raises(ValueError, match="base space"):
        PointSelfAttention(nowhere, nowhere)
    other = gspaces.rot2dOnR3(4)
    regular = FieldType(other, [other.regular_repr])
    with pytest.raises(ValueError, match="plane"):
        PointSelfAttention(regular, regular, relation=LogPolar())
    for encoding in ("rotary", "absolute"):
        with pytest.raises(ValueError, match="PointAttentiveConv"):
            PointAttentiveConv(fields, fields, encoding=encoding)
    for arguments in ({"content": "product"}, {"content": "none", "location": "none"}, {"hidden": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))[:4]):
            PairKernel(**arguments)
    with pytest.raises(ValueError, match="product"):
        PairKernel("none", combine="product")
    with pytest.raises(ValueError, match="belongs to a layer"):
        PointSelfAttention(fields, fields, encoding=PairKernel().bind(2, 1, 2, 4))


def test_bad_inputs():
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, 2 * [space.regular_repr])
    layer = PointSelfAttention(fields, fields)
    x = GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2))
    long = torch.long
    with pytest.raises(TypeError, match="GeometricTensor"):
        layer(x.tensor)
    with pytest.raises(ValueError, match="coords"):
        layer(GeometricTensor(torch.randn(1, 8, 4, 4), fields))
    for error, message, arguments in (
        (TypeError, "edge_index", {"edge_index": torch.zeros(2, 3)}),
        (ValueError, "edge_index", {"edge_index": torch.zeros(3, 2, dtype=long)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), 4)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), -1)}),
        (
            ValueError,
            "different clouds",
            {"edge_index": torch.tensor([[0, 1], [1, 2]]), "batch": torch.tensor([0, 0, 1, 1])},
        ),
        (TypeError, "batch", {"batch": torch.zeros(4)}),
        (ValueError, "batch", {"batch": torch.zeros(3, dtype=long)}),
        (ValueError, "batch", {"batch": torch.full((4,), -1)}),
        (ValueError, "mask", {"mask": torch.ones(4)}),
        (ValueError, "mask", {"mask": torch.ones(3, dtype=torch.bool)}),
        (ValueError, "measure", {"measure": torch.ones(3)}),
        (ValueError, "measure", {"measure": torch.zeros(4)}),
        (ValueError, "measure", {"measure": torch.full((4,), math.inf)}),
        (TypeError, "edge_index", {"edge_index": [[0], [1]]}),
        (TypeError, "mask", {"mask": [True] * 4}),
        (TypeError, "measure", {"measure": 1.0}),
    ):
        with pytest.raises(error, match=message):
            layer(x, **arguments)
    for rule in ({}, {"radius": 1.0}):
        with pytest.raises(ValueError, match="coords: got numbers that are not finite"):
            PointSelfAttention(fields, fields, **rule)(
                GeometricTensor(torch.randn(4, 8), fields, torch.tensor([[0.0, 1.0]] * 3 + [[math.nan, 0.0]]))
            )
    with pytest.raises(ValueError, match="edge_index"):
        PointSelfAttention(fields, fields, radius=1.0)(x, torch.zeros(2, 1, dtype=long))
    with pytest.raises(ValueError, match="dense"):
        PointSelfAttention(fields, fields, radius=1.0, backend="dense")(x)
    with pytest.raises(ValueError, match="input_shape"):
        layer.evaluate_output_shape((4, 8, 3))
    other = FieldType(space, [space.regular_repr])
    with pytest.raises(ValueError, match="type"):
        layer(GeometricTensor(torch.randn(4, 4), other, torch.randn(4, 2)))


CONTINUOUS = {
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1, maximum_frequency=3), lambda group, n: group.irrep(n), (4, 32)),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1, maximum_frequency=3), lambda group, n: group.irrep(1, n), (8, 64)),
    "SO(3)": (gspaces.rot3dOnR3, lambda group, n: group.irrep(n), (12, 60)),
    "O(3)": (gspaces.flipRot3dOnR3, lambda group, n: group.irrep(n % 2, n), (24, 120)),
    "SO(2) about an axis": (gspaces.rot2dOnR3, lambda group, n: group.irrep(n), (4, 32)),
    "O(2) with half turns": (gspaces.dihedralOnR3, lambda group, n: group.irrep(1, n), (8, 64)),
    "O(2) with mirrors": (gspaces.conicalOnR3, lambda group, n: group.irrep(1, n), (8, 64)),
}


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
    layer.plain.inverse_action = layer.plain.inverse_action.flip(0)
    assert error_of(layer, x, own) > 1e-2


def test_kernels_and_encodings_of_samples():
    torch.manual_seed(2)
    space = gspaces.rot2dOnR2(-1, maximum_frequency=2)
    in_type = FieldType(space, [space.trivial_repr, space.irrep(1), space.irrep(2)])
    x = cloud(in_type, 5)
    elements = fibers(space, Samples(5)).elements[1:3]
    for encoding in ENCODINGS:
        for query in ("own", "all"):
            for keys in ("own", "all"):
                layer = PointSelfAttention(
                    in_type, in_type, head_fields=3, samples=5, encoding=ENCODINGS[encoding](), query=query, keys=keys
                ).double()
                assert error_of(layer, x, elements) < 1e-11


def test_the_check_says_that_samples_are_not_all_elements():
    space = gspaces.rot2dOnR2(-1)
    scalars, vectors = FieldType(space, [space.trivial_repr]), FieldType(space, [space.irrep(1)])
    with pytest.raises(AssertionError, match="permute"):
        PointSelfAttention(scalars, vectors, samples=3).check_equivariance()


def test_samples_are_of_continuous_groups():
    finite, continuous = gspaces.rot2dOnR2(4), gspaces.rot2dOnR2(-1)
    fields = FieldType(finite, [finite.regular_repr])
    with pytest.raises(ValueError, match="samples"):
        PointSelfAttention(fields, fields, samples=4)
    scalars = FieldType(continuous, [continuous.trivial_repr])
    with pytest.raises(NotImplementedError, match="samples"):
        PointSelfAttention(scalars, scalars)


def test_samples_of_a_subgroup_are_that_subgroup():
    """SO(2) at 4 samples is C4 with the same weights, for fields that the two have in common."""
    torch.manual_seed(3)
    rotations, quarter = gspaces.rot2dOnR2(-1), gspaces.rot2dOnR2(4)
    sampled = FieldType(rotations, [rotations.trivial_repr, rotations.irrep(1)])
    finite = FieldType(quarter, [quarter.trivial_repr, quarter.irrep(1)])
    arguments = {"num_heads": 2, "head_fields": 2, "encoding": FourierEncoding(3), "keys": "own"}
    a = PointSelfAttention(sampled, sampled, samples=4, **arguments).double()
    b = PointSelfAttention(finite, finite, **arguments).double()
    b.load_state_dict(a.state_dict())
    x = cloud(sampled, 5)
    y = a(x).tensor
    z = b(GeometricTensor(x.tensor, finite, x.coords)).tensor
    ratio = (y - y.mean(0)).norm() / (z - z.mean(0)).norm()  # How sums over poses are weighed.
    torch.testing.assert_close(y - y.mean(0), ratio * (z - z.mean(0)), rtol=1e-9, atol=1e-10)


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
