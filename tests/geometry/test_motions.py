"""Motions as numbers, against their matrices."""

import itertools
import math

import pytest
import scipy.linalg
import torch

from escnn_attention.geometry.motions import inverse_of_v, product, quotient, rotate, rotation_vector

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
