"""What the data modules of all image data sets have in common."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from escnn_attention.training.data.batches import Batches, FlipAndCrop, ImageSource
from escnn_attention.training.data.download import Progress
from escnn_attention.training.data.folder import data_folder
from escnn_attention.training.data.sampling import EvaluationSampler, TrainingSampler
from escnn_attention.training.errors import UserError

_PARTS = {
    "fit": ("train", "valid"),
    "validate": ("valid",),
    "test": ("test",),
    "predict": ("test",),
    None: ("train", "valid", "test"),
}


class PublishedImages(pl.LightningDataModule, ABC):
    """A published data set of images in three parts, ``"train"``, ``"valid"`` and ``"test"``.

    A batch is a pair of images (B, C, H, W) float32, normalised channel by channel, and labels (B,) int64. The images
    are kept as bytes. A training batch is a function of the seed, the epoch and its number: of neither the number of
    processes, nor of workers, nor of whether the run was interrupted after an earlier epoch. An epoch has
    ⌊n / ``batch_size``⌋ batches; what does not fill a batch is left out. Of the validation and test images every one is
    seen exactly once.

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

    Attributes:
        in_channels: C.
        num_classes: the labels run from 0 to ``num_classes`` − 1.
        size: H = W.
        mean, std: by which the images are normalised: of pixels between 0 and 1, channel by channel.

    Raises:
        UserError: an argument, or the combination of ``batch_size`` with the data or the number of processes, cannot
            be met; the data is not there and cannot be had; a file is damaged.
    """

    in_channels: ClassVar[int]
    num_classes: ClassVar[int]
    size: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]
    """The files that are looked for, for people."""

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
    ) -> None:
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.limits = {"train": limit_train, "valid": limit_valid, "test": limit_test}
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.download = download
        self._sources: dict[str, ImageSource] = {}
        _at_least(1, batch_size=batch_size, eval_batch_size=self.eval_batch_size)
        _at_least(0, seed=seed, num_workers=num_workers)
        _at_least(1, **{f"limit_{part}": limit for part, limit in self.limits.items() if limit is not None})

    # What a subclass fills in.

    @abstractmethod
    def _prepare(self, folder: Path) -> None:
        """Download what ``folder`` lacks if :attr:`download` allows it, and unpack what cannot be read packed."""

    @abstractmethod
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, ImageSource] | None:
        """The parts asked for, at least their first so many images, or ``None`` where the folder lacks a file."""

    # What Lightning calls.

    def prepare_data(self) -> None:
        """Download what is not there, unless ``download`` is false. Lightning calls it in one process of a node."""
        self._prepare(self._folder())

    def setup(self, stage: str | None = None) -> None:
        """Load the parts of a stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, or all of them."""
        if stage not in _PARTS:
            raise UserError(f"stage must be one of {', '.join(filter(None, _PARTS))}, got {stage!r}")
        parts = {part: self.limits[part] for part in _PARTS[stage] if part not in self._sources}
        if not parts:
            return
        folder = self._folder()
        sources = self._read(folder, parts)
        if sources is None:
            raise UserError(
                f"{folder} does not hold {self.files}: copy it there, name another folder with `folder` or the"
                " environment variable ESCNN_ATTENTION_DATA, or leave `download` at true and call prepare_data()"
            )
        self._sources.update(sources)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        rank, world_size = self._process()
        count = self._count("train")
        _check_shares("batch_size", self.batch_size, world_size)
        if count < self.batch_size:
            raise UserError(
                f"batch_size must be at most the number of training images, got {self.batch_size} for {count}: an"
                " epoch leaves out what does not fill a batch"
            )
        sampler = TrainingSampler(count, self.batch_size, self.seed, rank, world_size)
        # Lightning sets the epoch, but where a run is resumed with workers, it lets them begin before that.
        if self.trainer is not None:
            sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        return self._loader("train", sampler, self._augmentation(count))

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._evaluation_loader("valid")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The batches of the test images, labels included."""
        return self._evaluation_loader("test")

    # How.

    def _augmentation(self, count: int) -> FlipAndCrop | None:
        """What is done to ``count`` training images before they are normalised."""
        return None

    def _way_out(self) -> str:
        """What to do where a download fails, for people."""
        return (
            f"Where another machine has {self.files}, copy it into a folder and name that folder with `folder` or the"
            " environment variable ESCNN_ATTENTION_DATA."
        )

    def _folder(self) -> Path:
        return data_folder(self.folder, self.files, "`folder`")

    def _process(self) -> tuple[int, int]:
        """Rank and number of the processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _count(self, part: str) -> int:
        if part not in self._sources:
            raise UserError(f"the {part} images are not loaded: call prepare_data() and setup() first")
        length, limit = len(self._sources[part]), self.limits[part]
        return length if limit is None else min(length, limit)

    def _evaluation_loader(self, part: str) -> DataLoader[tuple[Tensor, Tensor]]:
        rank, world_size = self._process()
        count = self._count(part)
        _check_shares("eval_batch_size", self.eval_batch_size, world_size)
        if count < world_size:
            raise UserError(f"limit_{part} must be at least the number of processes, got {count} for {world_size}")
        return self._loader(part, EvaluationSampler(count, self.eval_batch_size, rank, world_size))

    def _loader(
        self, part: str, sampler: TrainingSampler | EvaluationSampler, augment: FlipAndCrop | None = None
    ) -> DataLoader[tuple[Tensor, Tensor]]:
        # With batch_size=None a whole draw goes to the data set, which answers with a batch.
        return DataLoader(
            Batches(self._sources[part], self.mean, self.std, augment),
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._on_cuda(),
        )

    def _on_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def report_progress(name: str) -> Progress:
    """Says on stderr how far the download of ``name`` is, at each tenth of it."""
    said = -1

    def progress(received: int, total: int | None) -> None:
        nonlocal said
        tenth = received // (100 << 20) if total is None else 10 * received // max(total, 1)
        if tenth > said:
            said = tenth
            of = "" if total is None else f" of {total / 1e6:,.1f}"
            print(f"downloading {name}: {received / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)

    return progress


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")


def _check_shares(name: str, batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        raise UserError(
            f"{name} must be a multiple of the number of processes, got {batch_size} for {world_size}: it is the number"
            " of images in a step over all of them together"
        )
