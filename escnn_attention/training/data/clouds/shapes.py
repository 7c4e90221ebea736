"""Shapes: points on the surfaces of solids that the package makes, and of published models."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from escnn_attention.training.data.base import PublishedData, Source, at_least, integers, one_of
from escnn_attention.training.data.clouds.base import CloudsInMemory, GeneratedClouds, PointClouds
from escnn_attention.training.data.files import Published, check_labels, download, readable
from escnn_attention.training.errors import UserError

Array = npt.NDArray[np.float64]
Surface = Callable[[int, np.random.Generator], Array]
"""From a number of points to so many of them (n, 3), uniform on a surface of random proportions."""

URL = "https://shapenet.cs.stanford.edu/media/modelnet40_ply_hdf5_2048.zip"
MD5 = "c9ab8e6dfb16f67afdab25e155c79e59"
FOLDER = "modelnet40_ply_hdf5_2048"
ARCHIVE = f"{FOLDER}.zip"

_NAMES = """
airplane bathtub bed bench bookshelf bottle bowl car chair cone cup curtain desk door dresser
flower_pot glass_box guitar keyboard lamp laptop mantel monitor night_stand person piano plant radio
range_hood sink sofa stairs stool table tent toilet tv_stand vase wardrobe xbox
"""
CATEGORIES = tuple(_NAMES.split())
"""The categories of ModelNet40, in the order of their labels."""
TEN = ("bathtub", "bed", "chair", "desk", "dresser", "monitor", "night_stand", "sofa", "table", "toilet")
"""Those of ModelNet10."""

_TRAIN_FILES = tuple(f"ply_data_train{number}.h5" for number in range(5))
_TEST_FILES = tuple(f"ply_data_test{number}.h5" for number in range(2))
_POINTS = 2048
_VALID = 10  # one of so many training models validates
_ORDER_SEED = 0  # of the order that tells which, which is part of the data set

# Solids.


def sample_mesh(vertices: Array, faces: npt.NDArray[np.int64], count: int, generator: np.random.Generator) -> Array:
    """Points (``count``, 3), uniform on the triangles whose vertices (V, 3) have the numbers ``faces`` (F, 3)."""
    a, b, c = (vertices[faces[:, corner]] for corner in range(3))
    areas = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    chosen = generator.choice(len(faces), count, p=areas / areas.sum())
    u, v = generator.random((2, count, 1))
    over = u + v > 1  # the other half of the parallelogram
    u, v = np.where(over, 1 - u, u), np.where(over, 1 - v, v)
    return a[chosen] + u * (b - a)[chosen] + v * (c - a)[chosen]


def sample_ellipsoid(axes: Array, count: int, generator: np.random.Generator) -> Array:
    """Points (``count``, 3), uniform on the ellipsoid with the semi-axes ``axes`` (3,)."""

    def propose(number: int) -> tuple[Array, Array]:
        sphere = generator.standard_normal((number, 3))
        sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
        # A piece of the sphere at u grows by abc |(u₁/a, u₂/b, u₃/c)|, at most by abc / min(a, b, c).
        return sphere * axes, np.linalg.norm(sphere / axes, axis=1) * axes.min()

    return _accepted(propose, count, generator)


def sample_torus(tube: float, count: int, generator: np.random.Generator) -> Array:
    """Points (``count``, 3), uniform on the torus about the third axis with the radii 1 and ``tube`` < 1."""

    def propose(number: int) -> tuple[Array, Array]:
        around, across = generator.uniform(0, 2 * np.pi, (2, number))
        radii = 1 + tube * np.cos(across)
        points = np.stack([radii * np.cos(around), radii * np.sin(around), tube * np.sin(across)], axis=1)
        return points, radii / (1 + tube)

    return _accepted(propose, count, generator)


def sample_revolved(radii: Array, heights: Array, count: int, generator: np.random.Generator) -> Array:
    """Points (``count``, 3), uniform on what a polygonal line (P,) becomes that is rotated about the third axis."""
    inner, outer = radii[:-1], radii[1:]
    areas = np.hypot(np.diff(radii), np.diff(heights)) * (inner + outer)
    chosen = generator.choice(len(areas), count, p=areas / areas.sum())
    inner, outer = inner[chosen], outer[chosen]
    u = generator.random(count)
    # r² is uniform between those of the ends; the place along the line is ((r − inner) / (outer − inner)).
    radius = np.sqrt(inner**2 + u * (outer**2 - inner**2))
    same = np.isclose(inner, outer)
    along = np.where(same, u, (radius - inner) / np.where(same, 1, outer - inner))
    height = heights[:-1][chosen] + along * np.diff(heights)[chosen]
    angles = generator.uniform(0, 2 * np.pi, count)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles), height], axis=1)


def sample_capsule(length: float, count: int, generator: np.random.Generator) -> Array:
    """Points (``count``, 3), uniform on a cylinder of radius 1 between two half spheres ``length`` apart."""
    points = generator.standard_normal((count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points[:, 2] += np.sign(points[:, 2]) * length / 2
    side = generator.random(count) < length / (length + 2)  # 2πl of 2πl + 4π
    points[side, :2] /= np.linalg.norm(points[side, :2], axis=1, keepdims=True)
    points[side, 2] = generator.uniform(-length / 2, length / 2, side.sum())
    return points


def _accepted(propose: Callable[[int], tuple[Array, Array]], count: int, generator: np.random.Generator) -> Array:
    """``count`` of the points that are proposed, each kept with the probability that comes with it."""
    kept: list[Array] = []
    while sum(map(len, kept)) < count:
        points, probabilities = propose(2 * count)
        kept.append(points[generator.random(len(points)) < probabilities])
    return np.concatenate(kept)[:count]


def _hull(corners: list[tuple[float, float, float]], faces: list[tuple[int, ...]]) -> tuple[Array, npt.NDArray[Any]]:
    """Corners, and triangles of flat convex faces."""
    triangles = [(face[0], face[i], face[i + 1]) for face in faces for i in range(1, len(face) - 1)]
    return np.array(corners, dtype=np.float64), np.array(triangles)


_SINE_OF_60 = 3**0.5 / 2
_POLYHEDRA = {
    "box": _hull(
        [(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)],
        [(0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5)],
    ),
    "tetrahedron": _hull(
        [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)], [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)]
    ),
    "octahedron": _hull(
        [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)],
        [(x, y, z) for x in (0, 1) for y in (2, 3) for z in (4, 5)],
    ),
    "pyramid": _hull(
        [(1, 1, 0), (-1, 1, 0), (-1, -1, 0), (1, -1, 0), (0, 0, 1.5)],
        [(0, 1, 2, 3), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)],
    ),
    "prism": _hull(
        [(x, y, z) for z in (-1.0, 1.0) for x, y in ((1, 0), (-0.5, _SINE_OF_60), (-0.5, -_SINE_OF_60))],
        [(0, 1, 2), (3, 4, 5), (0, 1, 4, 3), (1, 2, 5, 4), (2, 0, 3, 5)],
    ),
}


def _polyhedron(name: str) -> Surface:
    corners, faces = _POLYHEDRA[name]

    def surface(count: int, generator: np.random.Generator) -> Array:
        return sample_mesh(corners * _proportions(generator), faces, count, generator)

    return surface


def _proportions(generator: np.random.Generator) -> Array:
    """The lengths of the three axes of a solid, drawn at random."""
    return generator.uniform(0.7, 1.3, 3)


def _cylinder(count: int, generator: np.random.Generator) -> Array:
    height = generator.uniform(1.0, 3.0)
    return sample_revolved(np.array([0.0, 1, 1, 0]), np.array([0, 0, height, height]), count, generator)


def _cone(count: int, generator: np.random.Generator) -> Array:
    height = generator.uniform(1.0, 3.0)
    return sample_revolved(np.array([0.0, 1, 0]), np.array([0, 0, height]), count, generator)


SOLIDS: dict[str, Surface] = {
    "ellipsoid": lambda count, generator: sample_ellipsoid(_proportions(generator), count, generator),
    "box": _polyhedron("box"),
    "cylinder": _cylinder,
    "cone": _cone,
    "torus": lambda count, generator: sample_torus(generator.uniform(0.2, 0.6), count, generator),
    "capsule": lambda count, generator: sample_capsule(generator.uniform(0.7, 2.0), count, generator),
    "tetrahedron": _polyhedron("tetrahedron"),
    "octahedron": _polyhedron("octahedron"),
    "pyramid": _polyhedron("pyramid"),
    "prism": _polyhedron("prism"),
}
"""The solids, in the order of their labels. Each has an upright position: its axis is the third."""


def normalised(points: Array) -> Array:
    """The cloud (n, 3) with mean 0 and greatest radius 1."""
    centred = points - points.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=1).max()


class SampledSolids(GeneratedClouds):
    """Points on the surfaces of ten kinds of solids, made by the package: which solid is it?

    Every solid has random proportions and stands upright, with its axis along the third. Points are uniform on the
    surface; a cloud has mean 0 and greatest radius 1 before noise is added. The feature is 1.

    Args:
        num_train, num_valid, num_test: clouds of each part.
        num_points: points of a cloud, at least 2.
        noise: standard deviation of the normal noise on coordinates.
        **options: of :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    Example:
        >>> data = SampledSolids(num_train=20, num_points=64, batch_size=10)
        >>> data.setup("fit")
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch.coords.shape, batch.features.shape, batch.targets.shape
        (torch.Size([640, 3]), torch.Size([640, 1]), torch.Size([10]))
    """

    dim = 3
    in_channels = 1
    class_names = tuple(SOLIDS)
    num_classes = len(SOLIDS)

    def __init__(
        self,
        num_train: int = 2_000,
        num_valid: int = 500,
        num_test: int = 1_000,
        num_points: int = 256,
        noise: float = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(num_train, num_valid, num_test, **options)
        integers(2, num_points=num_points)
        at_least(0, noise=noise)
        self.num_points = num_points
        self.noise = noise

    def _make(self, part: str) -> CloudsInMemory:
        points, labels = self._in_blocks(part, self._block)
        return _labelled(points, labels)

    def _block(self, count: int, generator: np.random.Generator) -> tuple[npt.NDArray[Any], ...]:
        labels = generator.integers(len(SOLIDS), size=count)
        surfaces = list(SOLIDS.values())
        points = np.stack([normalised(surfaces[label](self.num_points, generator)) for label in labels])
        return points + self.noise * generator.standard_normal(points.shape), labels


def _labelled(points: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> CloudsInMemory:
    """Clouds of one size (B, n, 3) and what they show (B,)."""
    count, size = points.shape[:2]
    coords = torch.from_numpy(points.reshape(-1, 3)).float()
    return CloudsInMemory(
        torch.full((count,), size), coords, torch.ones(len(coords), 1), torch.from_numpy(labels).to(torch.int64)
    )


# Published models.


class ModelNet40(PublishedData, PointClouds):
    """ModelNet40: points on the surfaces of models of 40 kinds of things, upright.

    9,840 models to train, of which every tenth (in an order that is random and always the same) validates, and 2,468 to
    test. Looks in the folder for ``modelnet40_ply_hdf5_2048`` and then for the archive of this name, the points as
    published with PointNet: 2,048 of each model, within the unit ball. The archive (435 MB) is downloaded and verified
    if neither is there; it is read packed. The feature is 1.

    Args:
        categories: 40, or 10 for the models of those of ModelNet10 only. (ModelNet10 itself has them rotated so that
            they face one way; here they are as in ModelNet40.)
        num_points: the first so many points of a model, from 2 to 2,048.
        folder, limit_train, limit_valid, limit_test, download: see
            :class:`~escnn_attention.training.data.base.PublishedData`.
        **options: of :class:`~.base.PointClouds`, such as ``batch_size`` and ``rotate_train``.

    Source: Wu, Song, Khosla, Yu, Zhang, Tang and Xiao, *3D ShapeNets: a deep representation for volumetric shapes*,
    CVPR 2015; the points: Qi, Su, Mo and Guibas, *PointNet*, CVPR 2017.

    Example:
        >>> data = ModelNet40(categories=10)
        >>> data.dim, data.num_classes, data.class_names[:2]
        (3, 10, ('bathtub', 'bed'))
    """

    dim = 3
    in_channels = 1
    files = f"{FOLDER}/ply_data_*.h5 or {ARCHIVE}"

    def __init__(
        self, folder: Path | None = None, num_points: int = 1024, categories: Literal[10, 40] = 40, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        one_of((10, 40), categories=categories)
        integers(2, num_points=num_points)
        if num_points > _POINTS:
            raise UserError(f"num_points must be at most {_POINTS}, got {num_points}")
        self.num_points = num_points
        self.class_names = TEN if categories == 10 else CATEGORIES
        self.num_classes = len(self.class_names)

    def _prepare_folder(self, folder: Path) -> None:
        if self.download and not _has_files(folder):
            download(Published(ARCHIVE, URL, MD5), folder, ARCHIVE)

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source] | None:
        if not _has_files(folder) and not (folder / ARCHIVE).exists():
            return None
        sources = {}
        for names in dict.fromkeys(_TEST_FILES if part == "test" else _TRAIN_FILES for part in parts):
            points, labels = self._content(folder, names)
            if names == _TEST_FILES:
                sources["test"] = _labelled(points, labels)
                continue
            order = np.random.RandomState(_ORDER_SEED).permutation(len(labels))
            held_out = np.zeros(len(labels), dtype=bool)
            held_out[order[: max(1, len(labels) // _VALID)]] = True
            sources["train"] = _labelled(points[~held_out], labels[~held_out])
            sources["valid"] = _labelled(points[held_out], labels[held_out])
        return {part: sources[part] for part in parts}

    def _content(self, folder: Path, names: tuple[str, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Points (B, n, 3) and labels (B,) of the categories wanted."""
        content = []
        if _has_files(folder):
            for name in names:
                with readable(folder / FOLDER / name):
                    content.append(_models(folder / FOLDER / name, (folder / FOLDER / name).read_bytes()))
        else:
            with readable(folder / ARCHIVE), zipfile.ZipFile(folder / ARCHIVE) as archive:
                for name in names:
                    content.append(_models(folder / ARCHIVE / name, archive.read(f"{FOLDER}/{name}")))
        points = np.concatenate([points[:, : self.num_points] for points, _ in content])
        labels = np.concatenate([labels for _, labels in content])
        new = np.full(len(CATEGORIES), -1)
        new[[CATEGORIES.index(name) for name in self.class_names]] = np.arange(self.num_classes)
        chosen = new[labels] >= 0
        return points[chosen], new[labels[chosen]]


def _has_files(folder: Path) -> bool:
    return all((folder / FOLDER / name).is_file() for name in _TRAIN_FILES + _TEST_FILES)


def _models(path: Path, content: bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Points (B, 2048, 3) and labels (B,) of an HDF5 file."""
    try:
        import h5py
    except ImportError as error:
        raise UserError("h5py is needed to read ModelNet40: pip install h5py") from error
    with h5py.File(io.BytesIO(content), "r") as file:
        points, labels = file["data"][()], file["label"][()]
    if points.ndim != 3 or points.shape[1:] != (_POINTS, 3) or points.dtype.kind != "f":
        raise UserError(f"{path}: data must be floats (N, {_POINTS}, 3), found {points.dtype} {points.shape}")
    if not np.isfinite(points).all():
        raise UserError(f"{path}: data must be finite")
    if labels.shape == (len(points), 1):
        labels = labels[:, 0]
    return points.astype(np.float32), check_labels(path, "label", labels, len(points), len(CATEGORIES))
