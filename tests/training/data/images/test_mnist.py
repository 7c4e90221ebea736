import gzip
import hashlib
import itertools
import struct

import numpy as np
import pytest
import torch

from escnn_attention.training import MNIST
from escnn_attention.training.data.files import data_folder
from escnn_attention.training.data.images import mnist
from escnn_attention.training.errors import UserError
from tests import samples


@pytest.fixture
def arrays(monkeypatch):
    """MNIST in small: 7 images to train, 3 to validate, 4 to test."""
    monkeypatch.setattr(mnist, "_NUM_VALID", 3)
    generator = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 10), ("test", 4)):
        arrays[f"{part}_images"] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = generator.integers(0, 10, count, dtype=np.uint8)
    return arrays


def idx(array):
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def check(folder, arrays):
    data = MNIST(folder, batch_size=7, eval_batch_size=10, download=False)
    data.prepare_data()
    data.setup()
    ((train, train_labels),) = data.train_dataloader()
    ((valid, valid_labels),) = data.val_dataloader()
    ((test, test_labels),) = data.test_dataloader()
    for images, labels, name, part in (
        (valid, valid_labels, "train", slice(7, 10)),
        (test, test_labels, "test", slice(None)),
    ):
        pixels = arrays[f"{name}_images"][part, None] / 255
        np.testing.assert_allclose(images, (pixels - 0.1307) / 0.3081, atol=1e-5)
        np.testing.assert_array_equal(labels, arrays[f"{name}_labels"][part])
    assert (train.shape, train.dtype, train_labels.dtype) == ((7, 1, 28, 28), torch.float32, torch.int64)
    assert sorted(train_labels.tolist()) == sorted(arrays["train_labels"][:7])


def test_one_file(tmp_path, arrays):
    np.savez(tmp_path / "mnist.npz", **arrays)
    check(tmp_path, arrays)


def test_what_is_not_there_is_downloaded(tmp_path, arrays, server, monkeypatch):
    archives = {}
    for name, array in arrays.items():
        content = gzip.compress(idx(array))
        server.put(f"{name}.gz", content)
        archives[name] = (f"{name}.gz", hashlib.md5(content).hexdigest())
    monkeypatch.setattr(mnist, "ARCHIVES", archives)
    monkeypatch.setattr(mnist, "URL", f"http://127.0.0.1:{server.port}/")
    (tmp_path / "test_labels.gz").write_bytes(gzip.compress(idx(arrays["test_labels"])))
    for _ in range(2):
        MNIST(tmp_path).prepare_data()
        assert len(server.requests) == 3
        check(tmp_path, arrays)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["mnist.npz", "test_labels.gz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": None}, "train_images"),
        (
            {"test_images": np.zeros((4, 32, 32), np.uint8)},
            r"test_images must be uint8 \(N, 28, 28\), found",
        ),
        ({"train_images": np.zeros((10, 28, 28), np.float32)}, "train_images must be uint8"),
        ({"test_labels": np.zeros(5, np.uint8)}, r"test_labels must be integers \(4,\), found uint8 \(5,\)"),
        ({"test_labels": np.zeros(4)}, r"test_labels must be integers \(4,\), found float64"),
        ({"train_labels": np.full(10, 11)}, "train_labels must lie between 0 and 9"),
        ({"train_labels": np.array(10 * [object()])}, "allow_pickle"),
        (
            {"test_images": np.zeros((0, 28, 28), np.uint8), "test_labels": np.zeros(0, np.uint8)},
            "test_labels must be at least one",
        ),
        (
            {"train_images": np.zeros((3, 28, 28), np.uint8), "train_labels": np.zeros(3, np.uint8)},
            "train_labels must be at least one",
        ),
    ],
)
def test_one_file_with_other_content(tmp_path, arrays, change, message):
    np.savez(tmp_path / "mnist.npz", **{name: array for name, array in (arrays | change).items() if array is not None})
    with pytest.raises(UserError, match=message):
        check(tmp_path, arrays)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(idx(np.zeros((4, 28, 28), np.uint8))[:-1]), b"no gzip", gzip.compress(b"")[:-4]],
    ids=["too short", "no gzip", "cut off"],  # not by content, which holds the time
)
def test_damaged_archives(tmp_path, arrays, content):
    for name, (file, _) in mnist.ARCHIVES.items():
        (tmp_path / file).write_bytes(content if name == "train_images" else gzip.compress(idx(arrays[name])))
    with pytest.raises(UserError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        MNIST(tmp_path).prepare_data()
    assert not (tmp_path / "mnist.npz").exists()


@samples.needs("mnist.npz")
@pytest.mark.slow
def test_the_real_data():
    data = MNIST(batch_size=1_000)
    data.prepare_data()
    data.setup()
    assert (len(data.train_dataloader()), len(data.val_dataloader()), len(data.test_dataloader())) == (55, 5, 10)
    batches = itertools.islice(data.train_dataloader(), 10)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    assert np.bincount(labels).min() > 800
    images, labels = next(iter(data.test_dataloader()))
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    one = images[labels == 1].mean(dim=(0, 1))
    assert one.sum(dim=0).max() > 1.5 * one.sum(dim=1).max()  # it stands
    with np.load(data_folder(None, "") / "mnist.npz", allow_pickle=False) as arrays:
        valid = torch.cat([labels for _, labels in data.val_dataloader()])
        np.testing.assert_array_equal(valid, arrays["train_labels"][-5_000:])
