import numpy as np
import pytest
import torch

from escnn_attention.training import Constellations
from escnn_attention.training.data.clouds.constellations import NUM_POINTS, PATTERNS, make_constellations

SIZES = [len(corners) for corners in PATTERNS.values()]


def made(count=2_000, seed=0, **options):
    return make_constellations(count, np.random.default_rng(seed), **options)


def shape(points):
    """Sorted distances between points: what turning and moving them, and their order, do not change."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=2)
    return np.sort(gaps[np.triu_indices(len(points), 1)])


def test_there_are_two_of_each_of_four_patterns():
    found = made(20, noise=0.0)
    assert list(PATTERNS) == ["square", "triangle", "pentagon", "L"]
    assert NUM_POINTS == 34
    for points, present, owners, counts in zip(*found, strict=True):
        there = np.zeros(4, dtype=int)
        for candidate in range(8):
            pattern = list(PATTERNS.values())[candidate % 4]
            of = owners == candidate
            assert of.sum() == len(pattern)
            np.testing.assert_allclose(shape(points[of] * 12), shape(pattern), atol=1e-12)
            assert len(set(present[of])) == 1
            there[candidate % 4] += present[of][0]
        np.testing.assert_array_equal(counts, there)


def test_counts():
    counts = made(20_000).counts
    assert counts.dtype == np.int64
    shares = np.stack([(counts == n).mean(axis=0) for n in range(3)], axis=1)
    # One of 256 clouds would be empty, and gets a pattern.
    np.testing.assert_allclose(shares, [[0.249, 0.501, 0.25]] * 4, atol=0.012)
    assert (counts.sum(axis=1) > 0).all()


def test_all_patterns_lie_in_the_same_square():
    found = made(noise=0.0)
    for candidate in range(8):
        of = found.owners == candidate
        centres = (found.points * of[..., None]).sum(1) / of.sum(1, keepdims=True)
        assert abs(centres.mean()) < 0.05
        assert 0.99 < abs(centres).max() <= 1
        np.testing.assert_allclose(centres.std(axis=0), 1 / 3**0.5, atol=0.03)
    # The control: the published polygons lie in a greater square than the published L.
    published = made(published=True, noise=0.0)
    spread = []
    for candidate in range(4):
        of = published.owners == candidate
        spread.append(((published.points * of[..., None]).sum(1) / of.sum(1, keepdims=True)).std())
    assert min(spread[:3]) > 1.5 * spread[3]


def test_published_clouds_fill_the_square():
    found = made(200, published=True)
    np.testing.assert_allclose(found.points.min(axis=(1, 2)), -1)
    np.testing.assert_allclose(found.points.max(axis=(1, 2)), 1)
    # The scale of a cloud is its own: 2 over the range of U[0, 72].
    polygons = np.array([shape(p[o == 0]).max() / 2 for p, o in zip(found.points, found.owners, strict=True)])
    assert abs(np.median(polygons) - 0.031) < 0.003
    assert polygons.std() > 1e-3
    plain = made(200, noise=0.0)
    polygons = [shape(p[o == 0]).max() / 2 for p, o in zip(plain.points, plain.owners, strict=True)]
    np.testing.assert_allclose(polygons, 1 / 12)


def test_noise():
    with_noise, without = made(500, noise=0.3), made(500, noise=0.0)
    difference = 12 * (with_noise.points - without.points)
    assert abs(difference.std() - 0.3) < 0.01
    np.testing.assert_array_equal(with_noise.owners, without.owners)


def test_angles():
    """Patterns turn by up to 0.33π, either way."""
    found = made(4_000, noise=0.0)
    of = found.owners == 3
    corners = found.points[of].reshape(-1, 5, 2)
    assert len(corners) == 4_000
    # From the mean of an L to the middle between its ends.
    gaps = np.linalg.norm(corners[:, :, None] - corners[:, None], axis=3).sum(2)
    ends = np.take_along_axis(corners, np.argsort(gaps, axis=1)[:, -2:, None], 1)
    x, y = (ends.mean(1) - corners.mean(1)).T
    angles = np.arctan2(y, x) - 3 * np.pi / 4
    angles = (angles + np.pi) % (2 * np.pi) - np.pi
    assert 0.98 * 0.33 * np.pi < abs(angles).max() <= 0.33 * np.pi + 1e-9
    assert abs(angles.mean()) < 0.03


def test_the_order_of_points_says_nothing():
    owners = made(4_000).owners
    shares = np.stack([(owners == candidate).mean(axis=0) for candidate in range(8)])
    np.testing.assert_allclose(shares, np.repeat(np.array(2 * SIZES)[:, None] / 34, 34, axis=1), atol=0.03)


@pytest.mark.parametrize("features", ["presence", "constant"])
def test_batches(features):
    data = Constellations(num_train=64, batch_size=64, features=features)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert (data.dim, data.in_channels, data.num_targets, data.num_classes) == (2, 1, 4, 3)
    assert (batch.coords.dtype, batch.features.dtype, batch.targets.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
    assert batch.features.shape == (len(batch.coords), 1)
    assert batch.targets.shape == (64, 4)
    there = batch.targets @ torch.tensor(SIZES)
    if features == "presence":
        assert batch.batch.bincount().tolist() == 64 * [34]
        assert set(batch.features.flatten().tolist()) == {0.0, 1.0}
        assert torch.equal(torch.zeros(64).index_add(0, batch.batch, batch.features[:, 0]), there.float())
    else:
        assert torch.equal(batch.batch.bincount(), there)
        assert (batch.features == 1).all()


def test_options_change_the_clouds():
    def coords(**options):
        data = Constellations(num_train=8, num_valid=1, **options)
        data.setup("fit")
        return data._sources["train"].coords

    plain = coords()
    assert torch.equal(plain, coords())
    for options in ({"published": True}, {"seed": 1}, {"features": "constant"}):
        other = coords(**options)
        assert other.shape != plain.shape or not torch.equal(other, plain)
