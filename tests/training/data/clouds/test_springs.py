import numpy as np
import pytest
import torch
from scipy.linalg import expm

from escnn_attention.training import Springs
from escnn_attention.training.data.clouds.base import move_trajectories, random_rotations
from escnn_attention.training.data.clouds.springs import (
    DURATION,
    NUM_FRAMES,
    STEP,
    Systems,
    energy,
    potential,
    random_systems,
    simulate,
)

TIMES = np.linspace(0, DURATION, NUM_FRAMES)


def systems(count=3, seed=0, **options):
    return random_systems(count, np.random.default_rng(seed), **options)


def energies(found, q, p):
    return energy(q, p, found.masses[:, None], found.stiffness[:, None])


def test_the_potential_is_a_sum_over_pairs():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((4, 5, 3)), rng.random((4, 5))
    expected = [
        sum(k[s, i] * k[s, j] * ((q[s, i] - q[s, j]) ** 2).sum() for i in range(5) for j in range(i)) for s in range(4)
    ]
    np.testing.assert_allclose(potential(q, k), expected)
    np.testing.assert_allclose(potential(torch.from_numpy(q), torch.from_numpy(k)), expected)
    p, m = rng.standard_normal((4, 5, 3)), rng.random((4, 5)) + 0.1
    kinetic = (p**2 / m[..., None]).sum((1, 2)) / 2
    np.testing.assert_allclose(energy(q, p, m, k), kinetic + expected)


def test_random_systems_are_the_published_ones():
    found = systems(20_000)
    assert found.masses.shape == (20_000, 6)
    assert found.positions.shape == (20_000, 6, 2)
    assert (found.masses.min(), found.masses.max()) == pytest.approx((0.1, 3.1), abs=1e-3)
    assert (found.stiffness.min(), found.stiffness.max()) == pytest.approx((0, 5), abs=1e-3)
    assert (found.positions.std(), found.momenta.std()) == pytest.approx((0.4, 0.6), rel=0.02)
    # As measured on the published code.
    assert np.median(energies(found, found.positions[:, None], found.momenta[:, None])) == pytest.approx(52, rel=0.05)
    assert found.momenta.sum(1).std() == pytest.approx(1.5, rel=0.03)
    _, p = simulate(Systems(*(values[:500] for values in found)), TIMES[::5])
    assert p.std() == pytest.approx(2.7, rel=0.1)


@pytest.mark.parametrize(("bodies", "dim"), [(6, 2), (3, 3), (2, 2)])
def test_the_exact_solution_is_that_of_the_matrix_exponential(bodies, dim):
    found = systems(num_bodies=bodies, dim=dim)
    q, p = simulate(found, TIMES[:200:50])
    assert q.shape == p.shape == (3, 4, bodies, dim)
    for s in range(3):
        # d/dt (q, p) = A (q, p), with A from the gradient of V, entry by entry.
        k = found.stiffness[s]
        a = np.zeros((2 * bodies, 2 * bodies))
        a[:bodies, bodies:] = np.diag(1 / found.masses[s])
        for i in range(bodies):
            for j in range(bodies):
                if i != j:
                    a[bodies + i, j] += 2 * k[i] * k[j]
                    a[bodies + i, i] -= 2 * k[i] * k[j]
        start = np.concatenate([found.positions[s], found.momenta[s]])
        for number, time in enumerate(TIMES[:200:50]):
            expected = expm(a * time) @ start
            np.testing.assert_allclose(q[s, number], expected[:bodies], atol=1e-11)
            np.testing.assert_allclose(p[s, number], expected[bodies:], atol=1e-11)


def test_energy_and_momentum_are_conserved():
    found = systems(4)
    q, p = simulate(found, TIMES)
    h = energies(found, q, p)
    np.testing.assert_allclose(h, h[:, :1] + np.zeros_like(h), rtol=1e-12)
    np.testing.assert_allclose(p.sum(2), p[:, :1].sum(2) + np.zeros_like(p.sum(2)), atol=1e-9)


def test_the_published_integrator():
    """One step of the 3/8-rule from frame to frame, of the order 4; its errors are the published ones."""
    found = systems(40)
    q, _ = simulate(found, TIMES)
    near_q, near_p = simulate(found, TIMES, "rk4")
    h = energies(found, near_q, near_p)
    assert 1e-6 < np.median(abs(h / h[:, :1] - 1).max(axis=1)) < 5e-5
    assert 1e-8 < ((near_q - q) ** 2)[:, -1].mean() < 1e-4
    # Twice the step makes 2⁴ times the error.
    coarse_q, _ = simulate(found, TIMES[::2], "rk4")
    errors = [np.median(abs(near - q[:, 498]).max((1, 2))) for near in (near_q[:, 498], coarse_q[:, -1])]
    assert 11 < errors[1] / errors[0] < 22


