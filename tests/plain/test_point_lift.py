"""The rotations that points are lifted with."""

import math

import numpy as np
import pytest
import torch

from escnn_attention.geometry.relations import product, rotate, rotation_vector
from escnn_attention.plain.point_lift import Frames, PointLift

pytestmark = pytest.mark.usefixtures("double")


def test_vectors_in_the_frame_of_a_rotation():
    # Two vectors of space, whose channels lie apart, and a scalar.
    cross = np.zeros((3, 3, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        cross[i, k, j], cross[i, j, k] = 1.0, -1.0  # e_i × e_j = e_k
    frames = Frames([np.array([[0, 2, 4], [6, 5, 3]])], [cross])
    x, q = torch.randn(7, 7), torch.nn.functional.normalize(torch.randn(7, 4), dim=1)
    y = frames(x, q)
    for channels in ([0, 2, 4], [6, 5, 3]):
        torch.testing.assert_close(y[:, channels], rotate(q, x[:, channels]), rtol=1e-12, atol=1e-12)
    assert torch.equal(y[:, 1], x[:, 1])
    torch.testing.assert_close(frames(y, q, inverse=True), x, rtol=1e-12, atol=1e-12)
    assert (frames(y, q) - x).abs().max() > 0.1
    assert not frames.state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(frames(x, q), y, rtol=1e-12, atol=1e-12)


def moments(lift, rotations):
    """The means of functions whose integrals over all rotations are zero."""
    rotations = rotations.flatten(0, 1)
    if lift.dim == 2:
        return torch.stack([rotations.cos().mean(), rotations.sin().mean(), (2 * rotations).cos().mean()])
    entries = torch.stack([rotate(rotations, axis.expand(len(rotations), 3)) for axis in torch.eye(3)], dim=-1)
    # Of first and of second order.
    return torch.cat([entries.mean(0).flatten(), (entries.square().mean(0) - 1 / 3).flatten()])


@pytest.mark.parametrize("dim", [2, 3])
def test_lifts_fill_the_rotations_evenly(dim):
    lift = PointLift(dim, 1)
    assert moments(lift, lift.draw(20000)).abs().max() < 0.02
    spread = lift.spread(torch.arange(2000))
    assert moments(lift, spread).abs().max() < 0.004
    # What is seen of two neighbours is always the same, and no other two are alike.
    other = PointLift(dim, 3)
    rotations = other.spread(torch.arange(50)).flatten(0, 1)
    inverse = -rotations if dim == 2 else rotations * torch.tensor([1.0, -1.0, -1.0, -1.0])
    angle = rotation_vector(product(inverse[:, None], rotations)).norm(dim=-1)
    assert (angle + 10 * torch.eye(len(angle))).min() > 1e-3
    assert not torch.equal(lift.draw(3), lift.draw(3))
    torch.testing.assert_close(lift.spread(torch.tensor([4, 7])), lift.spread(torch.arange(8))[[4, 7]])


def test_lifts_of_a_point_in_the_plane_are_equally_far_from_each_other():
    for rotations in (PointLift(2, 5).draw(4), PointLift(2, 5).spread(torch.arange(4))):
        torch.testing.assert_close(rotations.diff(dim=1), torch.full((4, 4, 1), 2 * math.pi / 5))


def test_everything_is_lifted():
    lift = PointLift(2, 2)
    x, coords, angles = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 2)
    edges, batch = torch.tensor([[0, 2], [1, 2]]), torch.tensor([0, 0, 1])
    mask, measure = torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, 3.0])
    cloud = lift(x, coords, edges, batch, mask, measure, angles)
    assert torch.equal(cloud.x.view(3, 2, 4), x[:, None].expand(3, 2, 4))
    assert torch.equal(cloud.coords[:, :2].view(3, 2, 2), coords[:, None].expand(3, 2, 2))
    assert torch.equal(cloud.coords[:, 2].view(3, 2), angles)
    assert cloud.batch.tolist() == [0, 0, 0, 0, 1, 1]
    assert cloud.mask.tolist() == [True, True, False, False, True, True]
    assert cloud.measure.tolist() == [1, 1, 2, 2, 3, 3]
    expected = {(0, 2), (0, 3), (1, 2), (1, 3), (4, 4), (4, 5), (5, 4), (5, 5)}
    assert set(map(tuple, cloud.edge_index.T.tolist())) == expected
    assert len(cloud.edge_index.T) == len(expected)


def test_quaternions_that_are_drawn_may_be_of_one_half():
    coords = torch.randn(20, 3)
    for training in (True, False):
        any_half, positive = (PointLift(3, 2, half).train(training) for half in (False, True))
        state = torch.get_rng_state()
        q = any_half(coords, coords).coords[:, 3:]
        torch.set_rng_state(state)
        p = positive(coords, coords).coords[:, 3:]
        assert 0 < (q[:, 0] < 0).sum() < 40
        torch.testing.assert_close(p, q * q[:, :1].sign(), rtol=0, atol=0)
    given = -torch.ones(20, 2, 4)
    assert (positive(coords, coords, lifts=given).coords[:, 3:] < 0).all()


def test_quaternions_may_have_any_length():
    lift, coords, q = PointLift(3, 1), torch.randn(2, 3), torch.randn(2, 1, 4)
    one, other = (lift(coords, coords, lifts=c * q).coords for c in (1.0, 7.0))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one[:, 3:].norm(dim=1), torch.ones(2))
