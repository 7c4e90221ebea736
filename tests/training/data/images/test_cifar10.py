import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from escnn_attention.training import CIFAR10
from escnn_attention.training.data.images import cifar10
from escnn_attention.training.errors import UserError
from tests import samples

MEAN = np.array((0.4914, 0.4822, 0.4465))[:, None, None]
STD = np.array((0.2023, 0.1994, 0.2010))[:, None, None]


@pytest.fixture
def files(monkeypatch):
    """The published files in small: 4 images in each; the label of each image is unlike that of its neighbours."""
    monkeypatch.setattr(cifar10, "_PER_FILE", 4)
    generator = np.random.default_rng(0)
    files = {}
    for number, name in enumerate((*cifar10._TRAIN, *cifar10._TEST)):
        records = generator.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] = (4 * number + np.arange(4)) % 10
        files[name] = records
    return files


def archive(files, folder="cifar-10-batches-bin"):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as members:
        for name, file in {"readme.html": b"<html>"}.items() | {n: r.tobytes() for n, r in files.items()}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(file)
            members.addfile(member, io.BytesIO(file))
    return content.getvalue()


def everything(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def check(folder, files, **options):
    data = CIFAR10(folder, batch_size=4, eval_batch_size=3, **options)
    data.prepare_data()
    data.setup()
    full = options.get("full_train", False)
    names = [*cifar10._TRAIN] if full else [*cifar10._TRAIN[:4]]
    train = np.concatenate([files[name] for name in names])
    images, labels = everything(data.train_dataloader())
    assert len(labels) == len(train)
    assert sorted(labels.tolist()) == sorted(train[:, 0])
    for loader, name in (
        (data.val_dataloader(), "test_batch.bin" if full else "data_batch_5.bin"),
        (data.test_dataloader(), "test_batch.bin"),
    ):
        images, labels = everything(loader)
        pixels = files[name][:, 1:].reshape(4, 3, 32, 32) / 255
        np.testing.assert_allclose(images, (pixels - MEAN) / STD, atol=1e-5)
        np.testing.assert_array_equal(labels, files[name][:, 0])
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("full_train", [False, True])
def test_published_archive(tmp_path, files, full_train):
    (tmp_path / cifar10.ARCHIVE).write_bytes(archive(files))
    check(tmp_path, files, full_train=full_train)
    assert [path.name for path in tmp_path.glob("[!.]*")] == [cifar10.ARCHIVE]
    (tmp_path / "cifar10_jpeg.npz").write_bytes(b"which comes after the original")
    check(tmp_path, files, full_train=full_train)


def test_download(tmp_path, files, server, monkeypatch):
    url, md5 = server.put("cifar.tar.gz", archive(files))
    monkeypatch.setattr(cifar10, "URL", url)
    monkeypatch.setattr(cifar10, "MD5", md5)
    (tmp_path / "cifar-10-batches-py").mkdir()  # the pickled files are of no interest
    check(tmp_path, files)
    assert len(server.requests) == 1
    check(tmp_path, files)
    assert len(server.requests) == 1


def test_augmentation(tmp_path, files):
    (tmp_path / cifar10.ARCHIVE).write_bytes(archive(files))
    seen = {}
    for name, options in {"plain": {}, "augmented": {"augment": True}, "again": {"augment": True}}.items():
        data = CIFAR10(tmp_path, batch_size=16, seed=3, **options)
        data.setup()
        loader = data.train_dataloader()
        seen[name] = []
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            seen[name].append(next(iter(loader)))
        seen[f"{name} test"] = next(iter(data.test_dataloader()))[0]
    for epoch in (0, 1):
        assert torch.equal(seen["plain"][epoch][1], seen["augmented"][epoch][1])
        assert not torch.equal(seen["plain"][epoch][0], seen["augmented"][epoch][0])
        assert torch.equal(seen["again"][epoch][0], seen["augmented"][epoch][0])
    assert torch.equal(seen["plain test"], seen["augmented test"])
    # An image of the first epoch looks otherwise in the second, plain ones do not.
    for name, same in (("plain", True), ("augmented", False)):
        first, second = ({int(label): image for image, label in zip(*batch, strict=True)} for batch in seen[name])
        assert all(torch.equal(first[label], second[label]) for label in (6, 7, 8, 9)) == same  # there is one of each
    # What comes in from outside is black.
    black = torch.from_numpy((0 - MEAN) / STD).float()
    assert (seen["augmented"][0][0] == black).all(dim=1).any()


def written(size, colour=0, kind="JPEG"):
    """The file of an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind, quality=95)
    return file.getvalue()


@pytest.fixture
def jpeg_arrays(monkeypatch):
    """30 images to train, 5 of them to validate, and 20 to test, class by class; each is of one colour."""
    monkeypatch.setattr(cifar10, "_PER_FILE", 5)
    arrays = {}
    for part, count in (("train", 30), ("test", 20)):
        labels = np.arange(count, dtype=np.uint8) * 10 // count
        files = []
        for number in range(count):
            files.append(written((32, 32), (8 * number, 100, 200)))
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, files)])
        arrays[f"{part}_labels"] = labels
    return arrays


def numbers(images):
    """The numbers of the images, from their colours."""
    return np.rint((images.numpy() * STD + MEAN)[:, 0].mean(axis=(1, 2)) * 255 / 8).astype(int)


@pytest.mark.parametrize("full_train", [False, True])
def test_jpeg(tmp_path, jpeg_arrays, full_train):
    np.savez(tmp_path / "cifar10_jpeg.npz", **jpeg_arrays)
    data = CIFAR10(tmp_path, batch_size=5, full_train=full_train)
    data.prepare_data()
    data.setup()
    found = {}
    for part, loader in (
        ("train", data.train_dataloader()),
        ("valid", data.val_dataloader()),
        ("test", data.test_dataloader()),
    ):
        images, labels = everything(loader)
        found[part] = numbers(images)
        file = "test" if part == "test" or (part == "valid" and full_train) else "train"
        np.testing.assert_array_equal(labels, jpeg_arrays[f"{file}_labels"][found[part]])
        np.testing.assert_allclose((images.numpy() * STD + MEAN)[:, 2] * 255, 200, atol=4)
    assert sorted(found["test"]) == list(range(20))
    if full_train:
        assert sorted(found["train"]) == list(range(30))
        assert sorted(found["valid"]) == list(range(20))
    else:
        assert sorted([*found["train"], *found["valid"]]) == list(range(30))
        assert len(found["valid"]) == 5


def test_few_jpeg_images_are_of_several_classes(tmp_path, jpeg_arrays):
    np.savez(tmp_path / "cifar10_jpeg.npz", **jpeg_arrays)
    whole = CIFAR10(tmp_path, batch_size=1)
    whole.setup()
    few = CIFAR10(tmp_path, batch_size=1, limit_train=8, limit_valid=2, limit_test=8)
    few.setup()
    for name, count in (("val", 2), ("test", 8)):
        loaders = (getattr(data, f"{name}_dataloader")() for data in (few, whole))
        (images, labels), (all_images, all_labels) = map(everything, loaders)
        assert torch.equal(images, all_images[:count])
        assert torch.equal(labels, all_labels[:count])
    assert len(set(everything(few.train_dataloader())[1].tolist())) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_jpeg": None}, "train_jpeg"),
        ({"train_jpeg": np.zeros((3, 4), np.uint8)}, r"train_jpeg must be uint8 \(N,\), found uint8 \(3, 4\)"),
        ({"train_offsets": np.arange(5)}, r"train_offsets must be integers \(31,\), found int64 \(5,\)"),
        ({"train_offsets": np.arange(31)}, "train_offsets must grow from 0 to"),
        ({"train_labels": np.full(30, 10)}, "train_labels must lie between 0 and 9"),
        ({"train_labels": np.int64(3)}, r"train_labels must be integers \(1,\), found int64 \(\)"),
        ({"train_labels": np.array(30 * [object()])}, "allow_pickle"),
        ({"train_jpeg": np.array(30 * [object()])}, "allow_pickle"),
    ],
)
def test_jpeg_file_with_other_content(tmp_path, jpeg_arrays, change, message):
    arrays = {name: array for name, array in (jpeg_arrays | change).items() if array is not None}
    np.savez(tmp_path / "cifar10_jpeg.npz", **arrays)
    with pytest.raises(UserError, match=message):
        CIFAR10(tmp_path).setup()


def test_jpeg_images_that_are_none(tmp_path, jpeg_arrays):
    def replaced(content):
        first = jpeg_arrays["train_offsets"][1]
        jpeg = np.concatenate([np.frombuffer(content, np.uint8), jpeg_arrays["train_jpeg"][first:]])
        offsets = np.concatenate([[0], jpeg_arrays["train_offsets"][1:] + len(content) - first])
        return {"train_jpeg": jpeg, "train_offsets": offsets}

    whole = jpeg_arrays["train_jpeg"][: jpeg_arrays["train_offsets"][1]].tobytes()
    for content, message in (
        (written((8, 9)), "image 0 is 8×9, expected 32×32"),
        (written((32, 32), kind="PNG"), "cannot identify"),
        (b"nothing", "cannot identify"),
        (whole[:-100], "(?i:truncated)"),
    ):
        np.savez(tmp_path / "cifar10_jpeg.npz", **(jpeg_arrays | replaced(content)))
        with pytest.raises(UserError, match=rf"cannot read .*cifar10_jpeg\.npz: .*{message}"):
            CIFAR10(tmp_path).setup()


def test_damaged_files(tmp_path, files):
    whole = files["data_batch_2.bin"].tobytes()
    for damaged, message in (
        (whole[:-1], f"{4 * 3073 - 1} bytes, expected 4 images of 3073 bytes"),
        (whole[:-3073], f"{3 * 3073} bytes"),
        (b"", "0 bytes"),
        (b"\x0a" + whole[1:], "labels must lie between 0 and 9"),
    ):
        content = files | {"data_batch_2.bin": np.frombuffer(damaged, np.uint8)}
        (tmp_path / cifar10.ARCHIVE).write_bytes(archive(content))
        with pytest.raises(UserError, match=rf"data_batch_2\.bin: {message}"):
            CIFAR10(tmp_path).setup("fit")


def test_damaged_archive(tmp_path, files):
    path = tmp_path / cifar10.ARCHIVE
    whole = archive(files)
    for damaged in (whole[: len(whole) // 2], b"", b"no archive", whole[:1000] + b"x" + whole[1001:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*cifar-10-binary\.tar\.gz"):
            CIFAR10(tmp_path).setup("fit")
    for other in (archive({}), archive(files, folder="elsewhere")):
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"data_batch_1\.bin.* not in it"):
            CIFAR10(tmp_path).setup("fit")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["elsewhere", "to itself"])
def test_members_that_are_links_are_not_followed(tmp_path, files, kind):
    content = io.BytesIO()
    (tmp_path / "secret").write_bytes(files["data_batch_1.bin"].tobytes())
    with tarfile.open(fileobj=content, mode="w:gz") as members:
        for name in files:
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.type = kind
            member.linkname = str(tmp_path / "secret") if kind == tarfile.SYMTYPE else member.name
            members.addfile(member)
    (tmp_path / cifar10.ARCHIVE).write_bytes(content.getvalue())
    with pytest.raises(UserError, match=r"cannot read .*cifar-10-binary\.tar\.gz") as caught:
        CIFAR10(tmp_path).setup("fit")
    assert "\n" not in str(caught.value)


@pytest.mark.sampled(1, of="data sets as they are published")
@samples.needs("cifar10_jpeg.npz")
def test_the_real_data():
    data = CIFAR10(batch_size=1_000, limit_train=2_000, limit_valid=1_000, limit_test=1_000)
    data.prepare_data()
    data.setup()
    images, labels = everything(data.train_dataloader())
    assert images.shape == (2_000, 3, 32, 32)
    assert (np.bincount(labels) > 150).all()
    pixels = images.numpy() * STD + MEAN
    np.testing.assert_allclose(pixels.mean(axis=(0, 2, 3)), MEAN.ravel(), atol=0.02)
    np.testing.assert_allclose(pixels.std(axis=(0, 2, 3)), (0.2470, 0.2435, 0.2616), atol=0.02)
    for loader in (data.val_dataloader(), data.test_dataloader()):
        ((images, labels),) = loader
        assert (np.bincount(labels) > 60).all()
    # Above there is sky, in pictures of aeroplanes (0) and of ships (8).
    sky = images[(labels == 0) | (labels == 8)].numpy() * STD + MEAN
    assert sky[:, 2, :8].mean() > sky[:, 0, :8].mean() + 0.02
    assert sky[:, :, :8].mean() > sky[:, :, -8:].mean() + 0.05
