"""The images that networks are trained and tested on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from escnn_attention.training.download import Progress
from escnn_attention.training.errors import UserError
from escnn_attention.training.images import ImageData, Split
from escnn_attention.training.rotmnist import load_rotmnist

_SPLIT_SEED = 0  # the split of the digits is part of the data set: it does not change with the seed of a run


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


DATA_SETS: dict[str, Callable[[Path | None, Progress | None], ImageData]] = {
    "digits": load_digits,
    "rotmnist": load_rotmnist,
}
"""The loaders by name."""
