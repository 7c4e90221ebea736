"""Smooth cut-offs: energies and forces across the radius, the formula, backends, equivariance, files, errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import LiftedMotion, PairKernel, PointAttentiveConv, PointLift, PointSelfAttention
from escnn_attention.functional.points import native
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.models import PointTransformer
from escnn_attention.plain.cutoff import Cutoff, polynomial_envelope
from tests.layers import assert_formula
from tests.nn.points import cloud, mixed, worst_error, written_out

RADIUS = 1.5
C4 = gspaces.rot2dOnR2(4)
REGULAR = FieldType(C4, [C4.regular_repr])
BATCH = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1, 0])
BACKENDS = ["neighbours", "reference", *([] if native.why_not_built(torch.float32) else ["native"])]


def cosine(t):
    return (1 + torch.cos(math.pi * t)) / 2


class Learned(torch.nn.Module):
    """An envelope with a parameter."""

    def __init__(self):
        super().__init__()
        self.power = torch.nn.Parameter(torch.tensor(0.4))

    def forward(self, t):
        return polynomial_envelope(t) * (1 + self.power.square() * t)


def layer_of(fields, kind=PointSelfAttention, **options):
    torch.manual_seed(7)
    options = {"num_heads": 2, "head_fields": 3, "radius": RADIUS, "cutoff": True, **options}
    return kind(fields, fields, **options).double()


# The envelope


def test_the_polynomial_and_its_derivatives_at_both_ends():
    t = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    u = polynomial_envelope(t)
    torch.testing.assert_close(u, 1 - 28 * t**6 + 48 * t**7 - 21 * t**8, rtol=0, atol=1e-14)
    for _ in range(2):
        (u,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        assert u[0] == u[3] == 0
        assert u[1] != 0
    (third,) = torch.autograd.grad(u.sum(), t)
    assert abs(third[3]) > 100
    # Near the radius the sum of powers is rounding error alone.
    near = torch.tensor(1 - 1e-7, dtype=torch.float64)
    torch.testing.assert_close(polynomial_envelope(near).item(), 56e-21, rtol=1e-5, atol=0)
    assert (polynomial_envelope(torch.linspace(0, 1, 1000)) >= 0).all()


def test_all_derivatives_are_numbers_where_points_are_at_one_place_or_at_the_radius():
    keys = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0 + 1e-15], [1.0, 1.0]], dtype=torch.float64)
    query = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    u = Cutoff(polynomial_envelope, Neighbourhood(2.0))(query, keys)
    assert u[:3].tolist() == [1.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(u.sum(), query, create_graph=True)
    (again,) = torch.autograd.grad(grad.sin().sum(), query)
    assert grad.isfinite().all()
    assert again.isfinite().all()
    assert again.abs().max() > 0


# Continuity

OPTIONS = {
    "attention": {},
    "count": {"normalization": "count"},
    "convolution": {"kernel_features": 4},
    "all query poses": {"query": "all"},
    "rotary": {"encoding": "rotary"},
    "native": {"backend": "native"} if "native" in BACKENDS else {},
}


def jumps(cutoff, name: str) -> tuple[float, float, float]:
    """The jumps of the energy and of the forces where a point crosses the radius, and the largest force there."""
    options = {"radius": RADIUS, "cutoff": cutoff, **OPTIONS[name]}
    encoding = options.pop("encoding", None)
    torch.manual_seed(3)
    sizes = {"fields": 3, "num_blocks": 2, "num_heads": 1, "pool": "sum", "encoding": encoding}
    network = PointTransformer(C4, 3, 1, attention=options, **sizes).double().eval()
    rest = torch.tensor([[0.0, 0.0], [0.9, 0.3], [-0.4, 0.8]], dtype=torch.float64)
    features, away = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0.6, -0.8], dtype=torch.float64)

    def at(distance: float) -> torch.Tensor:
        coords = torch.cat([rest, (rest[0] + distance * away)[None]]).requires_grad_()
        energy = network(features, coords).sum()
        return torch.cat([energy.detach().view(1), torch.autograd.grad(energy, coords)[0].flatten()])

    step = 1e-7
    inside, outside, further = (at(RADIUS + n * step) for n in (-1, 1, 3))
    # Without the slope, of which the third point knows.
    jump = ((outside - inside) - (further - outside)).abs()
    assert at(RADIUS).isfinite().all()
    return float(jump[0]), float(jump[1:].max()), float(outside[1:].abs().max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_energies_and_forces_do_not_jump_where_a_point_crosses_the_radius(name):
    energy, force, size = jumps(True, name)
    assert size > 1e-4
    assert energy < 1e-10
    assert force < 1e-7
    energy, force, _ = jumps(False, name)
    assert energy > 1e-4
    assert force > 1e-4
    # Its slope vanishes, its curvature does not: forces have a kink, and no jump.
    assert max(jumps(cosine, name)[:2]) < 1e-5


# Values and gradients


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("envelope", [True, cosine, Learned()], ids=["polynomial", "cosine", "learned"])
@pytest.mark.slow
def test_the_formula(backend, normalization, envelope):
    kernel = PairKernel("none", "mlp", "sum", hidden=3)
    options = {"normalization": normalization, "encoding": kernel, "edge_dim": 2, "head_fields": 1}
    layer = layer_of(REGULAR, backend=backend, cutoff=envelope, **options)
    data = cloud(REGULAR, 5, seed=1)
    x, coords = data.tensor.requires_grad_(), data.coords.requires_grad_()
    measure, edge_attr = torch.rand(5).double() + 0.5, torch.randn(1, 5, 5, 2).double()
    y = layer(GeometricTensor(x, REGULAR, coords), measure=measure, edge_attr=edge_attr).tensor
    edges = ((coords[:, None] - coords).norm(dim=-1) <= RADIUS).nonzero().T
    expected = written_out(layer, data, edges, measure, edge_attr[0, edges[1], edges[0]])
    leaves = [x, coords, *(p for p in layer.parameters() if p.requires_grad)]
    assert_formula(y, expected, leaves)
    assert any(p is leaf for leaf in leaves for p in layer.plain.cutoff.parameters()) == isinstance(envelope, Learned)
    layer.plain.cutoff = None
    without = layer(GeometricTensor(x, REGULAR, coords), measure=measure, edge_attr=edge_attr).tensor
    assert (without - y).abs().max() > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.slow
def test_forces_are_differentiable(backend, normalization):
    layer = layer_of(REGULAR, backend=backend, normalization=normalization, num_heads=1, head_fields=1)
    x = torch.randn(3, 4, dtype=torch.float64)
    coords = torch.tensor([[0.0, 0.0], [0.9, 0.2], [-0.3, 1.2]], dtype=torch.float64, requires_grad=True)

    def energy(coords):
        return layer(GeometricTensor(x, REGULAR, coords)).tensor.sin().sum()

    assert torch.autograd.gradcheck(energy, coords)
    assert torch.autograd.gradgradcheck(energy, coords)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_are_numbers_whatever_the_score_at_the_radius(backend, dtype):
    """Keys at the radius have by far the largest scores, and count nothing."""
    layer = layer_of(REGULAR, backend=backend, num_heads=1, head_fields=1, encoding="none").to(dtype)
    coords = torch.tensor([[0.0, 0.0], [0.5, 0.0], [RADIUS, 0.0], [0.0, RADIUS * (1 - 1e-6)]], dtype=dtype)
    x = torch.ones(4, 4, dtype=dtype)
    x[2] = 1000
    leaves = [x.requires_grad_(), coords.requires_grad_()]
    y = layer(GeometricTensor(x, REGULAR, coords)).tensor
    grads = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    again = torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves)
    assert all(t.isfinite().all() for t in (y, *grads, *again))
    # Without the point at the radius the first point sees the same.
    there = torch.tensor([True, True, False, True])
    apart = layer(GeometricTensor(x[there], REGULAR, coords[there])).tensor
    torch.testing.assert_close(apart[0], y[0], rtol=1e-4, atol=1e-4)


# Equivariance and what else layers promise


@pytest.mark.parametrize("kind", [PointSelfAttention, PointAttentiveConv])
def test_an_envelope_that_turns_with_the_frame_is_not_equivariant(kind):
    layer, x = layer_of(mixed(C4), kind=kind), cloud(mixed(C4), 9, spread=0.5)  # so that all have neighbours
    assert worst_error(layer, x, batch=BATCH) < 1e-10
    axis = torch.tensor([0.5, 1.0], dtype=torch.float64)
    layer.plain.cutoff.forward = lambda query, key: (1 + ((key - query) * axis).sum(-1)).square()
    assert worst_error(layer, x, batch=BATCH) > 1e-4


def test_the_distance_is_that_of_the_relation():
    """Lifted points, several at every place: of motions."""
    plane = gspaces.rot2dOnR2(-1)
    lift = PointLift(FieldType(plane, [plane.trivial_repr]), 3)
    coords = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    x, *_ = lift.double()(GeometricTensor(torch.randn(4, 1).double(), lift.in_type, coords))
    layer = layer_of(x.type, relation=LiftedMotion(), encoding=PairKernel(hidden=3))
    y = layer(x).tensor
    (grad,) = torch.autograd.grad(y.sum(), coords)
    assert grad.isfinite().all()
    query, key = x.coords[:, None], x.coords[None]
    t = (LiftedMotion().distance(query, key) / RADIUS).clamp(max=1.0)
    torch.testing.assert_close(layer.plain.cutoff(query, key), polynomial_envelope(t), rtol=1e-12, atol=1e-12)


def test_a_module_is_copied_and_learned():
    envelope = Learned()
    layer = layer_of(REGULAR, cutoff=envelope)
    assert layer.plain.cutoff.function is not envelope
    layer(cloud(REGULAR, 6)).tensor.square().sum().backward()
    assert layer.plain.cutoff.function.power.grad.abs() > 0
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    assert "cutoff=Learned" in repr(layer)
    assert "cutoff" not in repr(layer_of(REGULAR, cutoff=False))


def test_bad_cutoffs():
    for error, message, options in (
        (ValueError, "cutoff.*radius", {"radius": None}),
        (ValueError, "cutoff.*radius", {"radius": None, "num_neighbours": 3}),
        (TypeError, "cutoff.*function", {"cutoff": 2.0}),
        (TypeError, "cutoff.*tensor", {"cutoff": lambda t: 1.0}),
        (ValueError, "cutoff.*shape", {"cutoff": lambda t: t.sum()}),
        (ValueError, "cutoff.*0 at 1", {"cutoff": lambda t: 1 + t}),
        (ValueError, "cutoff.*finite", {"cutoff": lambda t: (1 - t).log()}),
        (ValueError, "cutoff.*at least 0", {"cutoff": lambda t: t - 1}),
    ):
        with pytest.raises(error, match=message):
            layer_of(REGULAR, **options)
