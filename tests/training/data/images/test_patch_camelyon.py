import gzip
import hashlib
import itertools
import os
import pickle

import h5py
import numpy as np
import pytest
import torch

from escnn_attention.training import PatchCamelyon
from escnn_attention.training.data.images import patch_camelyon
from escnn_attention.training.data.images.patch_camelyon import ImagesInFile
from escnn_attention.training.errors import UserError

COUNTS = {"train": 12, "valid": 5, "test": 4}
MEAN = np.array((0.701, 0.538, 0.692))[:, None, None]
STD = np.array((0.235, 0.277, 0.213))[:, None, None]


@pytest.fixture
def arrays():
    """PatchCamelyon in small."""
    generator = np.random.default_rng(0)
    arrays = {}
    for part, count in COUNTS.items():
        arrays[f"{part}_x"] = generator.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
        arrays[f"{part}_y"] = generator.integers(0, 2, (count, 1, 1, 1), dtype=np.uint8)
        arrays[f"{part}_y"].flat[:2] = 0, 1
    return arrays


def file(name):
    return f"camelyonpatch_level_2_split_{name}.h5"


def write(folder, arrays, only=None):
    for name, array in arrays.items():
        if only in (None, name):
            with h5py.File(folder / file(name), "w") as target:
                target.create_dataset(name[-1], data=array, chunks=(1, *array.shape[1:]), compression="gzip")


def packed(folder, arrays):
    """The published files by name."""
    write(folder, arrays)
    content = {}
    for name in arrays:
        path = folder / file(name)
        content[name] = gzip.compress(path.read_bytes(), 1)
        path.unlink()
    return content


def check(folder, arrays, **options):
    data = PatchCamelyon(folder, batch_size=4, eval_batch_size=10, **options)
    data.prepare_data()
    data.setup()
    seen = 0
    for images, labels in data.train_dataloader():
        assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 96, 96), torch.float32, torch.int64)
        seen += 1
    assert seen == 3
    for part, loader in (("valid", data.val_dataloader()), ("test", data.test_dataloader())):
        ((images, labels),) = loader
        pixels = arrays[f"{part}_x"].transpose(0, 3, 1, 2) / 255
        np.testing.assert_allclose(images, (pixels - MEAN) / STD, atol=1e-5)
        np.testing.assert_array_equal(labels, arrays[f"{part}_y"].ravel())


@pytest.mark.parametrize("place", [".", "pcam"])
def test_unpacked_files(tmp_path, arrays, place):
    (tmp_path / place).mkdir(exist_ok=True)
    write(tmp_path / place, arrays)
    check(tmp_path, arrays)


@pytest.mark.parametrize("download", [False, True])
def test_packed_files_are_unpacked_and_kept(tmp_path, arrays, download):
    for name, content in packed(tmp_path, arrays).items():
        (tmp_path / f"{file(name)}.gz").write_bytes(content)
    check(tmp_path, arrays, download=download)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        f"{file(name)}{ending}" for name in arrays for ending in ("", ".gz")
    }


def test_download(tmp_path, arrays, server, monkeypatch):
    sums = {}
    for name, content in packed(tmp_path, arrays).items():
        server.put(f"{file(name)}.gz", content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(patch_camelyon, "MD5", sums)
    monkeypatch.setattr(patch_camelyon, "URL", f"http://127.0.0.1:{server.port}/{{}}")
    write(tmp_path, arrays, only="valid_x")
    check(tmp_path, arrays)
    assert len(server.requests) == 5
    assert {path.name for path in tmp_path.glob("[!.]*")} == {file(name) for name in arrays}
    check(tmp_path, arrays)
    assert len(server.requests) == 5


def test_images_come_in_the_order_asked_for(tmp_path, arrays):
    write(tmp_path, arrays)
    source = ImagesInFile(tmp_path / file("train_x"), tmp_path / file("train_y"))
    order = [7, 0, 11, 3, 3]
    images, labels = source.take(order)
    np.testing.assert_array_equal(images, arrays["train_x"][order].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(labels, arrays["train_y"].ravel()[order])


def test_copies_open_the_file_for_themselves(tmp_path, arrays):
    write(tmp_path, arrays)
    source = ImagesInFile(tmp_path / file("train_x"), tmp_path / file("train_y"))
    expected = source.take([5])
    copied = pickle.loads(pickle.dumps(source))
    assert all(map(torch.equal, copied.take([5]), expected))


def test_another_process_opens_the_file_anew(tmp_path, arrays, monkeypatch):
    write(tmp_path, arrays)
    source = ImagesInFile(tmp_path / file("train_x"), tmp_path / file("train_y"))
    expected = source.take([5])
    _, opened = source._opened
    source.take([6])
    assert source._opened[1] is opened
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert all(map(torch.equal, source.take([5]), expected))
    assert source._opened[1] is not opened


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_x", np.zeros((12, 96, 96), np.uint8), r"x must be uint8 \(N, 96, 96, 3\), found uint8 \(12, 96, 96\)"),
        ("train_x", np.zeros((12, 96, 96, 3), np.float32), "x must be uint8"),
        ("train_x", np.zeros((11, 96, 96, 3), np.uint8), r"y must be integers \(11,\), found uint8 \(12, 1, 1, 1\)"),
        ("train_y", np.full((12, 1, 1, 1), 2), "y must lie between 0 and 1"),
        ("train_y", np.zeros((12, 1, 1, 1)), r"y must be integers \(12,\), found float64"),
    ],
)
def test_files_with_other_content(tmp_path, arrays, name, array, message):
    write(tmp_path, arrays | {name: array})
    with pytest.raises(UserError, match=rf"{file('train_')[:-3]}.\.h5: {message}"):
        PatchCamelyon(tmp_path).setup("fit")


def test_files_without_the_array(tmp_path, arrays):
    for kind, other in itertools.product("xy", ("z", "xy")):
        write(tmp_path, arrays)
        PatchCamelyon(tmp_path).setup("fit")
        with h5py.File(tmp_path / file(f"train_{kind}"), "a") as target:
            del target[kind]
            for name in other:  # groups, one of which may have the name of the array
                target.create_group(name)
        with pytest.raises(UserError, match=rf"cannot read .*train_{kind}\.h5"):
            PatchCamelyon(tmp_path).setup("fit")


def test_damaged_files(tmp_path, arrays):
    write(tmp_path, arrays)
    path = tmp_path / file("train_x")
    whole = path.read_bytes()
    for damaged in (b"", b"no HDF5", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*train_x\.h5"):
            PatchCamelyon(tmp_path).setup("fit")
    # Where a piece of the images is damaged, only reading it shows it.
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(30_000) + whole[middle + 30_000 :])
    data = PatchCamelyon(tmp_path, batch_size=12)
    data.setup("fit")
    with pytest.raises(UserError, match=r"cannot read .*train_x\.h5"):
        next(iter(data.train_dataloader()))


def test_damaged_packed_file(tmp_path, arrays):
    content = packed(tmp_path, arrays)
    write(tmp_path, arrays)
    (tmp_path / file("test_x")).unlink()
    whole = content["test_x"]
    for damaged in (whole[:-20], b"no gzip", whole[:500] + b"xxxx" + whole[504:]):
        (tmp_path / f"{file('test_x')}.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*test_x\.h5\.gz"):
            PatchCamelyon(tmp_path).prepare_data()
        assert not (tmp_path / file("test_x")).exists()
        assert not [name for name in [path.name for path in tmp_path.glob("[!.]*")] if "tmp" in name or "lock" in name]
