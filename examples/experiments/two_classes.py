"""Two classes of CIFAR-10: a small stand-in for a data set with two classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from escnn_attention.training import CIFAR10
from escnn_attention.training.data.base import InMemory

_MORE = 7  # times as many images are read as needed: two of ten classes count


class AirplanesAndCars(CIFAR10):
    """The airplanes (class 0) and cars (class 1) of CIFAR-10; the options are those of :class:`CIFAR10`."""

    num_classes = 2

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        wider = {part: None if limit is None else _MORE * limit for part, limit in parts.items()}
        chosen = {part: _of_two(source) for part, source in super()._read(folder, wider).items()}
        short = {part: None for part, limit in parts.items() if limit is not None and len(chosen[part]) < limit}
        if short:
            chosen |= {part: _of_two(source) for part, source in super()._read(folder, short).items()}
        return chosen


def _of_two(source: InMemory) -> InMemory:
    images, labels = source.take(slice(None))
    kept = labels < AirplanesAndCars.num_classes
    return InMemory(images[kept], labels[kept])
