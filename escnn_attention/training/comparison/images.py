"""The images of the comparison: what is trained on, as an experiment's data, and what is measured, in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.training.data.files import data_folder
from escnn_attention.training.data.images import digits, rotmnist
from escnn_attention.training.errors import UserError

_DIGITS_SIZE = 16  # on the published 8×8 pixels, a rotation by 45° loses most of what tells digits apart


@dataclass(frozen=True)
class Split:
    """Images and what they show.

    Attributes:
        images: (N, S, S) float32, from 0 (background) to 1.
        labels: (N,) int64.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        """The first ``count`` images (all of them for ``None``)."""
        return Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class ImageData:
    """A data set with its three parts.

    Attributes:
        data_module: the import path of the data module that trains on the same images.
        options: of the data module, to read these.
        train, valid, test: the parts. The validation part is only watched: nothing is selected by it.
        source: where the images come from, for people.
        upright: what an image that is not rotated any further is like in this data set, for people.
    """

    data_module: str
    options: Mapping[str, Any]
    train: Split
    valid: Split
    test: Split
    source: str
    upright: str
    num_classes: int = 10

    @property
    def size(self) -> int:
        """Side of the square images in pixels."""
        return int(self.train.images.shape[-1])

    def normalisation(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        return float(self.train.images.mean()), float(self.train.images.std())

    def normalised(self, images: npt.NDArray[np.float32]) -> Tensor:
        """Images (N, S, S) as a network takes them, (N, 1, S, S)."""
        mean, deviation = self.normalisation()
        return (torch.from_numpy(images)[:, None] - mean) / deviation

    def limited(self, train: int | None, test: int | None) -> ImageData:
        """The data with the first ``train`` training and the first ``test`` test images only."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))

    def describe(self, batch_size: int) -> dict[str, Any]:
        """The data of an experiment, as a configuration file has it: every image in every epoch, normalised."""
        mean, deviation = self.normalisation()
        options: dict[str, Any] = {"batch_size": batch_size, "eval_batch_size": 4 * batch_size, "drop_last": False}
        options |= {"limit_train": len(self.train), "mean": [mean], "std": [deviation]}
        return {"class_path": self.data_module, "init_args": {**self.options, **options}}

    def fingerprint(self) -> str:
        """A digest of all images and labels: equal for equal data, wherever it was read from."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid, self.test):
            digest.update(repr(part.images.shape).encode())
            digest.update(np.ascontiguousarray(part.images).tobytes())
            digest.update(np.ascontiguousarray(part.labels).tobytes())
        return digest.hexdigest()[:16]


def load_images(name: str, folder: Path | None = None) -> ImageData:
    """The data set called ``name``.

    Args:
        name: ``"digits"``, which ship with scikit-learn, or ``"rotmnist"``, which is looked for in the folder and
            downloaded into it where it is not there.
        folder: an existing folder, for ``"rotmnist"``; by default ``$ESCNN_ATTENTION_DATA`` or
            ``~/.cache/escnn-attention``.

    Raises:
        UserError: an unknown name, a folder for the digits, a folder that does not exist or cannot be written, a
            download that fails or has another checksum, or a file that does not hold what it should.
    """
    if name not in _LOADERS:
        raise UserError(f"unknown data {name!r}: choose one of {', '.join(_LOADERS)}")
    return _LOADERS[name](folder)


def _digits(folder: Path | None) -> ImageData:
    if folder is not None:
        raise UserError("the digits ship with scikit-learn and are read from no folder: leave --data-dir out")
    return ImageData(
        data_module="escnn_attention.training.Digits",
        options={"size": _DIGITS_SIZE},
        **_splits(digits.read(_DIGITS_SIZE), digits.white(_DIGITS_SIZE)),
        source=f"scikit-learn's handwritten digits (8×8), as splines on {_DIGITS_SIZE}×{_DIGITS_SIZE} pixels",
        upright="upright digits",
    )


def _rotmnist(folder: Path | None) -> ImageData:
    path = data_folder(folder, rotmnist.FILE) / rotmnist.FILE
    rotmnist.RotMNIST(path.parent).prepare_data()
    return ImageData(
        data_module="escnn_attention.training.RotMNIST",
        options={"folder": str(path.parent)},
        **_splits(rotmnist.read(path), 255),
        source=f"rotated MNIST (28×28) from {path}",
        upright="images as the data set gives them, which are rotated already",
    )


_LOADERS: dict[str, Callable[[Path | None], ImageData]] = {"digits": _digits, "rotmnist": _rotmnist}


def _splits(parts: Mapping[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]], white: int) -> dict[str, Any]:
    return {
        part: Split(images.astype(np.float32) / np.float32(white), labels) for part, (images, labels) in parts.items()
    }
