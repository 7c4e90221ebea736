"""Attention on the sphere: the formula, equivariance that improves with the samples, errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    FourierEncoding,
    MLPEncoding,
    NoEncoding,
    PairKernel,
    SphereGrid,
    SphereSelfAttention,
    SphereTransformerBlock,
)
from escnn_attention.nn.sphere import Stabiliser
from escnn_attention.plain.sphere_attention import frames_at
from tests.nn.points import score
from tests.nn.spheres import ALL, ROTATIONS, SPACES, error, irrep, mixed, on_sphere, scalars


@pytest.mark.sampled(1)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("lifts", [True, False])
def test_the_error_of_rotations_falls_with_the_samples(space, lifts):
    in_type = scalars(space) if lifts else mixed(space)
    x = on_sphere(in_type, 10)
    errors = []
    for samples in (4, 16, 32):
        torch.manual_seed(1)
        # Twice as many where half are reflections.
        samples *= 1 + (space is ALL)
        errors.append(error(SphereSelfAttention(in_type, mixed(space), samples=samples, head_fields=2).double(), x))
    assert errors[1] < errors[0] / 8
    assert errors[2] < errors[1] / 8
    assert errors[2] < 1e-4


def test_with_wrong_frames_it_does_not_fall(monkeypatch):
    in_type = scalars(ROTATIONS)
    x = on_sphere(in_type, 10)
    torch.manual_seed(1)
    layer = SphereSelfAttention(in_type, mixed(ROTATIONS), samples=32, head_fields=2).double()
    assert error(layer, x) < 1e-4
    monkeypatch.setattr(
        "escnn_attention.plain.sphere_attention.frames_at", lambda a, b: frames_at(a, b).transpose(-1, -2)
    )
    assert error(layer, x) > 1e-2


@pytest.mark.sampled
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("lifts", [True, False])
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "kernel", "none"])
@pytest.mark.slow
def test_the_formula(space, query, lifts, encoding):
    """Scores from the quotients of the frames, one by one."""
    torch.manual_seed(2)
    encodings = {"mlp": MLPEncoding(hidden=4), "fourier": FourierEncoding(3), "kernel": PairKernel(hidden=4)}
    encodings["none"] = NoEncoding()
    in_type = scalars(space) if lifts else mixed(space)
    layer = SphereSelfAttention(
        in_type, mixed(space), samples=4, head_fields=2, query=query, encoding=encodings[encoding], length_scale=0.8
    ).double()
    x = on_sphere(in_type, 4)
    measure = torch.rand(4, dtype=torch.float64) + 0.5
    core, group = layer.plain, space.fibergroup
    out = torch.zeros(4, mixed(space).size, dtype=torch.float64)
    # Every frame as an element of the group, and the features that it sees.
    frames, seen = [], []
    for point, features in zip(x.coords.numpy(), x.tensor, strict=True):
        theta, phi = math.acos(point[2]), math.atan2(point[1], point[0])
        turns = []
        for axis, angle in ((2, phi), (1, theta)):
            q = np.zeros(4)
            q[axis], q[3] = math.sin(angle / 2), math.cos(angle / 2)
            turns.append(group.element(q if space is ROTATIONS else (0, q), "Q"))
        own = [turns[0] @ turns[1] @ h for h in Stabiliser(in_type, 4).elements]
        frames.append(own)
        seen.append(torch.stack([torch.as_tensor(in_type.representation(~g)) @ features for g in own]))
    bias = torch.cat([core.project_in.bias, torch.zeros(2, dtype=torch.float64)])
    heads = torch.stack(seen) @ core.project_in.weight.T + bias
    q, v, k = (t[:, : 1 if lifts else 4] for t in heads.unflatten(-1, (3, 2)).unbind(-2))  # N, S, C
    matrices = [[torch.as_tensor(space.basespace_action(g)) for g in own] for own in frames]
    axes, poses = 0 if lifts else 1 if space is ROTATIONS else 2, q.shape[1]
    for i, s in itertools.product(range(4), range(4)):
        value = torch.zeros(2, dtype=torch.float64)
        for t in [s] if query == "own" else range(poses):
            scores, values = [], []
            for j, u in itertools.product(range(4), range(poses)):
                quotient = matrices[i][s].T @ matrices[j][u]
                offset = (quotient[:, 2] - torch.tensor([0, 0, 1.0]).double()) / 0.8
                sees = torch.cat([offset, quotient[:, :axes].T.flatten()])
                scores.append(score(core.encoding, 0, q[i, t % poses], k[j, u], sees) + measure[j].log())
                values.append(v[j, u])
            value = value + torch.stack(scores).softmax(0) @ torch.stack(values)
        out[i] += torch.as_tensor(mixed(space).representation(frames[i][s])) @ (core.project_out.weight.T @ value) / 4
    out += core.project_out.invariants @ core.project_out.bias
    torch.testing.assert_close(layer(x, measure=measure).tensor, out, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_a_field_and_its_grid():
    """With the weights of the quadrature the output is that of the field, whatever the grid."""
    torch.manual_seed(3)
    in_type = scalars(ROTATIONS, 1)
    layer = SphereSelfAttention(in_type, in_type, samples=4, encoding=MLPEncoding(hidden=3)).double()

    def field(coords):
        return (3 * coords[:, 2:].square() + coords[:, :1]).contiguous()

    outs = []
    query = torch.nn.functional.normalize(torch.tensor([[0.3, -0.5, 0.7]]).double(), dim=-1)
    for grid in (SphereGrid(14), SphereGrid(12, 24, "Gauss-Legendre"), SphereGrid(17, 34, "Clenshaw-Curtis")):
        coords = torch.cat([query, grid.coords])
        measure = torch.cat([torch.full((1,), 1e-12).double(), grid.weights])
        x = GeometricTensor(field(coords), in_type, coords)
        outs.append(layer(x, measure=measure).tensor[0])
        outs.append(layer(x).tensor[0])
    torch.testing.assert_close(outs[2], outs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[4], outs[0], rtol=1e-4, atol=1e-5)
    assert (outs[1] - outs[0]).abs().max() > 1e-3  # Without them the poles weigh too much.


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["auto", "neighbours"])
@pytest.mark.parametrize("lifts", [True, False])
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", PairKernel(hidden=4), "none"])
@pytest.mark.parametrize(
    ("grid", "images"),
    [
        (SphereGrid(4), 1),
        (SphereGrid(4, 5), 2),
        (SphereGrid(3, 6, "Gauss-Legendre"), 2),
        (SphereGrid(5, 6, "Clenshaw-Curtis"), 1),
    ],
)
@pytest.mark.parametrize("rule", [{"radius": 1.1}, {}])
def test_grids_share_relations(rule, grid, images, encoding, lifts, backend, monkeypatch):
    """Values and gradients are those of the same points whose rings nobody knows."""
    in_type = scalars(ROTATIONS) if lifts else mixed(ROTATIONS)
    out_type = scalars(ROTATIONS, 2) + FieldType(ROTATIONS, [irrep(ROTATIONS, 1)])
    options = {"num_heads": 2, "head_fields": 8, "samples": 3, "encoding": encoding, **rule}
    layer = SphereSelfAttention(in_type, out_type, **options).double()
    layer.plain.backend = backend
    image = torch.randn(images, in_type.size, *grid.shape, dtype=torch.float64, requires_grad=True)
    weights = [image, *layer.parameters()]

    def outcomes(coords) -> list[torch.Tensor]:
        x, batch, measure = grid.points(image, in_type)
        y = layer(GeometricTensor(x.tensor, in_type, coords(x.coords)), batch=batch, measure=measure).tensor
        return [y, *torch.autograd.grad(y.sin().sum(), weights, allow_unused=True, materialize_grads=True)]

    torch.testing.assert_close(outcomes(lambda x: x), outcomes(torch.clone), rtol=1e-10, atol=1e-10)


def test_relations_are_those_of_one_point_of_a_ring(monkeypatch):
    in_type, grid, seen = scalars(ROTATIONS), SphereGrid(4, 6), []
    layer = SphereSelfAttention(in_type, in_type, encoding="mlp")
    features = MLPEncoding.features
    monkeypatch.setattr(MLPEncoding, "features", lambda self, x: seen.append(x.shape[2]) or features(self, x))
    x, batch, measure = grid.points(torch.randn(2, 2, 4, 6), in_type)
    layer(x, batch=batch, measure=measure)
    assert sum(seen) == 4 * 24
    seen.clear()
    # Gradients of coordinates are those of all points; another batch, and other coordinates, may lie in any way.
    moved = x.coords.clone().requires_grad_()
    others = [(moved, batch), (x.coords, batch.clone()), (x.coords.clone(), batch)]
    for coords, of_images in others:
        layer(GeometricTensor(x.tensor, in_type, coords), batch=of_images, measure=measure)
    assert sum(seen) == 3 * 2 * 24 * 24
    seen.clear()
    x.coords.mul_(1.0)
    layer(x, batch=batch, measure=measure)
    assert sum(seen) == 2 * 24 * 24


def test_edges():
    torch.manual_seed(5)
    in_type = mixed(ROTATIONS)
    layer = SphereSelfAttention(in_type, in_type, samples=6, head_fields=2, radius=0.9).double()
    x, batch = on_sphere(in_type, 8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    y = layer(x, batch=batch).tensor
    angle = torch.acos((x.coords @ x.coords.T).clamp(-1, 1))
    edges = ((angle <= 0.9) & (batch[:, None] == batch)).nonzero().T
    by_edges = SphereSelfAttention(in_type, in_type, samples=6, head_fields=2, length_scale=layer.plain.length_scale)
    by_edges.double().load_state_dict(layer.state_dict())
    torch.testing.assert_close(by_edges(x, edges).tensor, y, rtol=1e-9, atol=1e-10)


def test_the_antipode_is_within_the_largest_radius():
    in_type = scalars(ROTATIONS)
    for radius in (math.pi, 4.0):
        layer = SphereSelfAttention(in_type, in_type, radius=radius)
        assert layer.plain.length_scale == 2.0
        assert layer.plain.neighbourhood.is_global


def test_near_points_keep_their_offsets_in_half_precision():
    """The offset is small, and both positions are not."""
    torch.manual_seed(7)
    in_type = mixed(ROTATIONS)
    layer = SphereSelfAttention(in_type, in_type, samples=4, head_fields=2, radius=1e-2)
    coords = torch.nn.functional.normalize(torch.tensor([0.5, -0.3, 0.8]) + 2e-3 * torch.randn(8, 3), dim=-1)
    points = GeometricTensor(torch.randn(8, in_type.size), in_type, coords)
    expected = layer(points).tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(points).tensor.float()
    half = layer.bfloat16()(GeometricTensor(points.tensor.bfloat16(), in_type, coords)).tensor.float()
    assert float(((half - expected).norm() / expected.norm()).detach()) < 0.03
    assert float(((y - expected).norm() / expected.norm()).detach()) < 0.03


def test_errors():
    in_type = scalars(ROTATIONS)
    for error_type, message, arguments in (
        (ValueError, "samples", {"samples": 0}),
        (ValueError, "radius", {"radius": -1.0}),
        (ValueError, "encoding", {"encoding": "rotary"}),
        (ValueError, "encoding", {"encoding": "absolute"}),
        (ValueError, "query", {"query": "some"}),
        (ValueError, "normalization", {"normalization": "some"}),
        (TypeError, "num_neighbours", {"num_neighbours": 1.5}),
        (ValueError, "head_fields", {"head_fields": 0}),
        (ValueError, "length_scale", {"length_scale": 0}),
    ):
        with pytest.raises(error_type, match=message):
            SphereSelfAttention(in_type, in_type, **arguments)
    with pytest.raises(ValueError, match="even"):
        SphereSelfAttention(scalars(ALL), scalars(ALL), samples=5)
    for space in (gspaces.octaOnR3(), gspaces.rot2dOnR2(-1)):
        other = FieldType(space, [space.trivial_repr])
        with pytest.raises(ValueError, match=r"SO\(3\) or O\(3\)"):
            SphereSelfAttention(other, other)
    layer = SphereSelfAttention(in_type, in_type)
    x = on_sphere(in_type, 3)
    with pytest.raises(ValueError, match="unit vectors"):
        layer(GeometricTensor(x.tensor.float(), in_type, 2 * x.coords.float()))
    with pytest.raises(ValueError, match="coords"):
        layer(GeometricTensor(torch.randn(1, 2, 3, 3, 3), in_type))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.slow
def test_the_block(space):
    torch.manual_seed(4)
    fields = mixed(space)
    x = on_sphere(fields, 6)
    for out_type in (fields, FieldType(space, [irrep(space, 1)])):
        errors = []
        for samples in (4, 32):
            torch.manual_seed(4)
            samples *= 1 + (space is ALL)
            block = SphereTransformerBlock(fields, out_type, samples=samples, num_heads=2, num_neighbours=5).double()
            errors.append(error(block, x))
        assert errors[1] < 1e-3
        assert errors[1] < errors[0] / 20
    block.check_equivariance()


def test_errors_of_the_block():
    in_type = mixed(ROTATIONS)
    with pytest.raises(ValueError, match="batch"):
        SphereTransformerBlock(in_type, in_type, samples=4).double()(on_sphere(in_type, 8), batch=torch.zeros(3).long())
    with pytest.raises(TypeError, match=r"keys: .*such option"):
        SphereTransformerBlock(in_type, in_type, keys="own")
