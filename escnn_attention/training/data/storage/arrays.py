"""Files of arrays that are checked as they are read; nothing in them is ever unpickled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from escnn_attention.training.errors import UserError


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while ``path`` is read into an error that names it.

    Raises:
        UserError: the file is damaged, or is another file than its name says.
    """
    try:
        yield
    except UserError:
        raise
    # A damaged file can lead the readers anywhere: to sizes that no memory has, or round in circles.
    except Exception as error:
        raise UserError(
            f"cannot read {path}: {str(error) or type(error).__name__}. Give another folder, or move the file away, and"
            " the data is downloaded again"
        ) from error


@contextlib.contextmanager
def npz_file(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz file. Arrays of Python objects, which would have to be unpickled, are errors.

    Raises:
        UserError: the file, or an array that is asked for, cannot be read.
    """
    with readable(path), np.load(path, allow_pickle=False) as arrays:
        yield arrays


def check_images(
    path: Path, name: str, images: npt.NDArray[np.generic], labels: npt.NDArray[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Images must be uint8 (N, ``shape``), with N labels from 0 to 9; returns the labels as int64.

    Args:
        path: the file that they come from.
        name: of the images in it, ``NAME_images`` and ``NAME_labels``.
        images, labels: the arrays.
        shape: of one image.

    Raises:
        UserError: they are not.
    """
    if images.dtype != np.uint8 or images.shape[1:] != shape or images.ndim != 1 + len(shape):
        sizes = ", ".join(map(str, shape))
        raise UserError(f"{path}: {name}_images must be uint8 (N, {sizes}), found {images.dtype} {images.shape}")
    return check_labels(path, f"{name}_labels", labels, len(images))


def check_labels(
    path: Path, name: str, labels: npt.NDArray[np.generic], count: int, num_classes: int = 10
) -> npt.NDArray[np.int64]:
    """Labels must be ``count`` ≥ 1 integers from 0 to ``num_classes`` − 1; returns them as int64.

    Raises:
        UserError: they are not.
    """
    if not count:
        raise UserError(f"{path}: {name} must be at least one, found none")
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: {name} must be integers ({count},), found {labels.dtype} {labels.shape}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"{path}: {name} must lie between 0 and {num_classes - 1}")
    return labels.astype(np.int64)
