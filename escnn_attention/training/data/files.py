"""Files of data sets: their folder, downloads, and arrays that are checked as they are read."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from escnn_attention._checks import reason_of
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file, locked

ENVIRONMENT = "ESCNN_ATTENTION_DATA"
"""The environment variable that names the folder of the data sets."""

_OPTION = "`folder` (--data-dir of compare)"
_RETRIES = 2
_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 16  # bytes


def data_folder(folder: Path | None, holds: str) -> Path:
    """The folder of the data sets: the one given, ``$ESCNN_ATTENTION_DATA``, or one in the user's cache, which is made.

    ``holds`` names the files that it should hold, for the error of a folder that does not exist.
    """
    if chosen := folder or os.environ.get(ENVIRONMENT):
        found = Path(chosen).expanduser()
    else:
        found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "escnn-attention"
        try:
            found.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the data folder {found}: {error.strerror or error}. Choose one with {_OPTION} or the"
                f" environment variable {ENVIRONMENT}"
            ) from error
    if not found.is_dir():
        raise UserError(
            f"the data folder {found} does not exist: give one that holds {holds} with {_OPTION} (or the environment"
            f" variable {ENVIRONMENT}), or create it, and the data is downloaded into it"
        )
    return found


class Published(NamedTuple):
    """A published file: its name in the data folder, its address and its checksum."""

    name: str
    url: str
    md5: str


def download(file: Published, folder: Path, holds: str) -> Path:
    """Download a file into an existing folder, unless the folder has it, and verify its checksum; return its path.

    The file appears once it is complete. Of several processes one downloads it, and the others wait. ``holds`` names
    the files of the data set, for the error of a transfer that fails.
    """
    path = folder / file.name
    if path.exists():
        return path
    import pooch
    import requests

    partial = folder / f".{file.name}.part"  # a folder for pooch's temporary files
    with locked(path):
        if path.exists():  # another process was faster
            return path
        shutil.rmtree(partial, ignore_errors=True)
        known = {file.name: f"md5:{file.md5}"}
        store = pooch.create(partial, "", registry=known, urls={file.name: file.url}, retry_if_failed=_RETRIES)
        receive = pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(),
            chunk_size=_CHUNK,
            timeout=_TIMEOUT,
            headers={"Accept-Encoding": "identity"},  # or requests would unpack what the checksum is of
        )
        try:
            Path(store.fetch(file.name, downloader=receive)).replace(path)
        except (requests.RequestException, ValueError) as error:
            raise UserError(
                f"cannot download {file.url}: {reason_of(error)}. Where another machine has {holds}, copy it into a"
                f" folder and give that folder with {_OPTION} or the environment variable {ENVIRONMENT}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def make_from_downloads(
    path: Path, files: Sequence[Published], write: Callable[..., None], *, allowed: bool = True
) -> None:
    """Write ``path`` from published ``files`` in its folder, unless it exists; remove those that were not there before.

    ``write`` is called with the opened ``path`` and the paths of the files. Where one is missing and downloads are not
    ``allowed``, nothing is written.
    """
    new = [file for file in files if not (path.parent / file.name).exists()]
    if path.exists() or (new and not allowed):
        return
    with locked(path):
        if path.exists():  # another process was faster
            return
        sources = [download(file, path.parent, path.name) for file in files]
        with readable(sources[0]), atomic_file(path) as opened:
            write(opened, *sources)
        for file in new:
            (path.parent / file.name).unlink(missing_ok=True)


@contextlib.contextmanager
def readable(
    path: Path, instead: str = "Give another folder, or move the file away, and the data is downloaded again"
) -> Iterator[None]:
    """Turn whatever goes wrong while ``path`` is read into a :class:`UserError` that names it, and what to do."""
    try:
        yield
    except UserError:
        raise
    # A damaged file can lead the readers anywhere: to sizes that no memory has, or round in circles.
    except Exception as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}. {instead}") from error


@contextlib.contextmanager
def npz_file(path: Path, *instead: str) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz file. Arrays of Python objects, which would have to be unpickled, are errors."""
    with readable(path, *instead), np.load(path, allow_pickle=False) as arrays:
        yield arrays


_KINDS = {"uint8": ("u1",), "integers": ("i", "u"), "floats": ("f",)}


def check_array(path: Path, name: str, values: Any, kind: str, *shape: int | str) -> None:
    """Check that an array of a file is of ``"uint8"``, ``"integers"`` or ``"floats"``, which must be finite.

    In its shape a letter stands for any size.
    """
    fits = len(values.shape) == len(shape) and all(n in (m, str(n)) for n, m in zip(shape, values.shape, strict=True))
    if not fits or not values.dtype.str[1:].startswith(_KINDS[kind]):
        needed = f"{kind} {shape}".replace("'", "")
        raise UserError(f"{path}: {name} must be {needed}, found {values.dtype} {values.shape}")
    if kind == "floats" and not np.isfinite(values).all():
        raise UserError(f"{path}: {name} must be finite")


def check_labels(
    path: Path, name: str, labels: npt.NDArray[np.generic], count: int, num_classes: int = 10
) -> npt.NDArray[np.int64]:
    """Check labels, ``count`` ≥ 1 integers from 0 to ``num_classes`` − 1; return them as int64."""
    if not count:
        raise UserError(f"{path}: {name} must be at least one, found none")
    check_array(path, name, labels, "integers", count)
    if labels.min() < 0 or labels.max() >= num_classes:
        found = f"{labels.min()} to {labels.max()}"
        raise UserError(f"{path}: {name} must lie between 0 and {num_classes - 1}, found {found}")
    return labels.astype(np.int64)
