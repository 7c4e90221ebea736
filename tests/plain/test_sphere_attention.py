"""The frames that attention on the sphere looks from."""

from __future__ import annotations

import math

import torch
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import SphereSelfAttention
from escnn_attention.nn.sphere import Stabiliser
from escnn_attention.plain.sphere_attention import LocalFrames, angles_of, frames_at
from tests.nn.spheres import ROTATIONS, SPACES, irrep, mixed, on_sphere


def test_local_frames_are_those_of_the_group():
    for space in SPACES.values():
        field_type = mixed(space)
        frames = LocalFrames(Stabiliser(field_type, 4).generators(field_type)).double()
        x = on_sphere(field_type, 6)
        angles = angles_of(x.coords)
        torch.testing.assert_close(frames_at(*angles)[:, :, 2], x.coords)
        local = frames.inward(x.tensor, *angles)
        torch.testing.assert_close(frames.outward(local, *angles), x.tensor, rtol=1e-10, atol=1e-11)
        # The vector along the point itself is the same in all frames.
        vectors = FieldType(space, [irrep(space, 1)])
        turn = LocalFrames(Stabiliser(vectors, 4).generators(vectors)).double()
        moved = turn.inward(torch.randn(1, 3).double().expand(6, 3), *angles)
        torch.testing.assert_close(moved.norm(dim=1), moved[0].norm().expand(6))


def test_frames_at_the_poles_have_gradients():
    """There the longitude is arbitrary, and that of the frame has no derivative."""
    in_type = mixed(ROTATIONS)
    layer = SphereSelfAttention(in_type, in_type, samples=4, head_fields=2).double()
    x = on_sphere(in_type, 5)
    coords = torch.cat([torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]).double(), x.coords[2:]]).requires_grad_()
    layer(GeometricTensor(x.tensor, in_type, coords)).tensor.square().sum().backward()
    assert coords.grad.isfinite().all()
    assert coords.grad[2:].any()
    colatitude, longitude = angles_of(coords)
    assert colatitude[:2].tolist() == [0.0, math.pi]
    assert longitude[:2].tolist() == [0.0, 0.0]
