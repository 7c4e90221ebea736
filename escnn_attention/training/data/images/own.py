"""Images of a user's own, for a network that is trained already."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader

from escnn_attention.training.data.base import EvaluationSampler, InMemory
from escnn_attention.training.data.files import check_labels, npz_file, readable
from escnn_attention.training.data.images.base import PublishedImages, image_batches
from escnn_attention.training.errors import UserError

_MODES = {1: "L", 3: "RGB"}
_READABLE = ("1", "L", "P", "RGB")  # of 8 bits or fewer a channel, without transparency


class OwnImages(pl.LightningDataModule):
    """Images that a trained network is to classify, normalised as those that it was trained on.

    Args:
        path: a folder or an ``.npz`` file. All images in a folder and its subfolders are read, in the order of their
            names, as grey or as colour, whichever the network takes; where all of them lie in folders whose names are
            numbers, these are their labels. The file has ``images``, uint8 from 0 to 255 or floating-point numbers from
            0 to 1, of shape (N, C, H, W), or (N, H, W) for one channel, and it may have integer ``labels`` (N,).
        trained_on: the data of the training. Images must have its C and its H = W.

    Attributes:
        names: of the images of a folder; None for a file.

    Raises:
        UserError: in ``setup``: there are no such images.
    """

    def __init__(self, path: str | Path, trained_on: PublishedImages) -> None:
        super().__init__()
        self.path, self.trained_on = Path(path), trained_on
        self.names: list[str] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the images."""
        try:
            if not self.path.exists():
                raise UserError(f"there is no {self.path}")
            self._source = self._folder() if self.path.is_dir() else self._file()
        except UserError as error:
            raise UserError(f"--images: {error}") from error

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor | None]]:
        """The images, in order, with their labels or None."""
        data = self.trained_on
        white = 255 if self._source.tensors[0].dtype == torch.uint8 else 1
        batches = image_batches(self._source, data.mean, data.std, white=white)
        return DataLoader(batches, sampler=EvaluationSampler(len(batches), data.eval_batch_size), batch_size=None)

    def _folder(self) -> InMemory:
        suffixes = Image.registered_extensions()
        files = sorted(p for p in self.path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
        if not files:
            raise UserError(f"{self.path} holds no images")
        self.names = [file.relative_to(self.path).as_posix() for file in files]
        images = torch.from_numpy(np.stack([self._read(file) for file in files]))
        parents = [file.parent.name if file.parent != self.path else "" for file in files]
        numbered = all(name.isascii() and name.isdecimal() for name in parents)
        labels = np.array([int(name) for name in parents]) if numbered else None
        return InMemory(images, self._checked(labels, len(images)))

    def _read(self, file: Path) -> np.ndarray:
        """One image, (C, H, W) uint8."""
        channels, size = self.trained_on.in_channels, self.trained_on.size
        if channels not in _MODES:
            raise UserError(f"got a folder, and the network takes {channels} channels: give an .npz file")
        with readable(file, "Needed images"), Image.open(file) as opened:
            mode = opened.mode + " with transparency" * ("transparency" in opened.info)
            image = ImageOps.exif_transpose(opened)  # as viewers turn what a camera has written
            shape, pixels = image.size, np.array(image.convert(_MODES[channels]))
        if mode not in _READABLE:
            raise UserError(
                f"{file} has the mode {mode}, needed one of {', '.join(_READABLE)}: at most 8 bits a channel,"
                " no transparency"
            )
        if shape != (size, size):
            raise UserError(f"{file} has {shape[1]}×{shape[0]} pixels, needed {size}×{size}, as the training has them")
        return pixels.reshape(size, size, channels).transpose(2, 0, 1)

    def _file(self) -> InMemory:
        with npz_file(self.path, "Needed a folder or an .npz file") as arrays:
            content = {name: arrays[name] for name in ("images", "labels") if name in arrays}
        if "images" not in content:
            raise UserError(f"{self.path} has no array `images`")
        images, data = content["images"], self.trained_on
        if images.ndim == 3 and data.in_channels == 1:
            images = images[:, None]
        if images.shape[1:] != (data.in_channels, data.size, data.size) or not len(images):
            needed = f"(N, {data.in_channels}, {data.size}, {data.size})"
            raise UserError(f"{self.path} has images {content['images'].shape}, needed {needed}")
        floating = np.issubdtype(images.dtype, np.floating)
        if images.dtype != np.uint8 and not (floating and images.min() >= 0 and images.max() <= 1):
            what = f"from {images.min():g} to {images.max():g}" if floating else f"of {images.dtype}"
            needed = "uint8 from 0 to 255 or floating-point numbers from 0 to 1"
            raise UserError(f"{self.path} has images {what}, needed {needed}")
        pixels = torch.from_numpy(images.astype(np.float32) if floating else images)
        return InMemory(pixels, self._checked(content.get("labels"), len(images)))

    def _checked(self, labels: npt.NDArray[np.generic] | None, count: int) -> Tensor | None:
        """The labels, if they are classes of the training."""
        if labels is None:
            return None
        return torch.from_numpy(check_labels(self.path, "labels", labels, count, self.trained_on.num_classes))
