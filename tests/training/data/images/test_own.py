"""Images of a user's own, in a folder or a file, are taken as the network was trained, or refused in one line."""

import numpy as np
import pytest
import torch
from PIL import Image

from escnn_attention.training import CIFAR10, Digits
from escnn_attention.training.data.images.own import OwnImages
from escnn_attention.training.errors import UserError

GREY = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)


def read(path, trained_on):
    data = OwnImages(path, trained_on)
    data.setup("predict")
    images, labels = zip(*data.predict_dataloader(), strict=True)
    return torch.cat(images), None if labels[0] is None else torch.cat(labels).tolist(), data.names


def normalised(pixels, data):
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return (torch.from_numpy(pixels / np.float32(255)) - mean) / std


def test_a_file(tmp_path):
    """White is 1 before normalisation, also where the data of the training counts 16 levels."""
    data = Digits(batch_size=2)
    expected = normalised(GREY[:, None], data)
    for name, arrays in {
        "bytes": {"images": GREY},
        "channels": {"images": GREY[:, None], "labels": np.array([3, 1, 4, 1, 5], dtype=np.int32)},
        "numbers": {"images": GREY / 255},
    }.items():
        np.savez(tmp_path / name, **arrays)
        images, labels, names = read(tmp_path / f"{name}.npz", data)
        torch.testing.assert_close(images, expected)
        assert labels == ([3, 1, 4, 1, 5] if name == "channels" else None)
        assert names is None


def test_a_folder(tmp_path):
    for name, image in zip(("b.png", "a.PNG", "c.bmp"), GREY, strict=False):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    data = Digits()
    images, labels, names = read(tmp_path, data)
    assert (labels, names) == (None, ["a.PNG", "b.png", "c.bmp"])
    torch.testing.assert_close(images, normalised(GREY[[1, 0, 2], None], data))
    for name in names:  # in folders that are named by their labels
        label = tmp_path / str(ord(name[0]) - ord("a") + 1)
        label.mkdir()
        (tmp_path / name).rename(label / name)
    again, labels, names = read(tmp_path, data)
    assert (labels, names) == ([1, 2, 3], ["1/a.PNG", "2/b.png", "3/c.bmp"])
    assert torch.equal(again, images)


def test_colours(tmp_path):
    colours = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for i, image in enumerate(colours):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    data = CIFAR10(batch_size=4)
    images, _, _ = read(tmp_path, data)
    torch.testing.assert_close(images, normalised(colours.transpose(0, 3, 1, 2), data))


def test_what_a_camera_has_written(tmp_path):
    """It says how the pixels are turned, 6: the first row is the right side."""
    turn = Image.Exif()
    turn[0x0112] = 6
    Image.fromarray(GREY[0]).save(tmp_path / "a.png", exif=turn)
    data = Digits()
    images, _, _ = read(tmp_path, data)
    torch.testing.assert_close(images[0], normalised(np.rot90(GREY[0], -1)[None].copy(), data))


def folder_of(image, tmp_path, **options):
    (tmp_path / "mine").mkdir()
    image.save(tmp_path / "mine" / "x.png", **options)
    return tmp_path / "mine"


def file_of(tmp_path, **arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    return tmp_path / "mine.npz"


def text(tmp_path, name="mine.npz"):
    (tmp_path / name).write_text("text")
    return tmp_path / name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none", "there is no .*none"),
        (lambda path: path, "holds no images"),
        (lambda path: text(path).rename(path / "x.png").parent, r"cannot read .*x\.png"),
        (lambda path: folder_of(Image.new("L", (8, 9)), path), r"x\.png has 9×8 pixels, needed 8×8"),
        (lambda path: folder_of(Image.new("I;16", (8, 8)), path), r"x\.png has the mode I;16, needed one of"),
        (lambda path: folder_of(Image.new("RGBA", (8, 8)), path), r"x\.png has the mode RGBA, needed one of"),
        (lambda path: folder_of(Image.new("P", (8, 8)), path, transparency=0), r"the mode P with transparency, needed"),
        (text, r"cannot read .*mine\.npz: .*Needed a folder or an \.npz file"),
        (lambda path: file_of(path, pictures=GREY), "has no array `images`"),
        (lambda path: file_of(path, images=np.array([{}])), r"cannot read .*mine\.npz"),
        (lambda path: file_of(path, images=GREY[:, :7]), r"has images \(5, 7, 8\), needed \(N, 1, 8, 8\)"),
        (lambda path: file_of(path, images=GREY[:0]), r"has images \(0, 8, 8\), needed"),
        (lambda path: file_of(path, images=GREY.astype(float)), "has images from .*, needed uint8 from 0 to 255"),
        (lambda path: file_of(path, images=np.full((1, 8, 8), np.nan)), "has images from nan to nan, needed uint8"),
        (lambda path: file_of(path, images=GREY.astype(int)), "has images of int64, needed uint8"),
        (lambda path: file_of(path, images=GREY, labels=np.arange(4)), r"labels must be integers \(5,\), found"),
        (lambda path: file_of(path, images=GREY, labels=np.arange(5) + 6), "must lie between 0 and 9, found 6 to 10"),
        (lambda path: file_of(path, images=GREY, labels=np.arange(5) - 1), "must lie between 0 and 9, found -1 to 3"),
    ],
)
def test_what_is_refused(tmp_path, make, message):
    with pytest.raises(UserError, match=f"^--images: .*{message}") as caught:
        read(make(tmp_path), Digits())
    assert "\n" not in str(caught.value)
