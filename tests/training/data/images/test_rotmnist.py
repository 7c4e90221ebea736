import io
import zipfile

import numpy as np
import pytest
import torch

from escnn_attention.equivariance.angles import rotate_images
from escnn_attention.training import RotMNIST
from escnn_attention.training.data.files import data_folder
from escnn_attention.training.data.images import rotmnist
from escnn_attention.training.errors import UserError
from tests import samples

KINDS = ("images", "labels")


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


@pytest.fixture
def serve(monkeypatch, archive, server):
    """Puts ``content`` at the public address of the data."""
    monkeypatch.setattr(rotmnist, "_NUM_TRAIN", 6)

    def start(content=archive):
        url, md5 = server.put("data.zip", content)
        monkeypatch.setattr(rotmnist, "URL", url)
        monkeypatch.setattr(rotmnist, "MD5", md5)

    return start


def check(arrays, folder=None):
    data = RotMNIST(folder)
    data.prepare_data()
    data.setup()
    for part, count in (("train", 6), ("test", 4)):
        images, labels = data.source(part).take(slice(None))
        assert images.shape == (count, 1, 28, 28)
        # The files hold transposed images.
        np.testing.assert_array_equal(images[:, 0].mT, arrays[f"{part}_images"])
        np.testing.assert_array_equal(labels, arrays[f"{part}_labels"])


def test_local_folder(tmp_path, rotmnist_arrays, monkeypatch):
    np.savez(tmp_path / "rotmnist.npz", **rotmnist_arrays)
    check(rotmnist_arrays, tmp_path)
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path))
    check(rotmnist_arrays)


def test_download(tmp_path, rotmnist_arrays, serve, server):
    serve()
    for _ in range(2):
        check(rotmnist_arrays, tmp_path)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["rotmnist.npz"]
    assert len(server.requests) == 1


def test_archive_with_other_content(tmp_path, serve):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as members:
        members.writestr("something.txt", "else")
    serve(content.getvalue())
    with pytest.raises(UserError, match=r"cannot read .*mnist_rotation_new\.zip"):
        RotMNIST(tmp_path).prepare_data()
    assert not (tmp_path / "rotmnist.npz").exists()


def test_file_with_other_content(tmp_path, rotmnist_arrays):
    np.savez(tmp_path / "rotmnist.npz", **(rotmnist_arrays | {"valid_images": np.zeros((3, 32, 32), np.uint8)}))
    with pytest.raises(UserError, match=r"valid_images must be uint8 \(N, 28, 28\)"):
        RotMNIST(tmp_path).setup()


def test_the_published_archive_in_the_folder(tmp_path, rotmnist_arrays, archive, server, monkeypatch):
    monkeypatch.setattr(rotmnist, "_NUM_TRAIN", 6)
    (tmp_path / "mnist_rotation_new.zip").write_bytes(archive)
    check(rotmnist_arrays, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["mnist_rotation_new.zip", "rotmnist.npz"]
    assert server.requests == []


def test_a_damaged_archive_in_the_folder(tmp_path, archive):
    (tmp_path / "mnist_rotation_new.zip").write_bytes(archive[:-30])
    with pytest.raises(UserError, match=r"cannot read .*mnist_rotation_new\.zip"):
        RotMNIST(tmp_path).prepare_data()
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["mnist_rotation_new.zip"]


def test_the_data_module(tmp_path, rotmnist_arrays, serve):
    serve()
    data = RotMNIST(tmp_path, batch_size=6, eval_batch_size=10)
    data.prepare_data()
    data.prepare_data()
    data.setup()
    for loader, part in ((data.val_dataloader(), "valid"), (data.test_dataloader(), "test")):
        ((images, labels),) = loader
        upright = rotmnist_arrays[f"{part}_images"].transpose(0, 2, 1)[:, None] / 255
        np.testing.assert_allclose(images, (upright - 0.1307) / 0.3081, atol=1e-5)
        np.testing.assert_array_equal(labels, rotmnist_arrays[f"{part}_labels"])
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    ((images, labels),) = data.train_dataloader()
    assert sorted(labels.tolist()) == sorted(rotmnist_arrays["train_labels"])


real = samples.needs("rotmnist.npz")


@pytest.mark.sampled(1, of="data sets as they are published")
@real
def test_the_real_data_in_batches():
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


def test_all_images_of_the_training_file_train(tmp_path, rotmnist_arrays):
    np.savez(tmp_path / "rotmnist.npz", **rotmnist_arrays)
    data = RotMNIST(tmp_path, batch_size=3, full_train=True, drop_last=False)
    data.setup("fit")
    images, labels = (torch.cat(parts) for parts in zip(*data.train_dataloader(), strict=True))
    everything = [np.concatenate([rotmnist_arrays[f"{part}_{what}"] for part in ("train", "valid")]) for what in KINDS]
    expected = (everything[0].transpose(0, 2, 1) / 255 - data.mean[0]) / data.std[0]
    found = {(int(label), round(float(image.sum()), 1)) for image, label in zip(images, labels, strict=True)}
    assert found == {
        (int(label), round(float(image.sum()), 1)) for image, label in zip(expected, everything[1], strict=True)
    }
    assert len(labels) == 9
    assert data.val_dataloader() == []
    with pytest.raises(UserError, match="'validate', but all images"):
        data.setup("validate")
    data.setup("test")
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 4
    limited = RotMNIST(tmp_path, batch_size=4, full_train=True, limit_train=8)
    limited.setup()
    assert sum(len(labels) for _, labels in limited.train_dataloader()) == 8