def test_times_of_each_system():
    found = systems(3)
    own = np.random.default_rng(1).uniform(0, 5, (3, 4))
    q, p = simulate(found, own)
    for s in range(3):
        for t in range(4):
            one = simulate(found, own[s, t : t + 1])
            np.testing.assert_allclose(q[s, t], one[0][s, 0], atol=1e-13)
            np.testing.assert_allclose(p[s, t], one[1][s, 0], atol=1e-13)


def test_batches():
    data = Springs(num_train=10, num_valid=3, num_test=4, batch_size=10, test_frames=100)
    data.setup()
    (batch,) = data.train_dataloader()
    assert (data.dim, data.in_channels, data.step) == (2, 2, 5 / 499)
    assert batch.coords.shape == (60, 2)
    assert batch.point_targets.shape == (60, 5, 2, 2)
    assert torch.equal(batch.coords, batch.point_targets[:, 0, 0])
    assert batch.batch.bincount().tolist() == 10 * [6]
    q, p = batch.point_targets.double().unflatten(0, (10, 6)).permute(3, 0, 2, 1, 4)
    m, k = batch.features.double().unflatten(0, (10, 6)).movedim(-1, 0)
    torch.testing.assert_close(
        energy(q, p, m[:, None], k[:, None]), batch.targets.double()[:, None].expand(10, 5), rtol=1e-5, atol=0
    )
    # What follows the first frame follows from it.
    start = Systems(m.numpy(), k.numpy(), q[:, 0].numpy(), p[:, 0].numpy())
    later, _ = simulate(start, STEP * np.arange(5))
    np.testing.assert_allclose(q, later, atol=2e-5)
    (test,) = data.test_dataloader()
    assert test.point_targets.shape == (24, 100, 2, 2)


def test_pieces_come_from_all_over_a_trajectory_and_do_not_overlap():
    data = Springs(num_train=300, num_valid=1, num_test=1)
    found, frames = data._trajectories("train")
    q, _ = simulate(found, TIMES)
    first = np.array([int(abs(q[s] - frames[s, 0, 0]).sum((1, 2)).argmin()) for s in range(300)])
    assert not (first % 5).any()
    assert len(set(first)) > 80
    assert first.min() < 30
    assert first.max() >= 470
    np.testing.assert_allclose(np.stack([q[s, f : f + 5] for s, f in enumerate(first)]), frames[:, :, 0], atol=1e-12)
    # A whole trajectory is one piece.
    whole, frames = Springs(num_train=2, frames=500)._trajectories("train")
    np.testing.assert_allclose(frames[:, :, 0], simulate(whole, TIMES)[0], atol=1e-13)
    np.testing.assert_allclose(frames[:, 0, 1], whole.momenta, atol=1e-13)


def test_moved_systems_are_those_of_moved_starts():
    data = Springs(num_train=5, num_valid=1, num_test=1, frames=20, batch_size=5)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    generator = np.random.default_rng(0)
    turns = random_rotations(5, 2, True, generator)
    moves = generator.standard_normal((5, 2))
    moved = move_trajectories(batch, torch.from_numpy(turns), torch.from_numpy(moves))
    assert torch.equal(moved.targets, batch.targets)
    m, k = batch.features.double().numpy().reshape(5, 6, 2).transpose(2, 0, 1)
    q = batch.coords.double().numpy().reshape(5, 6, 2)
    p = batch.point_targets[:, 0, 1].double().numpy().reshape(5, 6, 2)
    c = q.mean(1, keepdims=True)
    start = Systems(m, k, (q - c) @ turns.transpose(0, 2, 1) + c + moves[:, None], p @ turns.transpose(0, 2, 1))
    later = np.stack(simulate(start, STEP * np.arange(20)), axis=2)
    found = moved.point_targets.unflatten(0, (5, 6)).permute(0, 2, 3, 1, 4)
    np.testing.assert_allclose(found, later, atol=1e-4)
    np.testing.assert_allclose(moved.coords.reshape(5, 6, 2), later[:, 0, 0], atol=1e-5)
    # The control: the systems as they were.
    assert abs(batch.point_targets.unflatten(0, (5, 6)).permute(0, 2, 3, 1, 4).numpy() - later).max() > 0.1
