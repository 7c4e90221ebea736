"""Data sets with images of half the width and height, for small versions on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from escnn_attention.training import CIFAR10, PatchCamelyon, RotMNIST
from escnn_attention.training.data.images.base import PublishedImages, Source
from examples.experiments.two_classes import AirplanesAndCars


class _Halved:
    """The images of a source with means over 2×2 pixels, which commute with quarter turns and flips."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images, labels = self.source.take(indices)
        return torch.nn.functional.avg_pool2d(images.to(torch.float32), 2).round().to(torch.uint8), labels


class _HalfSize(PublishedImages):
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        return {part: _Halved(source) for part, source in super()._read(folder, parts).items()}


class HalfRotMNIST(_HalfSize, RotMNIST):
    """Rotated MNIST of 14×14; the options are those of :class:`RotMNIST`."""

    size = RotMNIST.size // 2


class HalfCIFAR10(_HalfSize, CIFAR10):
    """CIFAR-10 of 16×16; the options are those of :class:`CIFAR10`."""

    size = CIFAR10.size // 2


class HalfPatchCamelyon(_HalfSize, PatchCamelyon):
    """PatchCamelyon of 48×48; the options are those of :class:`PatchCamelyon`."""

    size = PatchCamelyon.size // 2


class HalfAirplanesAndCars(_HalfSize, AirplanesAndCars):
    """Two classes of CIFAR-10 of 16×16; the options are those of :class:`CIFAR10`."""

    size = AirplanesAndCars.size // 2
