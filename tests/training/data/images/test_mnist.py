import gzip
import hashlib
import io
import itertools
import struct
import zipfile

import numpy as np
import pytest
import torch

from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.training import MNIST, RotMNIST
from escnn_attention.training.data.files import Published, data_folder
from escnn_attention.training.data.images import mnist
from escnn_attention.training.errors import UserError
from tests import samples

KINDS = ("images", "labels")


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
        ({"test_images": np.zeros((4, 32, 32), np.uint8)}, r"test_images must be uint8 \(N, 28, 28\), found"),
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


@pytest.fixture
def archive(rotmnist_arrays):
    """The published archive in small: 6 images to train, 3 to validate, 4 to test."""

    def amat(*parts):
        text = io.BytesIO()
        images = np.concatenate([rotmnist_arrays[f"{part}_images"] for part in parts])
        labels = np.concatenate([rotmnist_arrays[f"{part}_labels"] for part in parts])
        np.savetxt(text, np.column_stack([images.reshape(len(images), -1) / 255, labels]), fmt="%.6f")
        return text.getvalue()

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("mnist_all_rotation_normalized_float_train_valid.amat", amat("train", "valid"))
        members.writestr("mnist_all_rotation_normalized_float_test.amat", amat("test"))
    return content.getvalue()


def check_rotated(arrays, folder=None):
    data = RotMNIST(folder, batch_size=6, eval_batch_size=10)
    data.prepare_data()
    data.setup()
    # The files hold transposed images.
    for loader, part in ((data.val_dataloader(), "valid"), (data.test_dataloader(), "test")):
        ((images, labels),) = loader
        upright = arrays[f"{part}_images"].transpose(0, 2, 1)[:, None] / 255
        np.testing.assert_allclose(images, (upright - 0.1307) / 0.3081, atol=1e-5)
        np.testing.assert_array_equal(labels, arrays[f"{part}_labels"])
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    ((_, labels),) = data.train_dataloader()
    assert sorted(labels.tolist()) == sorted(arrays["train_labels"])
    images, labels = data.source("train").take(slice(None))
    np.testing.assert_array_equal(images[:, 0].mT, arrays["train_images"])
    np.testing.assert_array_equal(labels, arrays["train_labels"])


def test_rotated_in_a_local_folder(tmp_path, rotmnist_arrays, monkeypatch):
    np.savez(tmp_path / "rotmnist.npz", **rotmnist_arrays)
    check_rotated(rotmnist_arrays, tmp_path)
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path))
    check_rotated(rotmnist_arrays)


@pytest.mark.parametrize("there", [True, False])
def test_the_published_archive_of_rotated(tmp_path, rotmnist_arrays, archive, server, monkeypatch, there):
    monkeypatch.setattr(mnist, "_NUM_TRAIN", 6)
    monkeypatch.setattr(mnist, "ROTATED", Published("mnist_rotation_new.zip", *server.put("data.zip", archive)))
    if there:
        (tmp_path / "mnist_rotation_new.zip").write_bytes(archive)
    for _ in range(2):
        check_rotated(rotmnist_arrays, tmp_path)
    kept = ["mnist_rotation_new.zip"] if there else []  # what was downloaded is not
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [*kept, "rotmnist.npz"]
    assert len(server.requests) == (not there)


def test_rotated_with_other_content(tmp_path, rotmnist_arrays):
    np.savez(tmp_path / "rotmnist.npz", **(rotmnist_arrays | {"valid_images": np.zeros((3, 32, 32), np.uint8)}))
    with pytest.raises(UserError, match=r"valid_images must be uint8 \(N, 28, 28\)"):
        RotMNIST(tmp_path).setup()


def test_archives_of_rotated_with_other_content(tmp_path, archive):
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as members:
        members.writestr("something.txt", "else")
    for content in (archive[:-30], other.getvalue()):
        (tmp_path / "mnist_rotation_new.zip").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*mnist_rotation_new\.zip"):
            RotMNIST(tmp_path).prepare_data()
        assert [path.name for path in tmp_path.glob("[!.]*")] == ["mnist_rotation_new.zip"]


real = samples.needs("rotmnist.npz")


@pytest.mark.sampled(1, of="data sets as they are published")
@real
def test_the_real_rotated_data_in_batches():
    data = RotMNIST(batch_size=1_000)
    data.setup()
    assert (len(data.train_dataloader()), len(data.val_dataloader()), len(data.test_dataloader())) == (10, 2, 50)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (1_000, 1, 28, 28)
    assert abs(images.mean()) < 0.05
    assert 0.85 < images.std() < 1.05
    assert np.bincount(labels).min() > 60
    assert len(np.bincount(labels)) == 10


@real
@pytest.mark.slow
def test_turned_back_the_real_digits_are_upright():
    with np.load(data_folder(None, "") / "rotmnist.npz", allow_pickle=False) as arrays:
        if "test_angles" not in arrays:
            pytest.skip("this rotmnist.npz does not say by which angles its digits were turned")
        angles = arrays["test_angles"][:1000].astype(np.float64)
    data = RotMNIST()
    data.setup("test")
    images, labels = data.source("test").take(slice(1000))
    shown = images[:, 0].float().numpy() / 255
    turned_back = torch.stack(
        [rotate_images(torch.from_numpy(x), -a) for x, a in zip(shown, angles, strict=True)]
    ).numpy()
    one, two = (turned_back[labels == digit].mean(axis=0) for digit in (1, 2))
    # A one stands; a two has its corners at the lower left and at the upper right.
    assert np.argmax(one.sum(axis=0)) in (13, 14)
    assert one.sum(axis=0).max() > 1.5 * one.sum(axis=1).max()
    assert two[6:10, 15:20].sum() + two[18:22, 8:13].sum() > 1.3 * (two[6:10, 8:13].sum() + two[18:22, 15:20].sum())
    # The controls: as the file has them, and as they are turned.
    for images in (turned_back.transpose(0, 2, 1), shown):
        control = images[labels == 1].mean(axis=0)
        assert control.sum(axis=0).max() < 1.5 * control.sum(axis=1).max()


def test_all_images_of_the_training_file_of_rotated_train(tmp_path, rotmnist_arrays):
    np.savez(tmp_path / "rotmnist.npz", **rotmnist_arrays)
    data = RotMNIST(tmp_path, batch_size=3, full_train=True, drop_last=False)
    data.setup("fit")
    for found, what in zip(data.source("train").take(slice(None)), KINDS, strict=True):
        everything = np.concatenate([rotmnist_arrays[f"{part}_{what}"] for part in ("train", "valid")])
        np.testing.assert_array_equal(found[:, 0].mT if what == "images" else found, everything)
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 9
    assert data.val_dataloader() == []
    with pytest.raises(UserError, match="'validate', but all images"):
        data.setup("validate")
    data.setup("test")
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 4
    limited = RotMNIST(tmp_path, batch_size=4, full_train=True, limit_train=8)
    limited.setup()
    assert sum(len(labels) for _, labels in limited.train_dataloader()) == 8
