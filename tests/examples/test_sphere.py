"""The measurement of rotations of the sphere, on a small grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from escnn_attention import SphereGrid
from examples import sphere


def test_fields_turn_with_their_points():
    field, rotation = sphere.Field(0), Rotation.random(random_state=1)
    points = np.random.default_rng(0).normal(size=(5, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    still, turned = field(points, Rotation.identity()), field(rotation.apply(points), rotation)
    torch.testing.assert_close(turned[:, 0], still[:, 0])
    np.testing.assert_allclose(turned[:, 1:].numpy(), rotation.apply(still[:, 1:].numpy()), atol=1e-12)
    # Winds blow along the sphere.
    assert np.abs((still[:, 1:].numpy() * points).sum(1)).max() < 1e-12


@pytest.mark.slow
def test_the_sphere_changes_least():
    rotations = [Rotation.identity(), Rotation.random(random_state=0)]
    grid = SphereGrid(6)
    weighted, unweighted = (sphere.change(sphere.OnSphere(grid, 4, w), grid, rotations) for w in (True, False))
    image = sphere.change(sphere.OnImage(grid), grid, rotations)
    assert weighted < 0.2 < image
    assert weighted < unweighted < image


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fields", ["scalars", "scalars, vectors and tensors"])
@pytest.mark.slow
def test_the_error_of_a_layer_falls_with_its_samples(fields):
    """Half of the samples of O(3) are mirror images: its error is that of SO(3) with half as many."""
    few, more = (sphere.layer_error(sphere.SPACE, fields, n) for n in (4, 16))
    assert few > 1e-2
    assert more < few / 50
    mirrored = sphere.layer_error(sphere.SPACES["O(3)"], fields, 8)
    assert few / 5 < mirrored < 5 * few


@pytest.mark.sampled(4, of="commands of the examples")
def test_the_picture(tmp_path: Path, capsys):
    sphere.main(out=tmp_path, sizes="4,6", samples="4", num_rotations=2, layer_samples="4")
    assert (tmp_path / "sphere.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "latitudes and longitudes" in printed
    assert "O(3), from scalars, vectors and tensors" in printed
