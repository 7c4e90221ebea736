"""What the data modules of all image data sets have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from escnn_attention.training.data.images.batches import Augmentation, Batches, ImageSource, RandomRotations
from escnn_attention.training.data.parts import at_least
from escnn_attention.training.data.published import PublishedData
from escnn_attention.training.errors import UserError


class PublishedImages(PublishedData, ABC):
    """A published data set of images in three parts, ``"train"``, ``"valid"`` and ``"test"``.

    A batch is a pair of images (B, C, H, W) float32, normalised channel by channel, and labels (B,) int64. The images
    are kept as bytes. A training batch is a function of the seed, the epoch and its number: of neither the number of
    processes, nor of workers, nor of whether the run was interrupted after an earlier epoch. An epoch has
    ⌊n / ``batch_size``⌋ batches; what does not fill a batch is left out, unless ``drop_last`` is false. Of the
    validation and test images every one is seen exactly once.

    A subclass says what is in the data set and where it is.

    Args:
        folder: the folder to look in, and to download into; it must exist. By default ``$ESCNN_ATTENTION_DATA``, or
            ``~/.cache/escnn-attention``, which is made.
        batch_size: images in a training step over all processes together; a multiple of their number.
        seed: of the order of the training images.
        num_workers: processes that prepare batches; 0 does it in the training process, which is fast enough for small
            images.
        limit_train, limit_valid, limit_test: use the first so many images only.
        eval_batch_size: images in a validation or test step over all processes together; by default ``batch_size``.
        download: whether to download what the folder lacks.
        drop_last: whether what does not fill a batch is left out of an epoch; if not, it is a smaller batch.
        mean, std: by which the images are normalised; by default those of the data set.
        rotate_train: rotate each training image about its centre, in each epoch by another angle between 0 and this
            many degrees. 360 gives all rotations; 360/N does for a network that rotations by 360°/N do not change, of
            which the others are the complement.

    Attributes:
        in_channels: C.
        num_classes: the labels run from 0 to ``num_classes`` − 1.
        size: H = W.
        mean, std: by which the images are normalised: of pixels between 0 and 1, channel by channel.

    Raises:
        UserError: an argument, or the combination of ``batch_size`` with the data or the number of processes, cannot
            be met; the data is not there and cannot be had; a file is damaged.
    """

    things = "images"

    in_channels: ClassVar[int]
    num_classes: ClassVar[int]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int = 255
    """The value of a pixel that is 1 where ``mean`` and ``std`` are taken."""

    def __init__(
        self,
        folder: Path | None = None,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        limit_train: int | None = None,
        limit_valid: int | None = None,
        limit_test: int | None = None,
        eval_batch_size: int | None = None,
        download: bool = True,
        drop_last: bool = True,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        rotate_train: float = 0.0,
    ) -> None:
        limits = {"train": limit_train, "valid": limit_valid, "test": limit_test}
        super().__init__(batch_size, seed, num_workers, eval_batch_size, limits, drop_last)
        self.folder = folder
        self.download = download
        self.rotate_train = rotate_train
        at_least(0, rotate_train=rotate_train)
        if rotate_train > 360:
            raise UserError(f"rotate_train must be at most 360, got {rotate_train}")
        for name, values in (("mean", mean), ("std", std)):
            if values is None:
                continue
            if len(values) != self.in_channels:
                raise UserError(f"{name}: got {len(values)} numbers, needed one for each channel, {self.in_channels}")
            setattr(self, name, tuple(values))

    # What a subclass fills in.

    @abstractmethod
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, ImageSource] | None:
        """The parts asked for, at least their first so many images, or ``None`` where the folder lacks a file."""

    def _augmentations(self, count: int) -> list[Augmentation]:
        """What is done to ``count`` training images before they are normalised."""
        return [RandomRotations(count, self.rotate_train, self.seed, self.white)] if self.rotate_train else []

    # How.

    def _batches(self, part: str) -> Batches:
        augment = self._augmentations(self._count(part)) if part == "train" else ()
        return Batches(self._sources[part], self.mean, self.std, augment, self.white)

    def _too_few(self, part: str, count: int, world_size: int) -> str:
        return f"limit_{part} must be at least the number of processes, got {count} for {world_size}"
