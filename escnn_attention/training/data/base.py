"""Data modules in three parts, and the batches that each process draws."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from escnn_attention.training.data.files import ENVIRONMENT, data_folder
from escnn_attention.training.errors import UserError


class Draw(NamedTuple):
    """The indices of the things in a process's share of a batch, and the epoch in which they are drawn."""

    indices: Sequence[int]
    epoch: int = 0


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """A permutation of ``range(length)``."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


# Lightning keeps a DistributedSampler as it is, whether or not the trainer was made with
# use_distributed_sampler=False.


class TrainingSampler(DistributedSampler[Draw]):
    """Shuffled batches of one size, of which each process gets an equal share.

    Batch b of an epoch holds places bB, ..., bB + B − 1 of its :func:`epoch_order`, where B is ``batch_size``, and
    process r of W gets places rB/W, ..., (r + 1)B/W − 1 of it: together they see the batches that one process sees.
    What does not fill a batch is left out, or with a false ``drop_last`` a single process gets it as a smaller batch.

    >>> first, second = TrainingSampler(length=10, batch_size=4, seed=0)
    >>> shares = [next(iter(TrainingSampler(10, 4, 0, rank, world_size=2))).indices for rank in (0, 1)]
    >>> [*shares[0], *shares[1]] == first.indices
    True
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, drop_last: bool = True
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.count = length // batch_size if drop_last else -(-length // batch_size)
        self.rank, self.num_replicas, self.epoch = rank, world_size, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Draw]:
        batches = epoch_order(self.length, self.seed, self.epoch).split(self.batch_size)
        share = self.batch_size // self.num_replicas
        for batch in batches[: len(self)]:
            yield Draw(batch[self.rank * share : (self.rank + 1) * share].tolist(), self.epoch)


class EvaluationSampler(DistributedSampler[Draw]):
    """Batches in order; every image belongs to exactly one process.

    Batch b holds images bB, ..., bB + B − 1, where B is ``batch_size``, and process r of W gets every W-th of them, the
    r-th first. All processes have as many batches: fewer than W images at the end are added to the batch before.

    >>> [list(draw.indices) for draw in EvaluationSampler(length=9, batch_size=4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    >>> [list(draw.indices) for draw in EvaluationSampler(length=9, batch_size=4, rank=0, world_size=2)]
    [[0, 2], [4, 6, 8]]
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.batch_size = length, batch_size
        self.rank, self.num_replicas, self.epoch = rank, world_size, 0

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch_size)
        return max(1, whole + (rest >= self.num_replicas))

    def __iter__(self) -> Iterator[Draw]:
        for batch in range(len(self)):
            end = self.length if batch == len(self) - 1 else (batch + 1) * self.batch_size
            yield Draw(range(batch * self.batch_size + self.rank, end, self.num_replicas))


PARTS = ("train", "valid", "test")
_PARTS_OF_STAGES = {"fit": PARTS[:2], "validate": ("valid",), "test": ("test",), "predict": ("test",), None: PARTS}


class Source(Sized, Protocol):
    """Numbered things, in memory or in files."""

    def take(self, indices: Any) -> Any:
        """The things with the numbers ``indices``, in this order, as a batch."""


class InMemory:
    """Tensors with one entry for each thing, ``(N, …)``: a batch is the tuple of those chosen. Some may be None."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors: tuple[Any, ...] = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def take(self, indices: Sequence[int] | slice) -> tuple[Any, ...]:
        chosen = indices if isinstance(indices, slice) else torch.as_tensor(indices)
        return tuple(None if values is None else values[chosen] for values in self.tensors)


class RandomChange:
    """A change of batches by random numbers: each thing gets its own, new ones in each epoch.

    They are a function of the seed, the epoch and the index of the thing: not of the batch, the worker or the process.
    From a generator ``numbers`` makes arrays with one entry for each thing of the part; ``change`` takes a batch and
    those of its things ``(B, …)``. Further numbers ``more`` of the seed keep different changes apart.
    """

    def __init__(
        self, change: Callable[..., Any], numbers: Callable[[np.random.Generator], Sequence[Any]], seed: int, *more: int
    ) -> None:
        self.change, self.numbers, self.seed, self.more = change, numbers, seed, more
        self._epoch: int | None = None

    def __call__(self, batch: Any, draw: Draw) -> Any:
        if draw.epoch != self._epoch:
            self._drawn = self.numbers(np.random.default_rng((self.seed, draw.epoch, *self.more)))
            self._epoch = draw.epoch
        chosen = np.asarray(draw.indices)
        return self.change(batch, *(torch.from_numpy(np.asarray(values)[chosen]) for values in self._drawn))


