"""MNIST."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch

from escnn_attention.training.data.base import InMemory
from escnn_attention.training.data.files import Published, check_images, make_from_downloads, npz_file
from escnn_attention.training.data.images.base import PublishedImages

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
ARCHIVES = {
    "train_images": ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train_labels": ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    "test_images": ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    "test_labels": ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
}
"""The published files of each array, and their md5 checksums."""
FILE = "mnist.npz"
"""The file that is looked for, and that a download is converted to: images (N, 28, 28) uint8 and labels (N,) integers,
``train_images``, ``train_labels``, ``test_images`` and ``test_labels``."""

_NUM_VALID = 5_000  # the last of the training file
_SIZE = 28


class MNIST(PublishedImages):
    """MNIST: 28×28 grey digits, upright.

    55,000 images to train, 5,000 to validate, 10,000 to test: the last 5,000 of the published training file validate.
    Looks for ``mnist.npz`` in the folder; if it is not there, the published files are downloaded, verified and
    converted. Normalised with mean 0.1307 and standard deviation 0.3081.

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
    files = FILE

    def _prepare_folder(self, folder: Path) -> None:
        archives = [Published(name, URL + name, md5) for name, md5 in ARCHIVES.values()]
        make_from_downloads(folder / FILE, archives, _convert, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory] | None:
        return {part: _part(folder / FILE, part) for part in parts} if (folder / FILE).exists() else None


def _part(path: Path, part: str) -> InMemory:
    file = "test" if part == "test" else "train"
    chosen = {"train": slice(-_NUM_VALID), "valid": slice(-_NUM_VALID, None), "test": slice(None)}[part]
    with npz_file(path) as arrays:
        images, labels = (arrays[f"{file}_{kind}"][chosen] for kind in ("images", "labels"))
    found = check_images(path, file, images, labels, (_SIZE, _SIZE))
    return InMemory(torch.from_numpy(images)[:, None], torch.from_numpy(found))


def _convert(file: IO[bytes], *archives: Path) -> None:
    arrays = {}
    for name, archive in zip(ARCHIVES, archives, strict=True):
        content = gzip.decompress(archive.read_bytes())
        # A header of 4 bytes, and 4 for the length of each axis.
        images = name.endswith("images")
        values = np.frombuffer(content, np.uint8, offset=16 if images else 8)
        arrays[name] = values.reshape(-1, _SIZE, _SIZE) if images else values
    np.savez_compressed(file, **arrays)
