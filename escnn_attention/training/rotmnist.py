"""Rotated MNIST: from a local folder, or from its public address."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from escnn_attention.training.download import Progress, download
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file
from escnn_attention.training.images import ImageData, Split

URL = "https://www.iro.umontreal.ca/~lisa/icml2007data/mnist_rotation_new.zip"
MD5 = "0f9a947ff3d30e95cd685462cbf3b847"
FILE = "rotmnist.npz"
"""The file that is looked for, and that a download is turned into.

Arrays ``train_images``, ``valid_images``, ``test_images``: (N, 28, 28) uint8, transposed as in the published files;
``train_labels``, ``valid_labels``, ``test_labels``: (N,) integers from 0 to 9.
"""

_TRAIN_MEMBER = "mnist_all_rotation_normalized_float_train_valid.amat"
_TEST_MEMBER = "mnist_all_rotation_normalized_float_test.amat"
_NUM_TRAIN = 10_000  # of the 12,000 in the first file; the other 2,000 validate: the published protocol
_SIZE = 28


def default_folder() -> Path:
    """Where the data is kept: ``$ESCNN_ATTENTION_DATA``, or a folder in the user's cache."""
    if chosen := os.environ.get("ESCNN_ATTENTION_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "escnn-attention"


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
    if folder is None:
        folder = default_folder()
        if "ESCNN_ATTENTION_DATA" not in os.environ:
            folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        raise UserError(
            f"the data folder {folder} does not exist: give one that holds {FILE} with --data-dir (or the environment"
            " variable ESCNN_ATTENTION_DATA), or create it, and the data is downloaded into it"
        )
    path = folder / FILE
    if not path.exists():
        fetch(path, progress)
    parts = read(path)
    return ImageData(
        name="rotmnist",
        train=parts["train"],
        valid=parts["valid"],
        test=parts["test"],
        num_classes=10,
        source=f"rotated MNIST (28×28) from {path}",
        upright="images as the data set gives them, which are turned already",
    )


def read(path: Path) -> dict[str, Split]:
    """The parts ``train``, ``valid`` and ``test`` of a :data:`FILE`. Nothing in the file is unpickled.

    Raises:
        UserError: not such a file; the message names the array that is wrong.
    """
    parts = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for part in ("train", "valid", "test"):
                images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
                if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (_SIZE, _SIZE):
                    found = f"{images.dtype} {images.shape}"
                    raise UserError(f"{path}: {part}_images must be uint8 (N, {_SIZE}, {_SIZE}), found {found}")
                if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or not len(labels):
                    found = f"{labels.dtype} {labels.shape}"
                    raise UserError(f"{path}: {part}_labels must be integers ({len(images)},), found {found}")
                if labels.min() < 0 or labels.max() > 9:
                    raise UserError(f"{path}: {part}_labels must lie between 0 and 9")
                upright = np.ascontiguousarray(images.transpose(0, 2, 1))
                parts[part] = Split(upright.astype(np.float32) / np.float32(255), labels.astype(np.int64))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"cannot read {path}: {error}. Give another folder with --data-dir, or move the file away, and the data is"
            " downloaded again"
        ) from error
    return parts


def fetch(path: Path, progress: Progress | None = None, *, url: str | None = None, md5: str | None = None) -> None:
    """Download the published archive and write it as ``path``. Whatever fails, nothing is left behind.

    Args:
        path: the :data:`FILE` to write, in an existing folder.
        progress: called while the download runs.
        url, md5: address and checksum, by default :data:`URL` and :data:`MD5`.

    Raises:
        UserError: the folder cannot be written, the download fails, or the archive does not hold what it should.
    """
    url, md5 = url or URL, md5 or MD5
    way_out = f"Where another machine has {FILE}, copy it into a folder and give that folder with --data-dir."
    try:
        # A nameless file: it is gone with the process, even if the process is killed.
        with tempfile.TemporaryFile(dir=path.parent) as archive:
            download(url, archive, md5, way_out=way_out, progress=progress)
            archive.seek(0)
            with zipfile.ZipFile(archive) as members:
                arrays = _convert(members)
        with atomic_file(path) as file:
            np.savez_compressed(file, **arrays)
    except (KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"the archive at {url} does not hold rotated MNIST: {error}. {way_out}") from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose a folder with --data-dir.") from error


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
