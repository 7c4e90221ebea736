"""Canvases of several digits."""

import numpy as np
import pytest
import torch

from escnn_attention.training import DigitCanvas
from escnn_attention.training.data.images import canvas, mnist
from escnn_attention.training.data.images.base import rotate_images
from escnn_attention.training.data.images.digits import read
from escnn_attention.training.errors import UserError

FEW = {"num_train": 6, "num_valid": 2, "num_test": 3, "batch_size": 2}


def canvases(part="train", **options):
    data = DigitCanvas(**FEW, **options)
    data.setup()
    return data.source(part)


def test_pixels_have_the_class_of_their_digit():
    source, side = canvases(), 16
    known = {image.tobytes(): int(label) for image, label in zip(*read(side)["train"], strict=True)}
    for pair in zip(source.tensors[0][:, 0], source.tensors[1], strict=True):
        windows, marks = (x.unfold(0, side, 1).unfold(1, side, 1).flatten(0, 1) for x in pair)
        found = [
            (known.get(window.numpy().tobytes()), window, mark) for window, mark in zip(windows, marks, strict=True)
        ]
        found = [(label, window, mark) for label, window, mark in found if label is not None]
        assert len(found) == 3
        for label, window, mark in found:
            assert torch.equal(mark, torch.where(2 * window.long() >= 255, label + 1, 0))


def test_digits_of_mnist_are_cut_and_shrunk_without_aliasing(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "_NUM_VALID", 2)
    stripes = np.full((5, 28, 28), 255, np.uint8)
    stripes[:, 3:25, 3:25:2] = 0
    arrays = {f"{part}_images": stripes for part in ("train", "test")}
    arrays |= {f"{part}_labels": np.full(5, 7) for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **arrays)
    source = canvases(source="mnist", folder=tmp_path)
    digits = source.tensors[0][source.tensors[0] > 0].double()
    assert len(digits) == 6 * 3 * 16**2
    assert abs(digits.mean() - 127.5) < 2
    assert digits.max() < 200  # single pixels would be white
    assert torch.equal(source.tensors[1], torch.where(source.tensors[0][:, 0] >= 128, 8, 0))


def test_canvases_follow_from_the_seed(monkeypatch):
    first, second = canvases(), canvases()
    assert torch.equal(first.tensors[0], second.tensors[0])
    assert torch.equal(first.tensors[1], second.tensors[1])
    monkeypatch.setattr(canvas, "_SEED", 1)
    assert not torch.equal(canvases().tensors[0], first.tensors[0])


def test_test_canvases_are_rotated_with_their_classes():
    upright, rotated = canvases("test"), canvases("test", rotate_test=True)
    assert not torch.equal(upright.tensors[0], rotated.tensors[0])
    assert torch.equal(canvases(rotate_test=True).tensors[0], canvases().tensors[0])
    bright = rotated.tensors[0][:, 0] >= 128
    assert (rotated.tensors[1][bright] > 0).double().mean() > 0.99
    assert not rotated.tensors[1][~bright].any()
    assert (upright.tensors[1][bright] > 0).double().mean() < 0.7


def test_quarter_turns_of_classes_are_those_of_arrays():
    labels = torch.randint(0, 11, (2, 9, 9))
    angles = torch.full((2,), torch.pi / 2, dtype=torch.float64)
    turned = rotate_images(labels[:, None].double(), angles, "nearest")
    assert torch.equal(turned[:, 0].long(), labels.rot90(1, (1, 2)))


def test_what_does_not_fit():
    with pytest.raises(UserError, match="source"):
        DigitCanvas(source="letters")
    with pytest.raises(UserError, match="rotate_train"):
        DigitCanvas(rotate_train=90.0)
    with pytest.raises(UserError, match="num_test"):
        DigitCanvas(num_test=0)
