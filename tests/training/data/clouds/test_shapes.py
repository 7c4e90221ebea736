import io
import zipfile

import numpy as np
import pytest
import torch
from scipy import stats

from escnn_attention.training import ModelNet40, SampledSolids
from escnn_attention.training.data.clouds import shapes
from escnn_attention.training.data.clouds.shapes import (
    _POLYHEDRA,
    CATEGORIES,
    SOLIDS,
    TEN,
    normalised,
    sample_capsule,
    sample_ellipsoid,
    sample_mesh,
    sample_revolved,
    sample_torus,
)
from escnn_attention.training.errors import UserError

h5py = pytest.importorskip("h5py")

COUNT = 20_000


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def uniform(values):
    """Whether ``values`` are from U[0, 1], by the test of Kolmogorov and Smirnov."""
    return stats.kstest(values, "uniform").pvalue > 1e-3


def test_points_are_uniform_on_triangles(rng):
    corners = np.array([[0.0, 0, 0], [2, 0, 0], [0, 1, 0], [0, 0, 3]])
    points = sample_mesh(corners, np.array([[0, 1, 2], [0, 1, 3]]), COUNT, rng)
    first = points[:, 2] == 0
    assert abs(first.mean() - 0.25) < 0.01  # areas 1 and 3
    # On the first, (1 − x/2)² and y / (1 − x/2) are uniform and independent.
    rest = 1 - points[first, 0] / 2
    assert uniform(1 - rest**2)
    assert uniform(points[first, 1] / rest)
    assert not uniform(points[first, 1])
    assert abs(np.corrcoef(rest, points[first, 1] / rest)[0, 1]) < 0.05


@pytest.mark.parametrize("name", _POLYHEDRA)
def test_polyhedra_are_closed_and_convex(name, rng):
    corners, faces = _POLYHEDRA[name]
    sides = [frozenset((face[i], face[(i + 1) % 3])) for face in faces for i in range(3)]
    assert {sides.count(side) for side in sides} == {2}
    assert len(corners) - len(set(sides)) + len(faces) == 2
    middle = corners.mean(axis=0)
    for face in faces:
        a, b, c = corners[face]
        normal = np.cross(b - a, c - a)
        heights = (corners - a) @ normal * np.sign((middle - a) @ normal)
        assert heights.min() > -1e-12
    points = sample_mesh(corners, faces, 500, rng)
    a, b, c = corners[faces].transpose(1, 0, 2)
    normals = np.cross(b - a, c - a)
    heights = np.einsum("pfi,fi->pf", points[:, None] - a, normals / np.linalg.norm(normals, axis=1)[:, None])
    np.testing.assert_allclose(abs(heights).min(axis=1), 0, atol=1e-12)


def test_points_are_uniform_on_ellipsoids(rng):
    axes = np.array([1.0, 1.0, 2.0])
    points = sample_ellipsoid(axes, COUNT, rng)
    np.testing.assert_allclose((points**2 / axes**2).sum(1), 1)
    # The area below z, by numbers.
    z = np.linspace(-2, 2, 20_001)
    area = np.cumsum(np.sqrt(1 - z**2 / 4 + z**2 / 16))
    assert uniform(np.interp(points[:, 2], z, area / area[-1]))
    assert uniform(np.arctan2(points[:, 1], points[:, 0]) / (2 * np.pi) + 0.5)
    # The control: a sphere that is stretched.
    sphere = rng.standard_normal((COUNT, 3))
    stretched = sphere / np.linalg.norm(sphere, axis=1, keepdims=True) * axes
    assert not uniform(np.interp(stretched[:, 2], z, area / area[-1]))
    # On a sphere, each coordinate is uniform.
    assert uniform(sample_ellipsoid(np.ones(3), COUNT, rng)[:, 0] / 2 + 0.5)


def test_points_are_uniform_on_tori(rng):
    points = sample_torus(0.5, COUNT, rng)
    radii = np.hypot(points[:, 0], points[:, 1])
    np.testing.assert_allclose((radii - 1) ** 2 + points[:, 2] ** 2, 0.25)
    across = np.arctan2(points[:, 2], radii - 1) % (2 * np.pi)
    assert uniform((across + 0.5 * np.sin(across)) / (2 * np.pi))
    assert not uniform(across / (2 * np.pi))
    assert uniform(np.arctan2(points[:, 1], points[:, 0]) / (2 * np.pi) + 0.5)


