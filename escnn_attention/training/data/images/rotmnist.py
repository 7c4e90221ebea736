"""Rotated MNIST."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.images.batches import ImagesInMemory
from escnn_attention.training.data.images.published import PublishedImages
from escnn_attention.training.data.storage.arrays import check_images, npz_file
from escnn_attention.training.data.storage.download import Progress, download, report_progress
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file
from escnn_attention.training.locking import locked

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
        full_train: train on all 12,000 images of the training file, as one does once everything is chosen. None are
            left to validate, and the last epoch counts.
        **options: ``batch_size``, ``seed``, ``num_workers``, ``limit_train``, ``limit_valid``, ``limit_test``,
            ``eval_batch_size``, ``download``, ``drop_last``, ``mean``, ``std``, ``rotate_train``: see
            :class:`~.published.PublishedImages`.

    In a configuration file::

        data:
          class_path: escnn_attention.training.RotMNIST
          init_args:
            batch_size: 8

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
        if self.download:
            fetch(folder / FILE, report_progress(_ARCHIVE), option="`folder`")

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, ImagesInMemory] | None:
        if not (folder / FILE).exists():
            return None
        files = {part: ("train", "valid") if part == "train" and self.full_train else (part,) for part in parts}
        content = read(folder / FILE, {name for names in files.values() for name in names})
        return {part: _in_memory([content[name] for name in names]) for part, names in files.items()}


def read(
    path: Path, parts: Collection[str] = ("train", "valid", "test")
) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images (N, 28, 28), upright, and labels (N,) of parts of a :data:`FILE`. Nothing in the file is unpickled.

    Raises:
        UserError: not such a file; the message names the array that is wrong.
    """
    content = {}
    with npz_file(path) as arrays:
        for part in parts:
            images = arrays[f"{part}_images"]
            labels = check_images(path, part, images, arrays[f"{part}_labels"], (_SIZE, _SIZE))
            content[part] = np.ascontiguousarray(images.transpose(0, 2, 1)), labels
    return content


def _in_memory(parts: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]) -> ImagesInMemory:
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return ImagesInMemory(images[:, None], labels)


def fetch(path: Path, progress: Progress | None = None, *, option: str) -> None:
    """Download the published archive and write it as ``path``, unless ``path`` exists.

    Whatever fails, nothing is left behind but the archive, or a part of it that is worth going on with.

    Args:
        path: the :data:`FILE` to write, in an existing folder.
        progress: called while the download runs.
        option: how the folder is given, for the error messages.

    Raises:
        UserError: the folder cannot be written, the download fails, or the archive does not hold what it should.
    """
    if path.exists():
        return
    way_out = f"Where another machine has {FILE}, copy it into a folder and give that folder with {option}."
    archive = path.with_name(_ARCHIVE)
    ours = not archive.exists()  # what somebody put there stays there
    try:
        with locked(path):
            if path.exists():  # another process was faster
                return
            download(URL, archive, MD5, way_out=way_out, progress=progress)
            try:
                with zipfile.ZipFile(archive) as members:
                    arrays = _convert(members)
            except Exception as error:  # a damaged archive can lead the readers anywhere
                if ours:
                    archive.unlink()
                raise UserError(
                    f"the archive {URL if ours else archive} does not hold rotated MNIST: {error}. {way_out}"
                ) from error
            with atomic_file(path) as file:
                np.savez_compressed(file, **arrays)
            if ours:
                archive.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose a folder with {option}.") from error


def _convert(members: zipfile.ZipFile) -> dict[str, npt.NDArray[np.generic]]:
    with members.open(_TRAIN_MEMBER) as file:
        images, labels = _parse(file)
    with members.open(_TEST_MEMBER) as file:
        test_images, test_labels = _parse(file)
    return {
        "train_images": images[:_NUM_TRAIN],
        "train_labels": labels[:_NUM_TRAIN],
        "valid_images": images[_NUM_TRAIN:],
        "valid_labels": labels[_NUM_TRAIN:],
        "test_images": test_images,
        "test_labels": test_labels,
    }


def _parse(file: IO[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """An .amat file: per line 784 pixels between 0 and 1, transposed, and the label."""
    rows = np.loadtxt(file, dtype=np.float32, ndmin=2)
    if rows.shape[1] != _SIZE * _SIZE + 1:
        raise ValueError(f"lines of {rows.shape[1]} numbers, expected {_SIZE * _SIZE + 1}")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    images = np.rint(pixels * 255).clip(0, 255).astype(np.uint8).reshape(-1, _SIZE, _SIZE)
    return images, labels
