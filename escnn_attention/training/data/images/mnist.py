"""MNIST, upright and rotated."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import InMemory
from escnn_attention.training.data.files import Published, check_array, check_labels, make_from_downloads, npz_file
from escnn_attention.training.data.images.base import PublishedImages

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
ARCHIVES = {
    "train_images": ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train_labels": ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    "test_images": ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    "test_labels": ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
}
"""The published files of each array of MNIST, and their md5 checksums."""
ROTATED = Published(
    "mnist_rotation_new.zip",
    "https://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip",
    "0f9a947ff3d30e95cd685462cbf3b847",
)
"""The published archive of rotated MNIST."""

_NUM_VALID = 5_000  # the last of MNIST's training file
_NUM_TRAIN = 10_000  # of the 12,000 in rotated MNIST's training file; the other 2,000 validate: the published protocol
_SIZE = 28


class MNIST(PublishedImages):
    """MNIST: 28×28 grey digits, upright.

    55,000 images to train, 5,000 to validate, 10,000 to test: the last 5,000 of the published training file validate.
    Looks in the folder for ``mnist.npz``, arrays ``PART_images`` (N, 28, 28) uint8 and ``PART_labels`` (N,) integers
    with ``PART`` = ``train``, ``test``; if it is not there, the published files are downloaded, verified and converted.

    The arguments are those of :class:`~.base.PublishedImages`.

    Source: LeCun, Bottou, Bengio and Haffner, *Gradient-based learning applied to document recognition*, 1998.

    >>> data = MNIST(batch_size=64)
    >>> data.in_channels, data.num_classes, data.size
    (1, 10, 28)
    """

    in_channels = 1
    num_classes = 10
    size = _SIZE
    mean = (0.1307,)
    std = (0.3081,)
    files = "mnist.npz"

    def _prepare_folder(self, folder: Path) -> None:
        archives = [Published(name, URL + name, md5) for name, md5 in ARCHIVES.values()]
        make_from_downloads(folder / self.files, archives, _convert_idx, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        chosen = {"train": slice(-_NUM_VALID), "valid": slice(-_NUM_VALID, None), "test": slice(None)}
        return {
            part: _in_memory(*_arrays(folder / self.files, "test" if part == "test" else "train", chosen[part]))
            for part in parts
        }


class RotMNIST(MNIST):
    """Rotated MNIST: 28×28 grey digits, each rotated by an angle of its own.

    10,000 images to train, 2,000 to validate, 50,000 to test: the first 10,000 and the last 2,000 of the published
    training file, and the published test file. Looks in the folder for ``rotmnist.npz``, arrays ``PART_images``
    (N, 28, 28) uint8, transposed as in the published files, and ``PART_labels`` (N,) integers with ``PART`` =
    ``train``, ``valid``, ``test``; if it is not there, the published archive is downloaded, verified and converted.

    Args:
        full_train: train on all 12,000 images of the training file. None validate, and the last epoch counts.
        folder, options: of :class:`~.base.PublishedImages`, such as ``batch_size`` and ``rotate_train``.

    Source: Larochelle, Erhan, Courville, Bergstra and Bengio, *An empirical evaluation of deep architectures on
    problems with many factors of variation*, ICML 2007.

    >>> data = RotMNIST(batch_size=8)
    >>> data.in_channels, data.num_classes, data.size
    (1, 10, 28)
    """

    files = "rotmnist.npz"

    def __init__(self, folder: Path | None = None, full_train: bool = False, **options: Any) -> None:
        super().__init__(folder, **options)
        self.full_train = full_train
        self.validates = not full_train

    def _prepare_folder(self, folder: Path) -> None:
        make_from_downloads(folder / self.files, [ROTATED], _convert_amat, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        sources = {}
        for part in parts:
            names = ("train", "valid") if part == "train" and self.full_train else (part,)
            content = zip(*(_arrays(folder / self.files, name) for name in names), strict=True)
            images, labels = map(np.concatenate, content)
            sources[part] = _in_memory(np.ascontiguousarray(images.transpose(0, 2, 1)), labels)
        return sources


def _arrays(path: Path, name: str, chosen: slice = slice(None)) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (N, 28, 28), as the file has them, and labels (N,)."""
    with npz_file(path) as arrays:
        images, labels = (arrays[f"{name}_{kind}"][chosen] for kind in ("images", "labels"))
    check_array(path, f"{name}_images", images, "uint8", "N", _SIZE, _SIZE)
    return images, check_labels(path, f"{name}_labels", labels, len(images))


def _in_memory(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> InMemory:
    return InMemory(torch.from_numpy(images)[:, None], torch.from_numpy(labels))


def _convert_idx(file: IO[bytes], *archives: Path) -> None:
    arrays = {}
    for name, archive in zip(ARCHIVES, archives, strict=True):
        content = gzip.decompress(archive.read_bytes())
        # A header of 4 bytes, and 4 for the length of each axis.
        images = name.endswith("images")
        values = np.frombuffer(content, np.uint8, offset=16 if images else 8)
        arrays[name] = values.reshape(-1, _SIZE, _SIZE) if images else values
    np.savez_compressed(file, **arrays)


def _convert_amat(file: IO[bytes], archive: Path) -> None:
    """Files of lines: 784 pixels between 0 and 1, transposed, and the label."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    with zipfile.ZipFile(archive) as members:
        for name in ("train_valid", "test"):
            with members.open(f"mnist_all_rotation_normalized_float_{name}.amat") as member:
                rows = np.loadtxt(member, dtype=np.float32, ndmin=2)
            if rows.shape[1] != _SIZE * _SIZE + 1:
                raise ValueError(f"lines of {rows.shape[1]} numbers, expected {_SIZE * _SIZE + 1}")
            images = np.rint(rows[:, :-1] * 255).clip(0, 255).astype(np.uint8).reshape(-1, _SIZE, _SIZE)
            ends, labels = [] if name == "test" else [_NUM_TRAIN], rows[:, -1].astype(np.int64)
            for part, *of_part in zip(name.split("_"), np.split(images, ends), np.split(labels, ends), strict=True):
                arrays |= zip((f"{part}_images", f"{part}_labels"), of_part, strict=True)
    np.savez_compressed(file, **arrays)
