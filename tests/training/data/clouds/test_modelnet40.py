import io
import zipfile

import h5py
import numpy as np
import pytest

from escnn_attention.training import ModelNet40
from escnn_attention.training.data.clouds import modelnet40
from escnn_attention.training.data.clouds.modelnet40 import CATEGORIES
from escnn_attention.training.errors import UserError


@pytest.fixture
def files(monkeypatch):
    """ModelNet40 in small: points and labels by file; the first coordinate of a model's first point is its number."""
    monkeypatch.setattr(modelnet40, "_POINTS", 8)
    rng = np.random.default_rng(0)
    files = {}
    for number, name in enumerate((*modelnet40._TRAIN_FILES, *modelnet40._TEST_FILES)):
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


def test_files_in_the_folder(tmp_path, files):
    (tmp_path / modelnet40.ARCHIVE).write_bytes(archive(files))
    data, seen = check(tmp_path, files)
    assert {part: len(models) for part, models in seen.items()} == {"train": 27, "valid": 3, "test": 12}
    assert len(data.class_names) == data.num_classes == 40
    assert data.class_names[0] == "airplane"
    assert data.class_names[39] == "xbox"
    # A limit.
    data, _ = check(tmp_path, files, limit_train=4, limit_test=2)
    assert len(data.train_dataloader()) == 4
    (batch,) = data.test_dataloader()
    assert batch.targets.shape == (2,)


def test_download(tmp_path, files, server, monkeypatch):
    url, md5 = server.put("models.zip", archive(files))
    monkeypatch.setattr(modelnet40, "URL", url)
    monkeypatch.setattr(modelnet40, "MD5", md5)
    check(tmp_path, files)
    assert [path.name for path in tmp_path.glob("[!.]*")] == [modelnet40.ARCHIVE]
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
    (tmp_path / modelnet40.ARCHIVE).write_bytes(archive(files))
    with pytest.raises(UserError, match=message):
        ModelNet40(tmp_path, num_points=5).setup("test")


def test_damaged_files(tmp_path, files):
    (tmp_path / modelnet40.ARCHIVE).write_bytes(archive(files)[:-50])
    with pytest.raises(UserError, match="cannot read"):
        ModelNet40(tmp_path, num_points=5).setup("test")
    del files["ply_data_test1.h5"]
    (tmp_path / modelnet40.ARCHIVE).write_bytes(archive(files))
    with pytest.raises(UserError, match=r"cannot read .*ply_data_test1\.h5"):
        ModelNet40(tmp_path, num_points=5).setup("test")
