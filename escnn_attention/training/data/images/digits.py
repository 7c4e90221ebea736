"""The handwritten digits that ship with scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.images.batches import ImagesInMemory
from escnn_attention.training.data.images.published import PublishedImages

LEVELS = 16
"""The value of a white pixel."""

_SPLIT_SEED = 0  # the split is part of the data set: it does not change with the seed of a run


class Digits(PublishedImages):
    """The 1797 handwritten digits that ship with scikit-learn, 8×8 pixels, 16 grey levels, upright.

    A fixed split, stratified by class: 1000 to train, 197 to validate, 600 to test. Nothing is looked for in a folder.
    Normalised with mean 0.3053 and standard deviation 0.3757.

    The arguments are those of :class:`~.published.PublishedImages`.

    Source: Alpaydin and Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository, 1998.

    >>> data = Digits(batch_size=8)
    >>> data.in_channels, data.num_classes, data.size
    (1, 10, 8)
    """

    in_channels = 1
    num_classes = 10
    size = 8
    white = LEVELS
    mean = (0.3053,)
    std = (0.3757,)
    files = "no file"

    def _prepare(self) -> None:
        """Nothing is kept in files."""

    def _prepare_folder(self, folder: Path) -> None:
        """Nothing is kept in files."""

    def _folder(self) -> Path:
        return Path()  # nothing is looked for in it

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, ImagesInMemory]:
        content = read()
        return {
            part: ImagesInMemory(torch.from_numpy(images)[:, None], torch.from_numpy(labels))
            for part, (images, labels) in content.items()
            if part in parts
        }


def read() -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images (N, 8, 8), from 0 to :data:`LEVELS`, and labels (N,) of each part."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    rest, test = train_test_split(np.arange(len(labels)), test_size=600, stratify=labels, random_state=_SPLIT_SEED)
    train, valid = train_test_split(rest, test_size=197, stratify=labels[rest], random_state=_SPLIT_SEED)
    return {
        part: (images[chosen], labels[chosen]) for part, chosen in (("train", train), ("valid", valid), ("test", test))
    }
