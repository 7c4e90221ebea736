"""Rotated MNIST."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import InMemory
from escnn_attention.training.data.files import Published, check_images, make_from_downloads, npz_file
from escnn_attention.training.data.images.base import PublishedImages

URL = "https://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip"
MD5 = "0f9a947ff3d30e95cd685462cbf3b847"
FILE = "rotmnist.npz"
"""The file that is looked for, and that a download is converted to.

Arrays ``train_images``, ``valid_images``, ``test_images``: (N, 28, 28) uint8, transposed as in the published files;
``train_labels``, ``valid_labels``, ``test_labels``: (N,) integers from 0 to 9.
"""

_ARCHIVE = "mnist_rotation_new.zip"
_TRAIN_MEMBER = "mnist_all_rotation_normalized_float_train_valid.amat"
_TEST_MEMBER = "mnist_all_rotation_normalized_float_test.amat"
_NUM_TRAIN = 10_000  # of the 12,000 in the first file; the other 2,000 validate: the published protocol
_SIZE = 28


class RotMNIST(PublishedImages):
    """Rotated MNIST: 28×28 grey digits, each rotated by an angle of its own.

    10,000 images to train, 2,000 to validate, 50,000 to test: the first 10,000 and the last 2,000 of the published
    training file, and the published test file. Looks for ``rotmnist.npz`` in the folder; if it is not there, the
    published archive is downloaded, verified and converted. Normalised with mean 0.1307 and standard deviation 0.3081.

    Args:
        folder: the folder to look in, and to download into.
        full_train: train on all 12,000 images of the training file. None are left to validate, and the last epoch
            counts.
        **options: of :class:`~.base.PublishedImages`, such as ``batch_size`` and ``rotate_train``.

    Source: Larochelle, Erhan, Courville, Bergstra and Bengio, *An empirical evaluation of deep architectures on
    problems with many factors of variation*, ICML 2007.

    >>> data = RotMNIST(batch_size=8)
    >>> data.in_channels, data.num_classes, data.size
    (1, 10, 28)
    """

    in_channels = 1
    num_classes = 10
    size = _SIZE
    mean = (0.1307,)
    std = (0.3081,)
    files = FILE

    def __init__(self, folder: Path | None = None, full_train: bool = False, **options: Any) -> None:
        super().__init__(folder, **options)
        self.full_train = full_train
        self.validates = not full_train

    def _prepare_folder(self, folder: Path) -> None:
        make_from_downloads(folder / FILE, [Published(_ARCHIVE, URL, MD5)], _convert, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory] | None:
        if not (folder / FILE).exists():
            return None
        files = {part: ("train", "valid") if part == "train" and self.full_train else (part,) for part in parts}
        content = read(folder / FILE, {name for names in files.values() for name in names})
        return {part: _in_memory([content[name] for name in names]) for part, names in files.items()}


def read(
    path: Path, parts: Collection[str] = ("train", "valid", "test")
) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images (N, 28, 28), upright, and labels (N,) of parts of a :data:`FILE`. Nothing in the file is unpickled."""
    content = {}
    with npz_file(path) as arrays:
        for part in parts:
            images = arrays[f"{part}_images"]
            labels = check_images(path, part, images, arrays[f"{part}_labels"], (_SIZE, _SIZE))
            content[part] = np.ascontiguousarray(images.transpose(0, 2, 1)), labels
    return content


def _in_memory(parts: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]) -> InMemory:
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return InMemory(images[:, None], labels)


def _convert(file: IO[bytes], archive: Path) -> None:
    with zipfile.ZipFile(archive) as members:
        with members.open(_TRAIN_MEMBER) as member:
            images, labels = _parse(member)
        with members.open(_TEST_MEMBER) as member:
            test_images, test_labels = _parse(member)
    np.savez_compressed(
        file,
        train_images=images[:_NUM_TRAIN],
        train_labels=labels[:_NUM_TRAIN],
        valid_images=images[_NUM_TRAIN:],
        valid_labels=labels[_NUM_TRAIN:],
        test_images=test_images,
        test_labels=test_labels,
    )


def _parse(file: IO[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """An .amat file: per line 784 pixels between 0 and 1, transposed, and the label."""
    rows = np.loadtxt(file, dtype=np.float32, ndmin=2)
    if rows.shape[1] != _SIZE * _SIZE + 1:
        raise ValueError(f"lines of {rows.shape[1]} numbers, expected {_SIZE * _SIZE + 1}")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    images = np.rint(pixels * 255).clip(0, 255).astype(np.uint8).reshape(-1, _SIZE, _SIZE)
    return images, labels