def test_points_are_uniform_on_cylinders_cones_and_capsules(rng):
    cylinder = sample_revolved(np.array([0.0, 1, 1, 0]), np.array([0.0, 0, 2, 2]), COUNT, rng)
    radii = np.hypot(cylinder[:, 0], cylinder[:, 1])
    side = (cylinder[:, 2] > 0) & (cylinder[:, 2] < 2)
    np.testing.assert_allclose(radii[side], 1)
    assert abs(side.mean() - 4 / 6) < 0.012
    assert uniform(cylinder[side, 2] / 2)
    assert uniform(radii[~side] ** 2)
    assert abs((cylinder[~side, 2] == 0).mean() - 0.5) < 0.02

    cone = sample_revolved(np.array([0.0, 1, 0]), np.array([0.0, 0, 1]), COUNT, rng)
    radii = np.hypot(cone[:, 0], cone[:, 1])
    side = cone[:, 2] > 0
    np.testing.assert_allclose(radii[side] + cone[side, 2], 1)
    assert abs(side.mean() - 2**0.5 / (1 + 2**0.5)) < 0.012
    assert uniform(radii[side] ** 2)

    capsule = sample_capsule(2.0, COUNT, rng)
    beyond = abs(capsule[:, 2]) - 1
    ends = beyond > 0
    np.testing.assert_allclose(np.linalg.norm(capsule[:, :2], axis=1)[~ends], 1)
    np.testing.assert_allclose((capsule[ends, :2] ** 2).sum(1) + beyond[ends] ** 2, 1)
    assert abs(ends.mean() - 0.5) < 0.012
    assert uniform(beyond[ends])
    assert uniform(capsule[~ends, 2] / 2 + 0.5)


@pytest.mark.parametrize("name", SOLIDS)
def test_solids_have_proportions_of_their_own(name, rng):
    clouds = [normalised(SOLIDS[name](400, rng)) for _ in range(8)]
    for cloud in clouds:
        np.testing.assert_allclose(cloud.mean(axis=0), 0, atol=1e-12)
        assert np.linalg.norm(cloud, axis=1).max() == pytest.approx(1)
    extents = np.array([np.ptp(cloud, axis=0) for cloud in clouds])
    assert np.ptp(extents[:, 2] / extents[:, 0]) > 0.1
    assert {sum(len(cloud) for cloud in clouds)} == {8 * 400}


def test_batches():
    data = SampledSolids(num_train=60, num_points=50, batch_size=60, noise=0.0)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert (data.dim, data.in_channels, data.num_classes) == (3, 1, 10)
    assert data.class_names == tuple(SOLIDS)
    assert batch.coords.shape == (3_000, 3)
    assert batch.batch.bincount().tolist() == 60 * [50]
    assert (batch.features == 1).all()
    assert batch.targets.dtype == torch.int64
    assert set(batch.targets.tolist()) == set(range(10))
    torch.testing.assert_close(batch.coords.norm(dim=1).unflatten(0, (60, 50)).amax(1), torch.ones(60))
    # Labels are those of the solids: the points of a torus keep away from its axis, those of a box lie in six planes.
    for cloud, label in zip(batch.coords.split(50), batch.targets.tolist(), strict=True):
        if data.class_names[label] == "torus":
            assert cloud[:, :2].norm(dim=1).min() > 0.15
    noisy = SampledSolids(num_train=60, num_points=50, batch_size=60, noise=0.1)
    noisy.setup("fit")
    moved = noisy._sources["train"].coords - data._sources["train"].coords
    assert abs(moved.std() - 0.1) < 0.005


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_points": 1}, "num_points must be at least 2, got 1"), ({"noise": -1}, "noise must be at least 0, got -1")],
)
def test_errors(options, message):
    with pytest.raises(UserError, match=message):
        SampledSolids(**options)


# ModelNet40 in small.


@pytest.fixture
def files(monkeypatch):
    """Points and labels by file; the first coordinate of the first point of a model is its number."""
    monkeypatch.setattr(shapes, "_POINTS", 8)
    rng = np.random.default_rng(0)
    files = {}
    for number, name in enumerate((*shapes._TRAIN_FILES, *shapes._TEST_FILES)):
        points = rng.standard_normal((6, 8, 3)).astype(np.float32)
        points[:, 0, 0] = 6 * number + np.arange(6)
        files[name] = points, rng.integers(0, 40, (6, 1)).astype(np.uint8)
    files["ply_data_train0.h5"][1][:] = CATEGORIES.index("bathtub")
    files["ply_data_test0.h5"][1][:] = CATEGORIES.index("toilet")
    return files


def hdf5(points, labels):
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["data"], file["label"], file["normal"] = points, labels, np.zeros_like(points)
    return content.getvalue()


