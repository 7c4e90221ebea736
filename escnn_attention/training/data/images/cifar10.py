"""CIFAR-10."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from escnn_attention.training.data.base import InMemory
from escnn_attention.training.data.files import Published, check_array, check_labels, download, npz_file, readable
from escnn_attention.training.data.images.base import Augmentation, PublishedImages, random_crops
from escnn_attention.training.errors import UserError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
JPEG = "cifar10_jpeg.npz"
"""CIFAR-10 as JPEG files laid end to end: image i of ``PART`` = ``train``, ``test`` is bytes ``PART_offsets[i]`` to
``PART_offsets[i + 1]`` of ``PART_jpeg``, uint8; its label is ``PART_labels[i]``."""

_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_PER_FILE = 10_000  # images; the last file, or the last so many images, of the training part validate
_SIZE = 32
_RECORD = 1 + 3 * _SIZE * _SIZE  # the label, then red, green and blue, each row by row
_PADDING = 4  # pixels
_ORDER_SEED = 0  # of the order that the JPEG images are put in, which is part of the data set


class CIFAR10(PublishedImages):
    """CIFAR-10: 32×32 colour photographs of ten kinds of things.

    40,000 images to train, 10,000 to validate, 10,000 to test: the last of the five published training files validates,
    as in the paper on stand-alone group attention.

    Looks in the folder for the published binary archive ``cifar-10-binary.tar.gz``, which is read packed, then for
    ``cifar10_jpeg.npz``, the images as JPEG files. JPEG loses some detail: accuracies are a little below those on the
    original. Such a file has the images class by class, so they are put in an order first that is random and always the
    same, and the last 10,000 in it validate. If nothing is there, the archive is downloaded and verified.

    Args:
        augment: mirror training images left to right with probability 1/2, and cut them out of the image with a black
            frame of 4 pixels at a random place; another time for each epoch.
        full_train: train on all 50,000 training images and validate on the test images, as in the paper's published
            code; a network that is then chosen by its validation accuracy is chosen by the test images.
        folder, options: of :class:`~.base.PublishedImages`, such as ``batch_size`` and ``rotate_train``.

    Source: Krizhevsky, *Learning multiple layers of features from tiny images*, 2009.

    >>> data = CIFAR10(batch_size=24, augment=True)
    >>> data.in_channels, data.num_classes, data.size
    (3, 10, 32)
    """

    in_channels = 3
    num_classes = 10
    size = _SIZE
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)
    files = f"{ARCHIVE} or {JPEG}"

    def __init__(
        self, folder: Path | None = None, augment: bool = False, full_train: bool = False, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        self.augment, self.full_train = augment, full_train

    def _augmentations(self, count: int) -> list[Augmentation]:
        own: list[Augmentation] = [random_crops(count, _PADDING, self.seed)] if self.augment else []
        return own + super()._augmentations(count)

    def _prepare_folder(self, folder: Path) -> None:
        if self.download and not (folder / JPEG).exists():
            download(Published(ARCHIVE, URL, MD5), folder, ARCHIVE)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        if (folder / ARCHIVE).exists():
            names = {part: self._names(part) for part in parts}
            content = _read_archive(folder / ARCHIVE, {name for part in names.values() for name in part})
            return {part: _in_memory([content[name] for name in names[part]]) for part in parts}
        return {part: self._read_jpeg(folder / JPEG, part, limit) for part, limit in parts.items()}

    def _names(self, part: str) -> tuple[str, ...]:
        if self.full_train:
            return _TRAIN if part == "train" else _TEST
        return {"train": _TRAIN[:-1], "valid": _TRAIN[-1:], "test": _TEST}[part]

    def _read_jpeg(self, path: Path, part: str, limit: int | None) -> InMemory:
        part = "test" if self.full_train and part == "valid" else part
        held_out = 0 if self.full_train else _PER_FILE
        file = "test" if part == "test" else "train"
        with npz_file(path) as arrays:
            stream, offsets, labels = (arrays[f"{file}_{name}"] for name in ("jpeg", "offsets", "labels"))
        labels = check_labels(path, f"{file}_labels", labels, labels.size)
        check_array(path, f"{file}_jpeg", stream, "uint8", "N")
        check_array(path, f"{file}_offsets", offsets, "integers", len(labels) + 1)
        offsets = offsets.astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != len(stream) or (np.diff(offsets) <= 0).any():
            raise UserError(f"{path}: {file}_offsets must grow from 0 to {len(stream)}")
        if file == "train" and len(labels) <= held_out:
            raise UserError(f"{path}: {len(labels)} training images, of which the last {held_out} validate: too few")
        split = len(labels) - held_out
        order = np.random.RandomState(_ORDER_SEED).permutation(len(labels))
        chosen = {"train": order[:split], "valid": order[split:], "test": order}[part][:limit]
        images = _decode(path, stream, offsets, chosen)
        return InMemory(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels[chosen]))


def _read_archive(path: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.uint8]]:
    """Files of the archive, read in place: nothing is unpacked onto the disk."""
    content = {}
    with readable(path), gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if folder == FOLDER and name in names and (file := archive.extractfile(member)) is not None:
                content[name] = _records(path / name, file.read())
        if missing := sorted(set(names) - set(content)):
            raise ValueError(f"{', '.join(missing)} not in it")
        while unpacked.read(1 << 20):  # the checksum of the archive is at its very end
            pass
    return content


def _records(path: Path, content: bytes) -> npt.NDArray[np.uint8]:
    """The records (N, 3073) of a binary file."""
    if len(content) != _PER_FILE * _RECORD:
        raise UserError(f"cannot read {path}: {len(content)} bytes, expected {_PER_FILE} images of {_RECORD} bytes")
    records = np.frombuffer(content, np.uint8).reshape(_PER_FILE, _RECORD)
    check_labels(path, "labels", records[:, 0], _PER_FILE)
    return records


def _in_memory(files: list[npt.NDArray[np.uint8]]) -> InMemory:
    records = np.concatenate(files)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, _SIZE, _SIZE)
    return InMemory(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


def _decode(
    path: Path, stream: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """The JPEG images with the numbers ``chosen`` (N,), as (N, 32, 32, 3)."""
    images = np.empty((len(chosen), _SIZE, _SIZE, 3), np.uint8)
    with readable(path):
        for place, index in enumerate(chosen):
            content = io.BytesIO(stream[offsets[index] : offsets[index + 1]].tobytes())
            with Image.open(content, formats=["JPEG"]) as image:
                if image.size != (_SIZE, _SIZE):
                    raise ValueError(f"image {index} is {image.width}×{image.height}, expected {_SIZE}×{_SIZE}")
                images[place] = np.asarray(image.convert("RGB"))
    return images
