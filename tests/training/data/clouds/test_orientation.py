import numpy as np
import pytest

from escnn_attention.training.data.clouds import orientation
from escnn_attention.training.data.clouds.base import random_rotations
from escnn_attention.training.data.clouds.orientation import in_frame_of_positions, matrices, standard_axes

_ENTRIES = (np.array([0, 0, 1, 0, 1, 2]), np.array([0, 1, 1, 2, 2, 2]))


def molecules(count=900, seed=0):
    """Things like molecules, chains of atoms with hydrogens, and tensors that are sums over pairs of their atoms."""
    rng = np.random.default_rng(seed)
    bonds = rng.random((orientation._NUM_PAIRS, len(orientation._CENTRES))) * [9, 9, 9, 9, 1, 1, 1, 1]
    bonds = np.concatenate([bonds.ravel(), bonds.ravel() / 3, 5 * rng.random(10)])
    sizes, charges, positions, tensors = [], [], [], []
    for _ in range(count):
        heavy = rng.choice([6, 6, 6, 7, 8], rng.integers(4, 7))
        steps = rng.standard_normal((len(heavy), 3)) + np.array([1.5, 0, 0])
        chain = np.cumsum(1.45 * steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0)
        away = rng.standard_normal((4, 3))
        hydrogens = chain[rng.choice(len(heavy), 4)] + 1.08 * away / np.linalg.norm(away, axis=1, keepdims=True)
        z = np.concatenate([heavy, [1, 1, 1, 1]])
        x = np.concatenate([chain, hydrogens]) @ random_rotations(1, 3, True, rng)[0]
        tensors.append(matrices(orientation._predicted(orientation._paired(z[None], x[None]), bonds)[0]))
        sizes.append(len(z))
        charges.append(z)
        positions.append(x)
    return np.array(sizes), charges, positions, np.stack(tensors)


def test_standard_axes_turn_with_the_molecule():
    rng = np.random.default_rng(0)
    charges, positions = rng.choice([1.0, 6.0, 8.0], (20, 7)), rng.standard_normal((20, 7, 3))
    axes = standard_axes(charges, positions)
    np.testing.assert_allclose(axes @ axes.transpose(0, 2, 1), np.broadcast_to(np.eye(3), (20, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(axes), 1)
    turns = random_rotations(20, 3, True, rng)
    moved = positions @ turns.transpose(0, 2, 1) + rng.standard_normal((20, 1, 3))
    np.testing.assert_allclose(standard_axes(charges, moved), axes @ turns.transpose(0, 2, 1), atol=1e-9)

    centre = (charges[..., None] * positions).sum(1) / charges.sum(1)[:, None]
    inside = (positions - centre[:, None]) @ axes.transpose(0, 2, 1)
    second = np.einsum("mi,mia,mib->mab", charges, inside, inside)
    spread = second.diagonal(axis1=1, axis2=2)
    np.testing.assert_allclose(second, spread[:, None] * np.eye(3), atol=1e-9)
    assert (np.diff(spread, axis=1) < 0).all()
    cubes = (charges[..., None] * inside**3).sum(1)
    assert (cubes[:, 1:] > 0).all()
    assert (cubes[:, 0] < 0).any()  # that axis makes the others right-handed


@pytest.fixture(scope="module")
def printed():
    """Molecules, their tensors, and these as a program prints them."""
    sizes, charges, positions, tensors = molecules()
    turned = []
    for z, x, a in zip(charges, positions, tensors, strict=True):
        (axes,) = standard_axes(z[None].astype(float), x[None])
        turned.append((axes @ a @ axes.T)[_ENTRIES])
    return sizes, np.concatenate(charges), np.concatenate(positions), tensors, np.stack(turned)


@pytest.mark.sampled(1, of="data sets as they are published")
def test_printed_tensors_are_turned_back(printed):
    sizes, charges, positions, tensors, entries = printed
    found = in_frame_of_positions(sizes, charges, positions, entries, np.arange(len(sizes)))
    np.testing.assert_allclose(found, tensors, atol=1e-9)
    # The control: as they are printed, they are not in the frame of the atoms.
    assert abs(matrices(entries) - tensors).max() > 1
    # Some of them, in another order.
    some = np.array([5, 2, 300])
    np.testing.assert_allclose(
        in_frame_of_positions(sizes, charges, positions, entries, some), tensors[some], atol=1e-9
    )


@pytest.mark.sampled(1, of="data sets as they are published")
def test_molecules_that_do_not_follow_the_rule_are_found(printed, monkeypatch):
    sizes, charges, positions, tensors, entries = printed
    rng = np.random.default_rng(1)
    wrong = rng.choice(len(sizes), 90, replace=False)
    frames = orientation._FRAMES[rng.integers(1, 24, 90)]
    odd = entries.copy()
    odd[wrong] = (frames @ matrices(entries[wrong]) @ frames.transpose(0, 2, 1))[(slice(None), *_ENTRIES)]
    found = in_frame_of_positions(sizes, charges, positions, odd, np.arange(len(sizes)))
    errors = np.linalg.norm(found - tensors, axis=(1, 2))
    apart = np.linalg.norm(matrices(odd) - matrices(entries), axis=(1, 2))
    # Where the two are hardly different, it does not matter much, and cannot be told.
    clear = apart > 4
    assert clear.sum() > 60
    assert errors.max() < 4
    assert (errors[clear] < 1e-9).mean() > 0.95
    assert (errors < 1e-9).mean() > 0.95
    # The control: by the rule alone they are not.
    monkeypatch.setattr(orientation, "_MARGIN", np.inf)
    ruled = in_frame_of_positions(sizes, charges, positions, odd, np.arange(len(sizes)))
    assert (np.linalg.norm(ruled - tensors, axis=(1, 2))[clear] > 1).mean() > 0.9


def test_a_sum_over_pairs_is_what_it_says():
    """Features times coefficients, pair by pair."""
    rng = np.random.default_rng(0)
    charges, positions = np.array([[6, 6, 8, 1]]), 1.2 * rng.standard_normal((1, 4, 3))
    pairs = orientation._paired(charges, positions)
    bonds = rng.standard_normal(2 * orientation._NUM_PAIRS * len(orientation._CENTRES) + 10)
    features = orientation._features(pairs)
    assert features.shape == (1, len(bonds), 6)
    found = matrices(orientation._predicted(pairs, bonds)[0])
    np.testing.assert_allclose(found, matrices(np.einsum("mfe,f->me", features, bonds)[0]))
    # It turns with the molecule.
    (turn,) = random_rotations(1, 3, True, rng)
    turned = matrices(orientation._predicted(orientation._paired(charges, positions @ turn.T), bonds)[0])
    np.testing.assert_allclose(turned, turn @ found @ turn.T, atol=1e-9)
    assert abs(turned - found).max() > 0.1