def random_choices(choices: int, count: int, generator: np.random.Generator) -> tuple[npt.NDArray[np.int64]]:
    """One number below ``choices`` for each of ``count`` things."""
    return (generator.integers(choices, size=count),)


class Batches(Dataset[Any]):
    """A data set whose items are whole batches of ``source``, to which ``changes`` are applied in their order."""

    def __init__(self, source: Source, *changes: Callable[[Any, Draw], Any]) -> None:
        self.source, self.changes = source, changes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Any:
        batch = self.source.take(draw.indices)
        for change in self.changes:
            batch = change(batch, draw)
        return batch


class DataInParts(pl.LightningDataModule, ABC):
    """Data in three parts, ``"train"``, ``"valid"`` and ``"test"``, in reproducible batches.

    A training batch is a function of the seed, the epoch and its number: not of the number of processes or workers, or
    of whether the run was interrupted after an earlier epoch. Validation and tests see every sample exactly once.

    A subclass defines the content of the data set and its place.

    Args:
        batch_size: things in a training step over all processes together; a multiple of their number.
        seed: of the order of the training part, of random changes of it, and of data that is generated.
        num_workers: processes that prepare batches; 0 for the training process, which suffices for small images.
        eval_batch_size: things in a validation or test step over all processes together; by default ``batch_size``.
        limits: of each part, use the first so many only; ``None`` for all.
        drop_last: whether what does not fill a batch is left out of an epoch; if not, it is a smaller batch.

    Raises:
        UserError: an argument cannot be met; ``batch_size`` does not suit the data or the number of processes.
    """

    things: ClassVar[str]
    """The content of batches, for people: a plural."""

    validates: bool = True
    """Whether there is a validation part, by which an epoch can be chosen."""

    def __init__(
        self,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        eval_batch_size: int | None = None,
        limits: Mapping[str, int | None] | None = None,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        self.batch_size, self.seed, self.num_workers, self.drop_last = batch_size, seed, num_workers, drop_last
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.limits = dict(limits or {})
        self._sources: dict[str, Source] = {}
        counts = {"batch_size": batch_size, "eval_batch_size": self.eval_batch_size}
        counts |= {f"limit_{part}": limit for part, limit in self.limits.items() if limit is not None}
        integers(1, **counts)
        integers(0, seed=seed, num_workers=num_workers)

    @abstractmethod
    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        """The parts asked for, at least the first so many of each."""

    @abstractmethod
    def _batches(self, part: str) -> Batches:
        """A data set that answers a :class:`Draw` with a batch."""

    def setup(self, stage: str | None = None) -> None:
        """Load the parts of a stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, or all of them."""
        if stage not in _PARTS_OF_STAGES:
            raise UserError(f"stage must be one of {', '.join(filter(None, _PARTS_OF_STAGES))}, got {stage!r}")
        if stage == "validate" and not self.validates:
            raise UserError(f"stage: got 'validate', but all {self.things} train, and none are left to validate")
        wanted = [part for part in _PARTS_OF_STAGES[stage] if self.validates or part != "valid"]
        parts = {part: self.limits.get(part) for part in wanted if part not in self._sources}
        if parts:
            self._sources.update(self._load(parts))
        for part, limit in parts.items():
            if limit is not None and limit > (count := len(self._sources[part])):
                message = f"limit_{part}: got {limit}, but there are {count:,} {self.things}: all of them are used"
                warnings.warn(message, stacklevel=2)

    def train_dataloader(self) -> DataLoader[Any]:
        rank, world_size = self._process("batch_size")
        count = self._count("train")
        if not self.drop_last and world_size > 1:
            raise UserError("drop_last: got false, which needs a single process: a smaller batch has no equal shares")
        if self.drop_last and count < self.batch_size:
            raise UserError(
                f"batch_size must be at most the number of training {self.things}, got {self.batch_size} for {count}:"
                " an epoch leaves out what does not fill a batch"
            )
        sampler = TrainingSampler(count, self.batch_size, self.seed, rank, world_size, self.drop_last)
        # Lightning sets the epoch, but where a run is resumed with workers, it lets them begin before that.
        if self.trainer is not None:
            sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        return self._loader("train", sampler)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return self._evaluation_loader("valid") if self.validates else []

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    predict_dataloader = test_dataloader

    def _process(self, name: str) -> tuple[int, int]:
        """Rank and number of the processes, which share batches of the size called ``name``."""
        rank, world_size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        if (size := getattr(self, name)) % world_size:
            raise UserError(
                f"{name} must be a multiple of the number of processes, got {size} for {world_size}: it is the number"
                f" of {self.things} in a step over all of them together"
            )
        return rank, world_size

    def source(self, part: str) -> Any:
        """The things of a part that is loaded; their ``take`` gives batches by indices."""
        if part not in self._sources:
            raise UserError(f"the {part} {self.things} are not loaded: call prepare_data() and setup() first")
        return self._sources[part]

    def _count(self, part: str) -> int:
        length, limit = len(self.source(part)), self.limits.get(part)
        return length if limit is None else min(length, limit)

    def _evaluation_loader(self, part: str) -> DataLoader[Any]:
        rank, world_size = self._process("eval_batch_size")
        if (count := self._count(part)) < world_size:
            counts = f"got {count} for {world_size}"
            raise UserError(f"the {part} {self.things} must be at least as many as the processes, {counts}")
        return self._loader(part, EvaluationSampler(count, self.eval_batch_size, rank, world_size))

    def _loader(self, part: str, sampler: TrainingSampler | EvaluationSampler) -> DataLoader[Any]:
        # With batch_size=None a whole draw goes to the data set, which answers with a batch.
        return DataLoader(
            self._batches(part),
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )


def in_range(least: float, most: float = math.inf, /, **values: float) -> None:
    """Raise a :class:`UserError` if a value, given by its name, is no number from ``least`` to ``most``."""
    for name, value in values.items():
        if not value >= least:
            raise UserError(f"{name} must be at least {least}, got {value}")
        if value > most:
            raise UserError(f"{name} must be at most {most}, got {value}")


def integers(least: int, most: float = math.inf, /, **values: Any) -> None:
    """Raise a :class:`UserError` if a value, given by its name, is no integer from ``least`` to ``most``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{name} must be an integer, got {value!r}")
    in_range(least, most, **values)


def one_of(choices: tuple[Any, ...], **values: Any) -> None:
    """Raise a :class:`UserError` if a value, given by its name, is not among ``choices``."""
    for name, value in values.items():
        if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
            raise UserError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


class GeneratedData(DataInParts, ABC):
    """Data that the package makes: ``num_train``, ``num_valid`` and ``num_test`` things."""

    def __init__(self, num_train: int, num_valid: int, num_test: int, **options: Any) -> None:
        super().__init__(limits=None, **options)
        integers(1, num_train=num_train, num_valid=num_valid, num_test=num_test)
        self.sizes = {"train": num_train, "valid": num_valid, "test": num_test}

    @abstractmethod
    def _make(self, part: str) -> Source:
        """The things of a part."""

    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        return {part: self._make(part) for part in parts}


class PublishedData(DataInParts, ABC):
    """Data in three parts that is read from published files in a folder.

    Args:
        folder: the folder to look in, and to download into; it must exist. By default ``$ESCNN_ATTENTION_DATA``, or
            ``~/.cache/escnn-attention``, which is made.
        limit_train, limit_valid, limit_test: of each part, use the first so many only.
        download: whether to download what the folder lacks.
        **options: of :class:`DataInParts`, such as ``batch_size``.

    Raises:
        UserError: as :class:`DataInParts` raises; the data cannot be had, or a file is damaged.
    """

    files: str
    """The files that are looked for, for people."""

    def __init__(
        self,
        folder: Path | None = None,
        limit_train: int | None = None,
        limit_valid: int | None = None,
        limit_test: int | None = None,
        download: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(limits={"train": limit_train, "valid": limit_valid, "test": limit_test}, **options)
        self.folder, self.download = folder, download

    @abstractmethod
    def _prepare_folder(self, folder: Path) -> None:
        """Download what ``folder`` lacks if :attr:`download` allows it, and unpack what cannot be read packed."""

    @abstractmethod
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        """The parts asked for, at least the first so many of each. A file that is not there is an error."""

    def prepare_data(self) -> None:
        """Download files. Lightning calls it in one process of a node."""
        self._prepare_folder(self._folder())

    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        folder = self._folder()
        try:
            return self._read(folder, parts)
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise UserError(
                f"{folder} does not hold {self.files}: copy it there, name another folder with `folder` or the"
                f" environment variable {ENVIRONMENT}, or leave `download` at true and call prepare_data()"
            ) from error

    def _folder(self) -> Path:
        return data_folder(self.folder, self.files)
