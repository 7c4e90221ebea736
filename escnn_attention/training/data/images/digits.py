"""The handwritten digits that ship with scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage

from escnn_attention.training.data.base import InMemory, in_range
from escnn_attention.training.data.images.base import PublishedImages

SIZE = 8
"""The side of the images as they are published."""

_SPLIT_SEED = 0  # the split is part of the data set: it does not change with the seed of a run


class Digits(PublishedImages):
    """The 1797 handwritten digits that ship with scikit-learn, 8×8 pixels, 16 grey levels, upright.

    A fixed split, stratified by class: 1000 to train, 197 to validate, 600 to test. Nothing is looked for in a folder.

    Args:
        size: the side of the images in pixels, 8 or more: of the cubic spline through the published pixels, 256 grey
            levels where it is more. A rotation by an angle that does not keep the pixels loses less on a finer grid.
        **options: of :class:`~.base.PublishedImages`.

    Raises:
        UserError: ``size`` is less than 8, or as :class:`~.base.PublishedImages` raises.

    Source: Alpaydin and Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository, 1998.

    >>> data = Digits(batch_size=8)
    >>> data.in_channels, data.num_classes, data.size
    (1, 10, 8)
    >>> data = Digits(16, batch_size=8)
    >>> data.setup("fit")
    >>> next(iter(data.train_dataloader()))[0].shape
    torch.Size([8, 1, 16, 16])
    """

    in_channels = 1
    num_classes = 10
    size = SIZE
    mean = (0.3053,)
    std = (0.3757,)
    files = "no file"

    def __init__(self, size: int = SIZE, **options: Any) -> None:
        super().__init__(**options)
        in_range(SIZE, size=size)
        self.size = size
        self.white = white(size)

    def _prepare_folder(self, folder: Path) -> None:
        """Nothing is kept in files."""

    def _folder(self) -> Path:
        return Path()  # nothing is looked for in it

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        content = {part: map(torch.from_numpy, arrays) for part, arrays in read(self.size).items() if part in parts}
        return {part: InMemory(images[:, None], labels) for part, (images, labels) in content.items()}


def white(size: int) -> int:
    """The value of a white pixel in images of ``size`` × ``size``."""
    return 16 if size == SIZE else 255


def read(size: int = SIZE) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images (N, ``size``, ``size``), from 0 to :func:`white`, and labels (N,) of each part."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, SIZE, SIZE), labels.astype(np.int64)
    if size != SIZE:
        # Pixels are squares of a grid that keeps its outer border, with zeros beyond it. A spline is linear in the
        # pixels and separable: its values for unit vectors determine it.
        along = ndimage.zoom(np.eye(SIZE), (size / SIZE, 1), order=3, mode="grid-constant", grid_mode=True)
        images = along @ images @ along.T
    images = np.rint(images * (white(size) / white(SIZE))).clip(0, white(size)).astype(np.uint8)
    rest, test = train_test_split(np.arange(len(labels)), test_size=600, stratify=labels, random_state=_SPLIT_SEED)
    train, valid = train_test_split(rest, test_size=197, stratify=labels[rest], random_state=_SPLIT_SEED)
    return {part: (images[at], labels[at]) for part, at in (("train", train), ("valid", valid), ("test", test))}
