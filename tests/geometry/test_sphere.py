"""Grids on the sphere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from scipy.special import lpmv

from escnn_attention import SphereGrid

GRIDS = [
    SphereGrid(8),
    SphereGrid(6, 11),
    SphereGrid(9, 16, "Clenshaw-Curtis"),
    SphereGrid(7, 14, "Gauss-Legendre"),
    SphereGrid(4, 9, "Gauss-Legendre"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_the_quadrature_is_exact_for_spherical_harmonics(grid):
    theta = torch.acos(grid.coords[:, 2]).numpy()
    phi = torch.atan2(grid.coords[:, 1], grid.coords[:, 0]).numpy()
    assert math.isclose(float(grid.weights.sum()), 4 * math.pi)
    assert (grid.weights > 0).all()
    for degree in range(1, min(grid.shape)):
        for order in range(degree + 1):
            harmonic = lpmv(order, degree, np.cos(theta)) * np.cos(order * phi)
            assert abs(float((grid.weights.numpy() * harmonic).sum())) < 1e-9 * np.abs(harmonic).max()


def test_where_the_points_are():
    grid = SphereGrid(9, 4, "Clenshaw-Curtis")
    torch.testing.assert_close(grid.coords.norm(dim=1), torch.ones(36, dtype=torch.float64))
    torch.testing.assert_close(grid.coords[:4], torch.tensor([[0.0, 0, 1]] * 4).double(), atol=1e-15, rtol=0)
    equator = torch.tensor([[1.0, 0, 0], [0, 1, 0], [-1, 0, 0], [0, -1, 0]]).double()
    torch.testing.assert_close(grid.coords[16:20], equator, atol=1e-15, rtol=0)
    for grid in GRIDS:
        z = grid.coords[:: grid.shape[1], 2]
        assert (z.diff() < 0).all()


def test_there_and_back():
    space = gspaces.rot3dOnR3()
    scalars = FieldType(space, 3 * [space.trivial_repr])
    grid = SphereGrid(4, 6)
    image = torch.randn(2, 3, 4, 6)
    x, batch, measure = grid.points(image, scalars)
    assert batch.tolist() == 24 * [0] + 24 * [1]
    assert measure.shape == (48,)
    assert torch.equal(grid.image(x), image)
    assert torch.equal(x.tensor[24 + 6 + 2], image[1, :, 1, 2])
    with pytest.raises(ValueError, match="x: got"):
        grid.points(image[:, :, :3], scalars)
    for features in (x.tensor[:-1], x.tensor[0]):
        with pytest.raises(ValueError, match=r"x: .*\(B · 24, C\)"):
            grid.image(features)
    plane = gspaces.rot2dOnR2(4)
    with pytest.raises(ValueError, match="R³"):
        grid.points(image, FieldType(plane, 3 * [plane.trivial_repr]))


def test_points_are_the_same_tensors_in_every_call():
    space = gspaces.rot3dOnR3()
    scalars = FieldType(space, [space.trivial_repr])
    grid = SphereGrid(4, 6)
    (x, *first), (y, *second) = (grid.points(torch.randn(2, 1, 4, 6), scalars) for _ in range(2))
    assert x.coords is y.coords
    assert all(a is b for a, b in zip(first, second, strict=True))
    x.coords.mul_(2)
    z, *_ = grid.points(torch.randn(2, 1, 4, 6), scalars)
    torch.testing.assert_close(z.coords.norm(dim=1), torch.ones(48))
    assert grid.points(torch.randn(1, 1, 4, 6).double(), scalars)[0].coords.dtype == torch.float64


def test_coordinates_are_not_in_half_precision():
    space = gspaces.rot3dOnR3()
    x, _, measure = SphereGrid(4, 6).points(torch.randn(2, 1, 4, 6).bfloat16(), FieldType(space, [space.trivial_repr]))
    assert x.tensor.dtype == torch.bfloat16
    assert x.coords.dtype == measure.dtype == torch.float32


def test_bad_arguments():
    for message, arguments in (
        ("even", (7,)),
        ("odd", (8, 8, "Clenshaw-Curtis")),
        ("num_latitudes", (1,)),
        ("num_longitudes", (4, 1)),
        ("kind", (4, 4, "HEALPix")),
    ):
        with pytest.raises(ValueError, match=message):
            SphereGrid(*arguments)
    with pytest.raises(TypeError, match=r"num_longitudes: .*integer"):
        SphereGrid(4, 2.5)
