"""The images that networks are trained and tested on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from escnn_attention.training.download import Progress
from escnn_attention.training.errors import UserError

_SPLIT_SEED = 0  # the split of the digits is part of the data set: it does not change with the seed of a run


@dataclass(frozen=True)
class Split:
    """Images and what they show.

    Attributes:
        images: (N, H, W) float32, from 0 (background) to 1.
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
        name: ``"digits"`` or ``"rotmnist"``.
        train, valid, test: the parts. The validation part is only watched: nothing is selected by it.
        num_classes: number of classes.
        source: where the images come from, for people.
        upright: what an image that is not turned any further is like in this data set, for people.
    """

    name: str
    train: Split
    valid: Split
    test: Split
    num_classes: int
    source: str
    upright: str

    @property
    def size(self) -> int:
        """Side of the square images in pixels."""
        return int(self.train.images.shape[-1])

    def normalisation(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        return float(self.train.images.mean()), float(self.train.images.std())

    def limited(self, train: int | None, test: int | None) -> ImageData:
        """The same data with the first ``train`` training and the first ``test`` test images only."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))

    def fingerprint(self) -> str:
        """A digest of all images and labels: equal for equal data, wherever it was read from."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid, self.test):
            digest.update(repr(part.images.shape).encode())
            digest.update(np.ascontiguousarray(part.images).tobytes())
            digest.update(np.ascontiguousarray(part.labels).tobytes())
        return digest.hexdigest()[:16]


def load_digits(folder: Path | None = None, progress: Progress | None = None) -> ImageData:
    """The 1797 handwritten digits that ship with scikit-learn, 8×8 pixels, 16 grey levels, upright.

    A fixed split, stratified by class: 1000 to train, 197 to validate, 600 to test.

    Args:
        folder: must be ``None``: there is nothing to look for.
        progress: not called: there is nothing to download.

    Raises:
        UserError: a folder was given.
    """
    if folder is not None:
        raise UserError("the digits ship with scikit-learn and are read from no folder: leave --data-dir out")
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    bunch = sklearn_digits()
    images = (bunch.images / 16.0).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    rest, test = train_test_split(np.arange(len(labels)), test_size=600, stratify=labels, random_state=_SPLIT_SEED)
    train, valid = train_test_split(rest, test_size=197, stratify=labels[rest], random_state=_SPLIT_SEED)
    return ImageData(
        name="digits",
        train=Split(images[train], labels[train]),
        valid=Split(images[valid], labels[valid]),
        test=Split(images[test], labels[test]),
        num_classes=10,
        source="scikit-learn's handwritten digits (8×8)",
        upright="upright digits",
    )


def load_data(name: str, folder: Path | None = None, progress: Progress | None = None) -> ImageData:
    """The data set called ``name``.

    Args:
        name: one of :data:`DATA_SETS`.
        folder: the folder to look in, for data that does not ship with a library.
        progress: called while a download runs.

    Raises:
        UserError: an unknown name, or data that cannot be had (see the loader of each data set).
    """
    if name not in DATA_SETS:
        raise UserError(f"unknown data {name!r}: choose one of {', '.join(DATA_SETS)}")
    return DATA_SETS[name](folder, progress)


def _load_rotmnist(folder: Path | None, progress: Progress | None) -> ImageData:
    from escnn_attention.training.rotmnist import load_rotmnist  # imports this module

    return load_rotmnist(folder, progress)


DATA_SETS: dict[str, Callable[[Path | None, Progress | None], ImageData]] = {
    "digits": load_digits,
    "rotmnist": _load_rotmnist,
}
"""The loaders by name."""
