"""What the data modules of all clouds of points have in common."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from escnn_attention.training.data.clouds.batch import Clouds, CloudSource
from escnn_attention.training.data.clouds.motions import About, Motions, RandomMotions, Rotation, move
from escnn_attention.training.data.parts import DataInParts, at_least, one_of
from escnn_attention.training.data.published import PublishedData
from escnn_attention.training.data.sampling import Draw
from escnn_attention.training.errors import UserError

__all__ = ["CloudBatches", "GeneratedClouds", "PointClouds", "PublishedClouds"]

_PART_NUMBER = {"train": 0, "valid": 1, "test": 2}
_BLOCK = 64  # clouds that are made from one seed


class CloudBatches(Dataset[Clouds]):
    """A data set whose items are whole batches.

    Args:
        source: the clouds.
        motions: what moves them, if anything does.
        mover: what a motion does to a batch.
    """

    def __init__(
        self,
        source: CloudSource,
        motions: RandomMotions | None = None,
        mover: Callable[[Clouds, Motions], Clouds] = move,
    ) -> None:
        self.source, self.motions, self.mover = source, motions, mover

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Clouds:
        clouds = self.source.take(draw.indices)
        return clouds if self.motions is None else self.mover(clouds, self.motions(draw))


class PointClouds(DataInParts):
    """A data set of clouds of points in three parts, ``"train"``, ``"valid"`` and ``"test"``.

    A batch is :class:`Clouds`. A training batch is a function of the seed, the epoch and its number: of neither the
    number of processes, nor of workers, nor of whether the run was interrupted after an earlier epoch. What does not
    fill a batch at the end of an epoch is left out. Of the validation and test clouds every one is seen exactly once.

    Args:
        batch_size: clouds in a training step over all processes together; a multiple of their number.
        seed: of the order of the training clouds, of their motions, and of what is generated.
        num_workers: processes that prepare batches; 0 does it in the training process.
        eval_batch_size: clouds in a validation or test step over all processes together; by default ``batch_size``.
        rotate_train: rotate each training cloud at random, another one in each epoch: ``True``, or in three
            dimensions ``"z"`` for rotations about the third axis.
        rotate_test: rotate each test cloud at random in a way that depends on the seed only. Validation clouds are
            left as they are.
        translate_train: move each training cloud by a normal vector with this standard deviation along each axis.
        translate_test: likewise for test clouds.
        rotate_about: the mean of the points of each cloud, or the origin.
        reflect_train: mirror each training cloud with probability ½, another half of them in each epoch. For targets
            that a mirror image has, too.

    Attributes:
        dim: d.
        in_channels: channels of the features.

    Raises:
        UserError: an argument, or the combination of ``batch_size`` with the data or the number of processes, cannot
            be met.

    Example:
        >>> from escnn_attention.training import Springs
        >>> data = Springs(num_train=8, batch_size=4, rotate_train=True)  # a PointClouds
        >>> data.setup("fit")
        >>> data.dim, data.in_channels, len(data.train_dataloader())
        (2, 2, 2)
    """

    things = "clouds"
    dim: int
    in_channels: int

    def __init__(
        self,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        eval_batch_size: int | None = None,
        rotate_train: Rotation = False,
        rotate_test: Rotation = False,
        translate_train: float = 0.0,
        translate_test: float = 0.0,
        rotate_about: About = "mean",
        reflect_train: bool = False,
        limits: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, eval_batch_size, limits or {})
        self.rotate_train: Rotation = rotate_train
        self.rotate_test: Rotation = rotate_test
        self.translate_train = translate_train
        self.translate_test = translate_test
        self.rotate_about: About = rotate_about
        self.reflect_train = reflect_train
        one_of((False, True, "z"), rotate_train=rotate_train, rotate_test=rotate_test)
        one_of(("mean", "origin"), rotate_about=rotate_about)
        one_of((False, True), reflect_train=reflect_train)
        at_least(0, translate_train=translate_train, translate_test=translate_test)
        for name, rotate in (("rotate_train", rotate_train), ("rotate_test", rotate_test)):
            if rotate == "z" and self.dim != 3:
                raise UserError(f'{name}: got "z", but the clouds have {self.dim} dimensions: needed true or false')

    def _mover(self) -> Callable[[Clouds, Motions], Clouds]:
        """What a motion does to a batch."""
        return functools.partial(move, about=self.rotate_about)

    def _batches(self, part: str) -> CloudBatches:
        source: Any = self._sources[part]
        rotate, translate = {
            "train": (self.rotate_train, self.translate_train),
            "valid": (False, 0.0),
            "test": (self.rotate_test, self.translate_test),
        }[part]
        reflect = self.reflect_train and part == "train"
        if not rotate and not translate and not reflect:
            return CloudBatches(source)
        motions = RandomMotions(len(source), self.dim, rotate, translate, self.seed, _PART_NUMBER[part], reflect)
        return CloudBatches(source, motions, self._mover())


class GeneratedClouds(PointClouds):
    """Clouds that the package makes: each is a function of the seed, its part and its number in it.

    So the parts have nothing in common, and with a greater ``num_train`` the first clouds stay the same, and those to
    validate and to test do.

    Args:
        num_train, num_valid, num_test: clouds of each part.
        **options: ``batch_size``, ``seed``, ``num_workers``, ``eval_batch_size``, ``rotate_train``, ``rotate_test``,
            ``translate_train``, ``translate_test``, ``rotate_about``, ``reflect_train``: see
            :class:`PointClouds`.
    """

    def __init__(self, num_train: int, num_valid: int, num_test: int, **options: Any) -> None:
        super().__init__(limits=None, **options)
        self.sizes = {"train": num_train, "valid": num_valid, "test": num_test}
        at_least(1, num_train=num_train, num_valid=num_valid, num_test=num_test)

    @abstractmethod
    def _make(self, part: str) -> CloudSource:
        """The clouds of a part."""

    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, CloudSource]:
        return {part: self._make(part) for part in parts}

    def _in_blocks(
        self, part: str, make: Callable[[int, np.random.Generator], tuple[npt.NDArray[Any], ...]]
    ) -> tuple[npt.NDArray[Any], ...]:
        """Arrays of one entry a cloud of ``part``, made by ``make`` in blocks with random numbers of their own."""
        count = self.sizes[part]
        blocks = [
            make(_BLOCK, np.random.default_rng((self.seed, _PART_NUMBER[part], block)))
            for block in range(-(-count // _BLOCK))
        ]
        return tuple(np.concatenate(arrays)[:count] for arrays in zip(*blocks, strict=True))


class PublishedClouds(PublishedData, PointClouds):
    """Clouds from published files.

    Args:
        folder: the folder to look in, and to download into; it must exist. By default ``$ESCNN_ATTENTION_DATA``, or
            ``~/.cache/escnn-attention``, which is made.
        limit_train, limit_valid, limit_test: use the first so many clouds only.
        download: whether to download what the folder lacks.
        **options: ``batch_size``, ``seed``, ``num_workers``, ``eval_batch_size``, ``rotate_train``, ``rotate_test``,
            ``translate_train``, ``translate_test``, ``rotate_about``, ``reflect_train``: see
            :class:`PointClouds`.

    Raises:
        UserError: also where the data is not there and cannot be had, or a file is damaged.

    Example:
        >>> from escnn_attention.training import ModelNet40
        >>> data = ModelNet40(limit_train=64, download=False, rotate_train="z")  # a PublishedClouds
        >>> data.dim, data.download
        (3, False)
    """

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
        self.folder = folder
        self.download = download

    @abstractmethod
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, CloudSource] | None:
        """The parts asked for, at least their first so many clouds, or ``None`` where the folder lacks a file."""