def archive(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as members:
        for name, arrays in files.items():
            members.writestr(f"modelnet40_ply_hdf5_2048/{name}", hdf5(*arrays))
    return content.getvalue()


def check(folder, files, **options):
    data = ModelNet40(folder, num_points=5, batch_size=1, eval_batch_size=50, **options)
    data.prepare_data()
    data.setup()
    seen = {}
    for part in ("train", "valid", "test"):
        source = data._sources[part]
        assert source.sizes.tolist() == len(source) * [5]
        seen[part] = {}
        for cloud, label in zip(source.coords.split(5), source.targets.tolist(), strict=True):
            number = round(cloud[0, 0].item())
            points, labels = files[[*files][number // 6]]
            np.testing.assert_array_equal(cloud, points[number % 6, :5])
            assert CATEGORIES[labels[number % 6, 0]] == data.class_names[label]
            seen[part][number] = label
    assert set(seen["train"]) | set(seen["valid"]) <= set(range(30))
    assert not set(seen["train"]) & set(seen["valid"])
    assert set(seen["test"]) <= set(range(30, 42))
    return data, seen


@pytest.mark.parametrize("packed", [False, True])
def test_files_in_the_folder(tmp_path, files, packed):
    if packed:
        (tmp_path / shapes.ARCHIVE).write_bytes(archive(files))
    else:
        (tmp_path / shapes.FOLDER).mkdir()
        for name, arrays in files.items():
            (tmp_path / shapes.FOLDER / name).write_bytes(hdf5(*arrays))
    data, seen = check(tmp_path, files)
    assert {part: len(models) for part, models in seen.items()} == {"train": 27, "valid": 3, "test": 12}
    assert len(data.class_names) == data.num_classes == 40
    assert data.class_names[0] == "airplane"
    assert data.class_names[39] == "xbox"
    # The ten categories of ModelNet10 alone, with labels of their own.
    data, seen = check(tmp_path, files, categories=10)
    assert data.class_names == TEN
    assert data.num_classes == 10
    wanted = [n for n, (_, labels) in enumerate(files.values()) for label in labels[:, 0] if CATEGORIES[label] in TEN]
    assert sum(map(len, seen.values())) == len(wanted)
    assert set(range(30, 36)) <= set(seen["test"])
    assert seen["test"][30] == 9
    # A limit.
    data, _ = check(tmp_path, files, limit_train=4, limit_test=2)
    assert len(data.train_dataloader()) == 4
    (batch,) = data.test_dataloader()
    assert batch.targets.shape == (2,)


def test_download(tmp_path, files, server, monkeypatch):
    url, md5 = server.put("models.zip", archive(files))
    monkeypatch.setattr(shapes, "URL", url)
    monkeypatch.setattr(shapes, "MD5", md5)
    check(tmp_path, files)
    assert [path.name for path in tmp_path.glob("[!.]*")] == [shapes.ARCHIVE]
    check(tmp_path, files)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda points, labels: (points[:, :4], labels), r"data must be floats \(N, 8, 3\)"),
        (lambda points, labels: (points * np.nan, labels), "data must be finite"),
        (lambda points, labels: (points, labels + 40), "label must lie between 0 and 39"),
        (lambda points, labels: (points, labels[:3]), r"label must be integers \(6,\)"),
    ],
)
def test_files_with_other_content(tmp_path, files, change, message):
    files["ply_data_test1.h5"] = change(*files["ply_data_test1.h5"])
    (tmp_path / shapes.ARCHIVE).write_bytes(archive(files))
    with pytest.raises(UserError, match=message):
        ModelNet40(tmp_path, num_points=5).setup("test")


def test_damaged_files(tmp_path, files):
    (tmp_path / shapes.ARCHIVE).write_bytes(archive(files)[:-50])
    with pytest.raises(UserError, match="cannot read"):
        ModelNet40(tmp_path, num_points=5).setup("test")
    del files["ply_data_test1.h5"]
    (tmp_path / shapes.ARCHIVE).write_bytes(archive(files))
    with pytest.raises(UserError, match=r"cannot read .*ply_data_test1\.h5"):
        ModelNet40(tmp_path, num_points=5).setup("test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_points": 2049}, "num_points must be at most 2048, got 2049"),
        ({"num_points": 1}, "num_points must be at least 2, got 1"),
        ({"categories": 20}, "categories must be one of 10, 40, got 20"),
        ({"limit_train": 0}, "limit_train must be at least 1, got 0"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(UserError, match=message):
        ModelNet40(**options)
