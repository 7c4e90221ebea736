import numpy as np
import pytest
import torch

from escnn_attention.training.data import Clouds
from escnn_attention.training.data.clouds.motions import Motions, RandomMotions, move, random_rotations, rotated
from escnn_attention.training.data.sampling import Draw


def clouds(sizes, dim, targets, point_targets=None):
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Clouds(torch.randn(len(batch), dim).double(), torch.ones(len(batch), 1), batch, targets, point_targets)


def motions(count, dim, seed=0):
    generator = np.random.default_rng(seed)
    rotations = random_rotations(count, dim, True, generator)
    return Motions(torch.from_numpy(rotations), torch.from_numpy(generator.standard_normal((count, dim))))


@pytest.mark.parametrize(("dim", "rotate"), [(2, True), (3, True), (3, "z")])
def test_rotations(dim, rotate):
    found = random_rotations(4_000, dim, rotate, np.random.default_rng(0))
    np.testing.assert_allclose(found @ found.transpose(0, 2, 1), np.broadcast_to(np.eye(dim), found.shape), atol=1e-14)
    np.testing.assert_allclose(np.linalg.det(found), 1)
    turning = found[:, :2, :2] if rotate == "z" else found
    # A uniform rotation takes a direction to a uniform one.
    np.testing.assert_allclose(turning.mean(0), 0, atol=0.05)
    np.testing.assert_allclose((turning**2).mean(0), 1 / turning.shape[1], atol=0.03)
    assert (found[:, 2, 2] == 1).all() if rotate == "z" else True
    np.testing.assert_array_equal(random_rotations(2, dim, False, np.random.default_rng(0)), [np.eye(dim)] * 2)


def test_rotations_in_space_are_uniform_by_haars_measure():
    def mean_angle(rotations):
        return np.arccos(((rotations.trace(axis1=1, axis2=2) - 1) / 2).clip(-1, 1)).mean()

    generator = np.random.default_rng(0)
    expected = np.pi / 2 + 2 / np.pi  # of the density (1 − cos θ)/π
    assert abs(mean_angle(random_rotations(20_000, 3, True, generator)) - expected) < 0.02
    # The control: uniform angles about a uniform axis.
    axes = generator.standard_normal((20_000, 3))
    axes /= np.linalg.norm(axes, axis=1, keepdims=True)
    cross = np.cross(np.eye(3)[None], axes[:, None])
    angles = generator.uniform(0, np.pi, (20_000, 1, 1))
    control = np.eye(3) + np.sin(angles) * cross + (1 - np.cos(angles)) * cross @ cross
    np.testing.assert_allclose(
        control @ control.transpose(0, 2, 1), np.broadcast_to(np.eye(3), control.shape), atol=1e-9
    )
    assert abs(mean_angle(control) - expected) > 0.3


@pytest.mark.parametrize("about", ["mean", "origin"])
@pytest.mark.parametrize("dim", [2, 3])
def test_motions_are_those_of_the_formula(dim, about):
    sizes = (4, 1, 3)
    before = clouds(sizes, dim, torch.randn(3, 2, dim).double(), torch.randn(8, dim, dim).double())
    moving = motions(3, dim)
    after = move(before, moving, about=about, target_order=1, point_target_order=2)
    for n, (r, t) in enumerate(zip(*moving, strict=True)):
        of = before.batch == n
        x = before.coords[of]
        c = x.mean(0) if about == "mean" else torch.zeros(dim).double()
        torch.testing.assert_close(after.coords[of], (x - c) @ r.T + c + t, rtol=0, atol=1e-13)
        torch.testing.assert_close(after.targets[n], before.targets[n] @ r.T, rtol=0, atol=1e-13)
        for a, b in zip(after.point_targets[of], before.point_targets[of], strict=True):
            torch.testing.assert_close(a, r @ b @ r.T, rtol=0, atol=1e-13)
    assert after.features is before.features
    # The control: about another point is another motion.
    other = move(before, moving, about="origin" if about == "mean" else "mean")
    assert (after.coords - other.coords).abs().max() > 0.1
    assert torch.equal(other.targets, before.targets)


def test_orders_that_there_are_not():
    with pytest.raises(ValueError, match=r"order: got 3, needed 0 .* 1 .* or 2"):
        rotated(torch.ones(1, 3, 3, 3), torch.eye(3)[None], 3)


def test_a_motion_depends_on_seed_stream_epoch_and_number_only():
    def drawn(indices, epoch=0, seed=0, stream=0):
        return RandomMotions(30, 3, True, 0.5, seed, stream)(Draw(indices, epoch))

    everything = drawn(range(30))
    some = [7, 29, 2]
    for found, expected in zip(drawn(some), everything, strict=True):
        assert torch.equal(found, expected[some])
    for other in (drawn(range(30), epoch=1), drawn(range(30), seed=1), drawn(range(30), stream=1)):
        for found, expected in zip(other, everything, strict=True):
            assert (found - expected).abs().amax(dim=tuple(range(1, found.ndim))).min() > 1e-3
    one = RandomMotions(30, 3, True, 0.5, 0)
    for epoch in (0, 1, 0):
        assert torch.equal(one(Draw(some, epoch)).rotations, drawn(some, epoch).rotations)
    assert abs(everything.translations.std() - 0.5) < 0.15


@pytest.mark.parametrize("rotate", [False, "z", True])
def test_half_of_the_motions_are_reflections(rotate):
    drawn = [RandomMotions(200, 3, rotate, 0.5, 0, reflect=reflect)(Draw(range(200), 2)) for reflect in (True, False)]
    (mirrored, moved), (plain, expected) = drawn
    assert torch.equal(moved, expected)
    assert (torch.linalg.det(plain) - 1).abs().max() < 1e-12
    determinants = torch.linalg.det(mirrored)
    assert (determinants.abs() - 1).abs().max() < 1e-12
    assert 60 < (determinants < 0).sum() < 140
    axis = torch.tensor([1.0, 0.0, 0.0]).double()
    mirror = torch.eye(3).double() - 2 * torch.outer(axis, axis)
    changed = torch.where((determinants < 0)[:, None, None], plain @ mirror, plain)
    assert (changed - mirrored).abs().max() < 1e-12
