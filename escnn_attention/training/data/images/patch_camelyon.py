"""PatchCamelyon."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import torch
from torch import Tensor

from escnn_attention.training.data.files import Published, check_array, check_labels, make_from_downloads, readable
from escnn_attention.training.data.images.base import PublishedImages

URL = "https://zenodo.org/records/2546921/files/{}?download=1"
MD5 = {
    "train_x": "1571f514728f59376b705fc836ff4b63",
    "train_y": "35c2d7259d906cfc8143347bb8e05be7",
    "valid_x": "d5b63470df7cfa627aeec8b9dc0c066e",
    "valid_y": "2b85f58b927af9964a4c15b8f7e8f179",
    "test_x": "d8c2d60d490dbd479f8199bdfa0cf6ec",
    "test_y": "60a7035772fbdb7f34eb86d4420cf66a",
}
"""Checksums of the published .h5.gz files. (The table on the authors' page has those of valid and test exchanged.)"""

_SIZE = 96


class PatchCamelyon(PublishedImages):
    """PatchCamelyon: 96×96 colour patches of lymph node sections; 1 where the centre holds tumour tissue, else 0.

    262,144 images to train, 32,768 to validate, 32,768 to test, as published. Looks in the folder and in its ``pcam``
    for ``camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5``; where there is only the packed file (.h5.gz), it is
    unpacked beside it, and what is not there at all is downloaded, verified and unpacked: 8 GB to download, 9 GB on the
    disk. The images stay in the files and are read batch by batch.

    The arguments are those of :class:`~.base.PublishedImages`.

    Source: Veeling, Linmans, Winkens, Cohen and Welling, *Rotation equivariant CNNs for digital pathology*, 2018.

    >>> data = PatchCamelyon(batch_size=16)
    >>> data.in_channels, data.num_classes, data.size
    (3, 2, 96)
    """

    in_channels = 3
    num_classes = 2
    size = _SIZE
    mean = (0.701, 0.538, 0.692)
    std = (0.235, 0.277, 0.213)
    files = "camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5"

    def _prepare_folder(self, folder: Path) -> None:
        for name, md5 in MD5.items():
            if not _find(folder, name).is_file():
                packed = _find(folder, name, ".gz")
                file = Published(packed.name, URL.format(packed.name), md5)
                make_from_downloads(packed.with_suffix(""), [file], _unpack, allowed=self.download)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, ImagesInFile]:
        return {part: ImagesInFile(*(_find(folder, f"{part}_{kind}") for kind in "xy")) for part in parts}


class ImagesInFile:
    """Images that stay in an HDF5 file: ``x`` (N, 96, 96, 3) uint8, and in another ``y`` (N, 1, 1, 1), 0 or 1.

    Every process opens the file for itself when it first reads from it.
    """

    def __init__(self, images: Path, labels: Path) -> None:
        self.path = images
        self._opened: tuple[int, h5py.Dataset] | None = None
        with readable(images), h5py.File(images) as file:
            found = file["x"]
            check_array(images, "x", found, "uint8", "N", _SIZE, _SIZE, 3)
            count = len(found)
        with readable(labels), h5py.File(labels) as file:
            values = file["y"][()]
        if values.shape == (count, 1, 1, 1):
            values = values.reshape(count)
        self.labels = torch.from_numpy(check_labels(labels, "y", values, count, num_classes=2))

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = np.asarray(indices)
        images = np.empty((len(chosen), _SIZE, _SIZE, 3), np.uint8)
        with readable(self.path):
            stored = self._images()
            for place in np.argsort(chosen):  # in the order of the file
                images[place] = stored[chosen[place]]  # several times as fast as h5py's reading of a list of indices
        return torch.from_numpy(images).permute(0, 3, 1, 2), self.labels[torch.from_numpy(chosen)]

    def _images(self) -> h5py.Dataset:
        # What was opened before a fork is not to be read from after it.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), h5py.File(self.path)["x"]
        return self._opened[1]


def _find(folder: Path, name: str, ending: str = "") -> Path:
    """The file in ``folder`` or in its ``pcam``; in ``folder`` where it is in neither."""
    paths = [place / f"camelyonpatch_level_2_split_{name}.h5{ending}" for place in (folder, folder / "pcam")]
    return next((path for path in paths if path.is_file()), paths[0])


def _unpack(file: IO[bytes], packed: Path) -> None:
    with gzip.open(packed) as content:
        shutil.copyfileobj(content, file, 1 << 20)
