"""ModelNet40: points on the surfaces of published models."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import PublishedData, Source, integers
from escnn_attention.training.data.clouds.base import CloudsInMemory, PointClouds
from escnn_attention.training.data.files import Published, check_array, check_labels, download, readable

URL = "https://shapenet.cs.stanford.edu/media/modelnet40_ply_hdf5_2048.zip"
MD5 = "c9ab8e6dfb16f67afdab25e155c79e59"
FOLDER = "modelnet40_ply_hdf5_2048"
ARCHIVE = f"{FOLDER}.zip"

_NAMES = """
airplane bathtub bed bench bookshelf bottle bowl car chair cone cup curtain desk door dresser flower_pot glass_box
guitar keyboard lamp laptop mantel monitor night_stand person piano plant radio range_hood sink sofa stairs stool table
tent toilet tv_stand vase wardrobe xbox
"""
CATEGORIES = tuple(_NAMES.split())
"""The categories of ModelNet40, in the order of their labels."""

_TRAIN_FILES = tuple(f"ply_data_train{number}.h5" for number in range(5))
_TEST_FILES = tuple(f"ply_data_test{number}.h5" for number in range(2))
_POINTS = 2048
_VALID = 10  # one of so many training models validates
_ORDER_SEED = 0  # of the order that tells which, which is part of the data set


class ModelNet40(PublishedData, PointClouds):
    """ModelNet40: points on the surfaces of models of 40 kinds of things, upright.

    9,840 models to train, of which every tenth (in a random order that is always the same) validates, and 2,468 to
    test. Looks in the folder for ``modelnet40_ply_hdf5_2048.zip``, the points as published with PointNet: 2,048 of each
    model, within the unit ball. If it is not there, it is downloaded (435 MB) and verified. The feature is 1.

    Args:
        num_points: the first so many points of a model, from 2 to 2,048.
        folder, options: of :class:`~escnn_attention.training.data.base.PublishedData` and
            :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    Source: Wu, Song, Khosla, Yu, Zhang, Tang and Xiao, *3D ShapeNets: a deep representation for volumetric shapes*,
    CVPR 2015; the points: Qi, Su, Mo and Guibas, *PointNet*, CVPR 2017.

    Example:
        >>> data = ModelNet40()
        >>> data.dim, data.num_classes, data.class_names[:2]
        (3, 40, ('airplane', 'bathtub'))
    """

    dim = 3
    in_channels = 1
    class_names = CATEGORIES
    num_classes = len(CATEGORIES)
    files = ARCHIVE

    def __init__(self, folder: Path | None = None, num_points: int = 1024, **options: Any) -> None:
        super().__init__(folder, **options)
        integers(2, _POINTS, num_points=num_points)
        self.num_points = num_points

    def _prepare_folder(self, folder: Path) -> None:
        if self.download:
            download(Published(ARCHIVE, URL, MD5), folder, ARCHIVE)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        content = {}
        if "test" in parts:
            content["test"] = self._content(folder, _TEST_FILES)
        if parts.keys() != {"test"}:
            points, labels = self._content(folder, _TRAIN_FILES)
            order = np.random.RandomState(_ORDER_SEED).permutation(len(labels))
            held_out = np.isin(np.arange(len(labels)), order[: max(1, len(labels) // _VALID)])
            content["train"] = points[~held_out], labels[~held_out]
            content["valid"] = points[held_out], labels[held_out]
        clouds = {}
        for part in parts:
            coords, kinds = map(torch.from_numpy, content[part])
            count, size = coords.shape[:2]
            constant = torch.ones(count * size, 1)
            clouds[part] = CloudsInMemory(torch.full((count,), size), coords.flatten(0, 1).float(), constant, kinds)
        return clouds

    def _content(self, folder: Path, names: tuple[str, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Points (B, n, 3) and labels (B,) of files."""
        with readable(folder / ARCHIVE), zipfile.ZipFile(folder / ARCHIVE) as archive:
            content = [_models(folder / ARCHIVE / name, archive.read(f"{FOLDER}/{name}")) for name in names]
        points = np.concatenate([points[:, : self.num_points] for points, _ in content])
        return points, np.concatenate([labels for _, labels in content])


def _models(path: Path, content: bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Points (B, 2048, 3) and labels (B,) of an HDF5 file."""
    with h5py.File(io.BytesIO(content)) as file:
        points, labels = file["data"][()], file["label"][()]
    check_array(path, "data", points, "floats", "N", _POINTS, 3)
    if labels.shape == (len(points), 1):
        labels = labels[:, 0]
    return points.astype(np.float32), check_labels(path, "label", labels, len(points), len(CATEGORIES))
