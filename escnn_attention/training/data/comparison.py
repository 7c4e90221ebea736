"""The images of the comparison (`escnn-attention compare`), whole and in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from escnn_attention.training.data.download import Progress
from escnn_attention.training.data.folder import data_folder
from escnn_attention.training.data.rotmnist import FILE, fetch, read
from escnn_attention.training.errors import UserError
from escnn_attention.training.images import ImageData, Split

_SPLIT_SEED = 0  # the split of the digits is part of the data set: it does not change with the seed of a run
_FOLDER_OPTION = "--data-dir"


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


def load_rotmnist(folder: Path | None = None, progress: Progress | None = None) -> ImageData:
    """Rotated MNIST: 10,000 images to train, 2,000 to validate, 50,000 to test, 28×28, each turned by a random angle.

    Looks for ``rotmnist.npz`` in ``folder``. If it is not there, the published archive is downloaded, verified and
    converted, and ``rotmnist.npz`` is kept in the folder for the next time.

    Args:
        folder: an existing folder; by default ``$ESCNN_ATTENTION_DATA`` or ``~/.cache/escnn-attention``.
        progress: called while the download runs.

    Raises:
        UserError: the folder does not exist or cannot be written, the download fails or has another checksum, or the
            file does not hold what it should.
    """
    path = data_folder(folder, FILE, _FOLDER_OPTION) / FILE
    fetch(path, progress, option=_FOLDER_OPTION)
    parts = {
        part: Split(images.astype(np.float32) / np.float32(255), labels)
        for part, (images, labels) in read(path).items()
    }
    return ImageData(
        name="rotmnist",
        train=parts["train"],
        valid=parts["valid"],
        test=parts["test"],
        num_classes=10,
        source=f"rotated MNIST (28×28) from {path}",
        upright="images as the data set gives them, which are turned already",
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


DATA_SETS: dict[str, Callable[[Path | None, Progress | None], ImageData]] = {
    "digits": load_digits,
    "rotmnist": load_rotmnist,
}
"""The loaders by name."""
