"""What each relation does not change under."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor

from escnn_attention import LiftedMotion, LogMotion, LogPolar, Offset, Pair, PairKernel, PointSelfAttention, Relation
from escnn_attention.geometry.relations import inverse_of_v, product, quotient, rotate, rotation_vector
from escnn_attention.groups.fibers import fibers
from escnn_attention.models.description import build, describe
from tests import spaces
from tests.nn.points import cloud, error_of

KERNELS = ["mlp", "fourier", PairKernel(hidden=3), PairKernel("concat", "raw", "mlp", hidden=3)]


def turn(angle: float) -> torch.Tensor:
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


def test_what_they_are():
    x, y = torch.randn(2, 7, 2, dtype=torch.float64).unbind()
    torch.testing.assert_close(Offset()(x, y), y - x)
    torch.testing.assert_close(Pair()(x, y), torch.cat([x, y], dim=-1))
    ratio, cos, sin = LogPolar()(x, y).unbind(-1)
    angle = torch.atan2(y[:, 1], y[:, 0]) - torch.atan2(x[:, 1], x[:, 0])
    torch.testing.assert_close(ratio, (y.norm(dim=-1) / x.norm(dim=-1)).log())
    torch.testing.assert_close(torch.stack([cos, sin]), torch.stack([angle.cos(), angle.sin()]))
    for relation, dim, size in ((Offset(), 3, 3), (Pair(), 3, 6), (LogPolar(), 2, 3)):
        seen = relation(torch.randn(4, 1, dim), torch.randn(1, 5, dim))
        assert seen.shape == (4, 5, relation.size(dim)) == (4, 5, size)
    assert repr(Pair()) == "Pair()"
    with pytest.raises(ValueError, match="plane"):
        LogPolar().size(3)


def test_offsets_in_a_periodic_box_are_the_shortest():
    x, y = 9 * torch.randn(2, 50, 2, dtype=torch.float64)
    sides = torch.tensor([2.0, 3.0], dtype=torch.float64)
    relation = Offset(period=(2.0, 3.0))
    images = torch.cartesian_prod(torch.arange(-30.0, 31), torch.arange(-30.0, 31)).double() * sides
    offsets = (y - x)[:, None] + images
    shortest = offsets[torch.arange(50), offsets.norm(dim=-1).argmin(1)]
    torch.testing.assert_close(relation(x, y), shortest, rtol=0, atol=1e-12)
    torch.testing.assert_close(relation(x + 4 * sides, y - 7 * sides), shortest, rtol=0, atol=1e-12)
    torch.testing.assert_close(relation.in_units(0.5)(x / 0.5, y / 0.5), shortest / 0.5, rtol=0, atol=1e-11)
    assert torch.equal(relation(y, x), -relation(x, y))
    torch.testing.assert_close(Offset(period=2.0)(x, y), Offset(period=(2.0, 2.0))(x, y), rtol=0, atol=0)
    assert not torch.allclose(Offset()(x, y), shortest)
    assert (repr(relation), repr(Offset(2)), repr(Offset())) == (
        "Offset(period=(2.0, 3.0))",
        "Offset(period=2.0)",
        "Offset()",
    )
    assert describe(relation)["init_args"] == {"period": [2.0, 3.0]}
    assert repr(build(describe(relation))) == repr(relation)
    for error, period in ((ValueError, 0.0), (ValueError, (1.0, -1.0)), (TypeError, "long"), (ValueError, (1.0, "a"))):
        with pytest.raises(error, match="period"):
            Offset(period=period)
    with pytest.raises(ValueError, match="period: got 2 sides"):
        relation.size(3)


def test_log_polar_is_invariant_to_turns_and_scalings():
    x, y = torch.randn(2, 7, 2, dtype=torch.float64).unbind()
    m = 3.7 * turn(1.1)
    torch.testing.assert_close(LogPolar()(x @ m.T, y @ m.T), LogPolar()(x, y))
    flipped = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert not torch.allclose(LogPolar()(x * flipped, y * flipped), LogPolar()(x, y))


RANGES = {torch.float32: (-149, 127), torch.float64: (-1074, 1023)}


@pytest.mark.parametrize("dtype", RANGES)
def test_log_polar_at_every_scale(dtype):
    """Powers of two change no digit; at the lower end coordinates lose theirs, so that they are whole numbers here."""
    x = torch.tensor([[3.0, -4.0], [1.0, 0.0], [-5.0, 2.0]], dtype=dtype)
    y = torch.tensor([[1.0, 2.0], [-6.0, 7.0], [0.0, 4.0]], dtype=dtype)
    expected = LogPolar()(x, y)
    least, most = RANGES[dtype]
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for exponent in (least, least + 1, -130, -70, -40, -3, 30, 64, 100, most - 3):
        # 2^exponent itself, which may be no number of the precision that exp2 goes through.
        scale = torch.tensor(math.ldexp(1.0, exponent), dtype=torch.float64).to(dtype)
        assert scale > 0
        torch.testing.assert_close(LogPolar()(scale * x, scale * y), expected, **near)
    # From one end to the other.
    small, large = torch.tensor([[math.ldexp(1.0, e), 0.0] for e in (least, most)], dtype=torch.float64).to(dtype)
    far = torch.tensor([(most - least) * math.log(2), 1.0, 0.0], dtype=dtype)
    torch.testing.assert_close(LogPolar()(small, large), far, **near)
    torch.testing.assert_close(LogPolar()(large, small), far * torch.tensor([-1, 1, 1], dtype=dtype), **near)
    largest = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
    torch.testing.assert_close(LogPolar()(largest, largest), torch.tensor([0.0, 1.0, 0.0], dtype=dtype), **near)


def test_log_polar_has_gradients_at_every_scale():
    """Of a function of the relation, they are as much larger as the coordinates are smaller."""
    torch.manual_seed(0)
    x, y, weights = torch.randn(5, 2), torch.randn(5, 2), torch.randn(3)
    gradients = []
    for exponent in (0, -60, 60):
        scale = 2.0**exponent
        q, k = (scale * x).requires_grad_(), (scale * y).requires_grad_()
        (LogPolar()(q, k) @ weights).sum().backward()
        gradients.append(torch.stack([q.grad, k.grad]) * scale)
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])
    q, k = x.double().requires_grad_(), y.double().requires_grad_()
    assert torch.autograd.gradcheck(LogPolar(), (q, k))
    assert torch.autograd.gradgradcheck(LogPolar(), (q, k))


def test_log_polar_at_the_origin():
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    for query, key in ((x, x[:1]), (x[:1], x)):
        with pytest.raises(ValueError, match=r"coords: .*at the origin"):
            LogPolar()(query, key)
    # What is only near it is not.
    assert LogPolar()(x[:1] * 1e-40, x[:1]).isfinite().all()


def test_a_relation_of_ones_own():
    class Distance(Relation):
        def size(self, dim: int) -> int:
            return 1

        def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key - query).square().sum(-1, keepdim=True)

    torch.manual_seed(0)
    space = gspaces.trivialOnR2()
    scalars = spaces.scalars(space, 2)
    layer = PointSelfAttention(scalars, scalars, relation=Distance()).double()
    x, coords = torch.randn(2, 5, 2, dtype=torch.float64).unbind()
    y = layer(GeometricTensor(x, scalars, coords)).tensor
    torch.testing.assert_close(layer(GeometricTensor(x, scalars, coords @ turn(0.4).T + 1)).tensor, y)


class TestLogMotion:
    """The logarithm of the motion between poses."""

    @pytest.mark.parametrize("space", [gspaces.rot2dOnR2(5), gspaces.rot2dOnR2(4), gspaces.octaOnR3()])
    def test_is_the_matrix_logarithm(self, space):
        group = fibers(space)
        dim, relation = group.dimension, LogMotion()
        linear, constant = relation.tables(group.inverse_action)
        offset = np.random.default_rng(0).normal(size=dim)
        for h, p in itertools.product(range(min(group.order, 6)), range(group.order)):
            motion = np.eye(dim + 1)  # g_q⁻¹ g_k
            motion[:dim, :dim] = group.inverse_action[h] @ group.action[p]
            motion[:dim, dim] = group.inverse_action[h] @ offset
            seen = linear[h, p] @ offset + constant[h, p]
            omega = -seen[dim:]
            algebra = np.zeros((dim + 1, dim + 1))
            x, y, z = omega if dim == 3 else (0.0, 0.0, omega[0])
            algebra[:dim, :dim] = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])[:dim, :dim]
            algebra[:dim, dim] = -seen[:dim]
            np.testing.assert_allclose(scipy.linalg.expm(algebra), motion, atol=1e-10)
            assert np.linalg.norm(omega) < np.pi + 1e-9

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("encoding", KERNELS)
    @pytest.mark.parametrize("query", ["own", "all"])
    def test_layers_are_equivariant_and_exported(self, encoding, query):
        for space in (gspaces.rot2dOnR2(4), gspaces.dihedralOnR3(2)):
            for in_type in (spaces.mixed(space), spaces.scalars(space, 2)):
                options = {"head_fields": 2, "query": query, "encoding": encoding, "relation": LogMotion()}
                layer = PointSelfAttention(in_type, spaces.mixed(space), 1, registers=1, **options).double()
                x = cloud(in_type, 7)
                assert error_of(layer, x, space.fibergroup.elements) < 1e-11
                torch.testing.assert_close(layer.export()(x.tensor, x.coords), layer(x).tensor)
                moved = GeometricTensor(x.tensor, in_type, x.coords + 2.0)
                torch.testing.assert_close(layer(moved).tensor, layer(x).tensor)
        layer.plain.motion = layer.plain.motion.roll(1, 0)
        assert error_of(layer, x, space.fibergroup.elements) > 1e-3

    def test_bad_arguments(self):
        fields = spaces.regular(gspaces.flipRot2dOnR2(4), 1)
        with pytest.raises(ValueError, match="groups of rotations"):
            PointSelfAttention(fields, fields, relation=LogMotion())
        fields = spaces.regular(gspaces.rot2dOnR2(4), 1)
        with pytest.raises(ValueError, match="keys: got"):
            PointSelfAttention(fields, fields, relation=LogMotion(), keys="own")
        with pytest.raises(ValueError, match="backend: got 'native'"):
            PointSelfAttention(fields, fields, relation=LogMotion(), backend="native")
        with pytest.raises(TypeError, match="function of poses"):
            LogMotion()(torch.zeros(2), torch.zeros(2))


class TestLiftedMotion:
    """The motion between points that are motions."""

    def test_lengths_are_limited(self):
        query, key = torch.randn(2, 7, dtype=torch.float64)
        query[3:], key[3:] = (torch.nn.functional.normalize(q[3:], dim=0) for q in (query, key))
        for rotation in ("vector", "quaternion"):
            whole, seen = (LiftedMotion(rotation, limit)(query, key) for limit in (None, 2.0))
            length = whole.norm() + 1e-6
            torch.testing.assert_close(seen, torch.tanh(length / 2) / length * whole, rtol=1e-14, atol=1e-14)
            assert (seen - whole).abs().max() > 0.1
        # Of a point and itself there is a motion of no length, and derivatives.
        query = query[[0, 1, 3]].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            LiftedMotion(limit=2.0)(query, query.detach()).sum(), query, create_graph=True
        )
        (second,) = torch.autograd.grad(gradient.square().sum(), query)
        assert gradient.isfinite().all()
        assert second.isfinite().all()
        assert repr(LiftedMotion("quaternion", 2)) == "LiftedMotion('quaternion', limit=2)"
        assert repr(LiftedMotion(limit=0.5)) == "LiftedMotion(limit=0.5)"

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"^rotation: .*'vector'"):
            LiftedMotion("matrix")
        with pytest.raises(ValueError, match=r"^limit: .*positive length"):
            LiftedMotion(limit=0)
        with pytest.raises(ValueError, match=r"^relation: LiftedMotion\(\) .*3 or 7"):
            LiftedMotion().size(2)
        with pytest.raises(ValueError, match=r"^relation: LiftedMotion\('quaternion'\) .*7 numbers"):
            LiftedMotion("quaternion").size(3)


pytestmark = pytest.mark.usefixtures("double")

HALF = math.sqrt(0.5)
ROTATIONS = {
    2: [[0.0], [1e-9], [0.3], [-2.0], [3.1], [7.0]],
    3: [[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [HALF, HALF, 0, 0], [1e-4, 0.6, 0, -0.8], [0.5, 0.5, -0.5, 0.5]],
}
"""Angles and quaternions, among them no rotation, hardly any, and nearly a half turn."""


def matrix(rotation):
    columns = torch.eye(2 if len(rotation) == 1 else 3)
    return rotate(rotation, columns).T


def homogeneous(motion):
    dim = 2 if len(motion) == 3 else 3
    g = torch.eye(dim + 1)
    g[:dim, :dim], g[:dim, dim] = matrix(motion[dim:]), motion[:dim]
    return g


def motions(dim):
    rotations = torch.tensor(ROTATIONS[dim])
    rotations = rotations if dim == 2 else torch.nn.functional.normalize(rotations, dim=-1)
    return torch.cat([torch.randn(len(rotations), dim), rotations], dim=1)


@pytest.mark.parametrize("dim", [2, 3])
def test_rotations_are_those_of_their_vectors(dim):
    for motion in motions(dim):
        rotation = motion[dim:]
        assert torch.linalg.det(matrix(rotation)) > 0.999
        omega = rotation_vector(rotation)
        x, y, z = omega if dim == 3 else (0.0, 0.0, float(omega))
        algebra = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]])[:dim, :dim]
        torch.testing.assert_close(torch.linalg.matrix_exp(algebra), matrix(rotation), rtol=0, atol=1e-12)
        assert omega.norm() <= math.pi


def test_rounding_has_no_say_in_half_turns():
    angles = torch.tensor([[math.pi], [-math.pi], [3 * math.pi], [-math.pi - 1e-14], [-math.pi + 1e-14]])
    torch.testing.assert_close(rotation_vector(angles), torch.full((5, 1), math.pi))
    torch.testing.assert_close(rotation_vector(torch.tensor([[-math.pi + 0.008]])), torch.tensor([[-math.pi + 0.008]]))


@pytest.mark.parametrize("dim", [2, 3])
def test_products_and_quotients_are_those_of_matrices(dim):
    g = motions(dim)
    for a, b in itertools.product(g, g):
        whole = matrix(product(a[dim:], b[dim:]))
        torch.testing.assert_close(whole, matrix(a[dim:]) @ matrix(b[dim:]), rtol=0, atol=1e-13)
        between = torch.cat(quotient(a, b))
        expected = torch.linalg.solve(homogeneous(a), homogeneous(b))
        torch.testing.assert_close(homogeneous(between), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 3])
def test_logarithms_are_those_of_matrices(dim):
    for motion in motions(dim):
        omega = rotation_vector(motion[dim:])
        log = torch.as_tensor(scipy.linalg.logm(homogeneous(motion).numpy()).real)
        torch.testing.assert_close(inverse_of_v(omega, motion[:dim]), log[:dim, dim], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dim", [2, 3])
def test_derivatives(dim):
    g = motions(dim).requires_grad_()
    rotation, x = g[:, dim:], g[:, :dim]
    for y in (rotation_vector(rotation), inverse_of_v(rotation_vector(rotation), x)):
        assert torch.autograd.grad(y.sum(), g, retain_graph=True)[0].isfinite().all()
    kept = [2, 3] if dim == 2 else [2, 4]

    def logarithm(part):
        return inverse_of_v(rotation_vector(part[:, dim:]), part[:, :dim])

    assert torch.autograd.gradcheck(logarithm, (g[kept].detach().requires_grad_(),))


@pytest.mark.parametrize("angle", [0.0, 1e-5, 1e-3, 0.09, 0.11, 2.0])
def test_second_derivatives_in_single_precision(angle):
    def second(dtype):
        omega = (angle * torch.tensor([0.6, 0.0, 0.8])).to(dtype).requires_grad_()
        y = inverse_of_v(omega, torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
        (first,) = torch.autograd.grad(y.sum(), omega, create_graph=True)
        return torch.autograd.grad(first.square().sum(), omega)[0].double()

    torch.testing.assert_close(second(torch.float32), second(torch.float64), rtol=1e-4, atol=1e-5)
