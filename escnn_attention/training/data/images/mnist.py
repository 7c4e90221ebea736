"""MNIST."""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import InMemory
from escnn_attention.training.data.files import Published, check_images, download, npz_file, readable
from escnn_attention.training.data.images.base import PublishedImages
from escnn_attention.training.errors import UserError

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {
    "train_images": ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train_labels": ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
    "test_images": ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
    "test_labels": ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
}
"""The published files and the md5 checksums of their .gz archives."""
NPZ = "mnist.npz"
"""All arrays in one file, images (N, 28, 28) uint8 and labels (N,) integers: ``train_images``, ``train_labels``,
``test_images``, ``test_labels``, or as Keras names them ``x_train``, ``y_train``, ``x_test``, ``y_test``."""

_KERAS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}
_NUM_VALID = 5_000  # the last of the training file
_SIZE = 28


class MNIST(PublishedImages):
    """MNIST: 28×28 grey digits, upright.

    55,000 images to train, 5,000 to validate, 10,000 to test: the last 5,000 of the published training file validate.
    Looks in the folder for ``mnist.npz``, then for the four published files, packed (.gz) or not, in the folder itself
    or in its ``MNIST/raw``. Those that are not there are downloaded and verified. Normalised with mean 0.1307 and
    standard deviation 0.3081.

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
    files = f"{NPZ} or {', '.join(name for name, _ in FILES.values())} (each with or without .gz)"

    def _prepare_folder(self, folder: Path) -> None:
        if not self.download or (folder / NPZ).exists():
            return
        for name, md5 in FILES.values():
            if _find(folder, name) is None:
                download(Published(f"{name}.gz", f"{URL}{name}.gz", md5), folder, NPZ)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory] | None:
        sources = {}
        for file in dict.fromkeys("test" if part == "test" else "train" for part in parts):
            content = _read_npz(folder / NPZ, file) if (folder / NPZ).exists() else _read_idx(folder, file)
            if content is None:
                return None
            images, labels = torch.from_numpy(content[0])[:, None], torch.from_numpy(content[1])
            if file == "test":
                sources["test"] = InMemory(images, labels)
                continue
            if len(labels) <= _NUM_VALID:
                raise UserError(
                    f"{folder}: {len(labels)} training images, of which the last {_NUM_VALID} validate: too few"
                )
            sources["train"] = InMemory(images[:-_NUM_VALID], labels[:-_NUM_VALID])
            sources["valid"] = InMemory(images[-_NUM_VALID:], labels[-_NUM_VALID:])
        return {part: sources[part] for part in parts}


def _find(folder: Path, name: str) -> Path | None:
    """The published file called ``name``, packed or not."""
    paths = [place / f"{name}{ending}" for place in (folder, folder / "MNIST" / "raw") for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)


def _read_npz(path: Path, file: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    with npz_file(path) as arrays:
        images, labels = (
            arrays[_KERAS[name] if _KERAS[name] in arrays else name] for name in (f"{file}_images", f"{file}_labels")
        )
    return images, check_images(path, file, images, labels, (_SIZE, _SIZE))


def _read_idx(folder: Path, file: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
    paths = [_find(folder, FILES[f"{file}_{kind}"][0]) for kind in ("images", "labels")]
    if None in paths:
        return None
    images, labels = (_read_file(path) for path in paths if path is not None)
    return images, check_images(folder, file, images, labels, (_SIZE, _SIZE))


def _read_file(path: Path) -> npt.NDArray[np.uint8]:
    with readable(path):
        content = path.read_bytes()
        return parse_idx(gzip.decompress(content) if path.suffix == ".gz" else content)


def parse_idx(content: bytes) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of bytes: 0, 0, 8, number of axes, big-endian sizes of 4 bytes each, the values.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 4, 5, 6]))
    array([[4, 5, 6]], dtype=uint8)
    """
    if len(content) < 4 or content[:3] != bytes([0, 0, 8]):
        raise ValueError(f"an IDX file of bytes begins with 00 00 08, found {content[:3].hex(' ') or 'nothing'}")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    if len(shape) != content[3] or len(content) != start + math.prod(shape):
        raise ValueError(f"{len(content) - start} values, expected {' × '.join(map(str, shape))}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
