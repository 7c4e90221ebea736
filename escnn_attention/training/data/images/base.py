"""Images in memory, their augmentation and batches, and data modules of images."""

from __future__ import annotations

import functools
import math
from abc import ABC
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from escnn_attention.training.data.base import Batches, Draw, PublishedData, RandomChange, Source, in_range
from escnn_attention.training.errors import UserError

Augmentation = Callable[[Tensor, Draw], Tensor]
"""A change of the images (B, C, H, W) of a draw, with values in the range of bytes."""

_ROTATIONS = 1  # their random numbers, beside those of crops


def random_crops(count: int, padding: int, seed: int) -> RandomChange:
    """Mirror images left to right with probability 1/2 and move them by up to ``padding`` pixels along each axis."""
    change = functools.partial(flip_and_crop, padding=padding)
    return RandomChange(change, functools.partial(_flips_and_corners, count, padding), seed)


def _flips_and_corners(count: int, padding: int, generator: np.random.Generator) -> tuple[Any, ...]:
    flips = generator.integers(2, size=count, dtype=np.int64) == 1
    return flips, generator.integers(2 * padding + 1, size=(count, 2), dtype=np.int64)


def flip_and_crop(images: Tensor, flips: Tensor, corners: Tensor, padding: int) -> Tensor:
    """Windows of the size of the images from the images with a frame of zeros of ``padding`` pixels, perhaps mirrored.

    The ``corners`` (B, 2) are row and column of the window's upper left corner, from 0 to 2 × ``padding``.
    """
    height, width = images.shape[-2:]
    windows = nn.functional.pad(images, 4 * (padding,)).unfold(2, height, 1).unfold(3, width, 1)
    chosen = windows[torch.arange(len(images)), :, corners[:, 0], corners[:, 1]]
    return torch.where(flips[:, None, None, None], chosen.flip(3), chosen)


def random_rotations(count: int, degrees: float, seed: int, white: int = 255) -> RandomChange:
    """Rotate images about their centre, each by an angle that is uniform between 0 and ``degrees``, counterclockwise.

    Pixels are interpolated by :func:`rotate_images` and held between black and ``white``.
    """
    change = functools.partial(_rotated_and_held, white=white)
    return RandomChange(change, functools.partial(_angles, count, degrees), seed, _ROTATIONS)


def _angles(count: int, degrees: float, generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.uniform(0, math.radians(degrees), count),)


def _rotated_and_held(images: Tensor, angles: Tensor, white: int) -> Tensor:
    return rotate_images(images, angles).clamp_(0, white)


def rotate_images(images: Tensor, angles: Tensor, mode: str = "bicubic") -> Tensor:
    """Images (B, C, H, W) rotated about their centre counterclockwise by ``angles`` (B,) in radians; bytes in float32.

    They are interpolated by PyTorch's ``grid_sample`` in a ``mode``, with zeros around them.
    """
    height, width = images.shape[-2:]
    cos, sin = angles.cos(), angles.sin()
    # Where a pixel comes from, in units of half the sides between the centres of the outermost pixels, y down.
    aspect = max(height - 1, 1) / max(width - 1, 1)
    rows = [cos, -sin * aspect, torch.zeros_like(cos), sin / aspect, cos, torch.zeros_like(cos)]
    grid = nn.functional.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [*images.shape], align_corners=True)
    pixels = images if images.is_floating_point() else images.to(torch.float32)
    return nn.functional.grid_sample(pixels, grid.to(pixels), mode=mode, align_corners=True)


def image_batches(
    source: Source, mean: Sequence[float], std: Sequence[float], augment: Sequence[Augmentation] = (), white: int = 255
) -> Batches:
    """Batches of images (B, C, H, W) float32, normalised after the changes ``augment``, and labels (B,) int64 or None.

    ``mean`` and ``std`` are one number a channel, in units of ``white``.
    """
    scale = tuple(torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return Batches(source, functools.partial(_prepared, tuple(augment), white, scale))


def _prepared(
    augment: Sequence[Augmentation], white: int, scale: tuple[Tensor, ...], batch: tuple[Tensor, Any], draw: Draw
) -> tuple[Tensor, Any]:
    images, labels = batch
    for change in augment:
        images = change(images, draw)
    mean, std = scale
    return images.to(torch.float32).div_(white).sub_(mean).div_(std), labels


class PublishedImages(PublishedData, ABC):
    """A published data set of images in three parts, ``"train"``, ``"valid"`` and ``"test"``.

    A batch is a pair of images (B, C, H, W) float32, normalised channel by channel, and labels (B,) int64.

    Args:
        folder, options: of :class:`~escnn_attention.training.data.base.PublishedData`.
        mean, std: by which the images are normalised: of pixels between 0 and 1, channel by channel; by default those
            of the data set.
        rotate_train: rotate each training image about its centre, in each epoch by another angle between 0 and this
            many degrees. 360 gives all rotations; 360/N suffices for a network that rotations by 360°/N do not change.

    Attributes:
        in_channels: C.
        num_classes: the labels run from 0 to ``num_classes`` − 1.
        size: H = W.
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
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        rotate_train: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.rotate_train = rotate_train
        in_range(0, 360, rotate_train=rotate_train)
        given = {name: values for name, values in (("mean", mean), ("std", std)) if values is not None}
        for name, values in given.items():
            if len(values) != self.in_channels:
                raise UserError(f"{name}: got {len(values)} numbers, needed one for each channel, {self.in_channels}")
            setattr(self, name, tuple(values))

    def _augmentations(self, count: int) -> list[Augmentation]:
        """The changes of ``count`` training images before they are normalised."""
        return [random_rotations(count, self.rotate_train, self.seed, self.white)] if self.rotate_train else []

    def _batches(self, part: str) -> Batches:
        augment = self._augmentations(self._count(part)) if part == "train" else ()
        return image_batches(self._sources[part], self.mean, self.std, augment, self.white)
