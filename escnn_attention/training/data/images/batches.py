"""Images in memory, or in a file, as a network takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from escnn_attention.training.data.sampling import Draw


class ImageSource(Protocol):
    """Images and what they show, wherever they are."""

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Images (B, C, H, W), mostly uint8, and labels (B,) int64, or None where these are not known."""
        ...


Augmentation = Callable[[Tensor, Draw], Tensor]
"""What is done to the images (B, C, H, W) of a draw, in the range of bytes."""


class ImagesInMemory:
    """Images that are kept as they are, mostly as bytes.

    Args:
        images: (N, C, H, W), mostly uint8.
        labels: (N,) int64, or None.
    """

    def __init__(self, images: Tensor, labels: Tensor | None) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], None if self.labels is None else self.labels[chosen]


class FlipAndCrop:
    """Mirror images left to right with probability 1/2 and move them by up to ``padding`` pixels along each axis.

    Pixels that come in from outside are black (0 before normalisation). What happens to an image is a function of the
    seed, the epoch and its index: it does not depend on the batch, the worker or the process that the image is in.

    Args:
        length: number of images.
        padding: the furthest move, in pixels.
        seed: of the random numbers.
    """

    def __init__(self, length: int, padding: int, seed: int) -> None:
        self.length, self.padding, self.seed = length, padding, seed
        self._epoch = -1
        self._flips, self._moves = np.empty(0, dtype=bool), np.empty((0, 2), dtype=np.int64)

    def __call__(self, images: Tensor, draw: Draw) -> Tensor:
        """The images (B, C, H, W) of ``draw``, each changed in its own way."""
        if draw.epoch != self._epoch:
            generator = np.random.default_rng((self.seed, draw.epoch))
            self._flips = generator.integers(2, size=self.length, dtype=np.int64) == 1
            self._moves = generator.integers(2 * self.padding + 1, size=(self.length, 2), dtype=np.int64)
            self._epoch = draw.epoch
        chosen = np.asarray(draw.indices)
        return flip_and_crop(
            images, self.padding, torch.from_numpy(self._flips[chosen]), torch.from_numpy(self._moves[chosen])
        )


def flip_and_crop(images: Tensor, padding: int, flips: Tensor, corners: Tensor) -> Tensor:
    """Windows of the size of the images from the images with a black frame, mirrored where ``flips`` says so.

    Args:
        images: (B, C, H, W).
        padding: width of the frame in pixels.
        flips: (B,) bool.
        corners: (B, 2) row and column of the window's upper left corner, from 0 to 2 × ``padding``.
    """
    height, width = images.shape[-2:]
    windows = nn.functional.pad(images, 4 * (padding,)).unfold(2, height, 1).unfold(3, width, 1)
    chosen = windows[torch.arange(len(images)), :, corners[:, 0], corners[:, 1]]
    return torch.where(flips[:, None, None, None], chosen.flip(3), chosen)


class RandomRotations:
    """Rotate images about their centre, each by an angle that is uniform between 0 and ``degrees``, counterclockwise.

    Pixels are interpolated by cubic polynomials and held between black and white; by multiples of 90° they only move.
    What comes in from outside is black (0 before normalisation). The angle of an image is a function of the seed, the
    epoch and its index, as in :class:`FlipAndCrop`.

    Args:
        length: number of images.
        degrees: the largest angle. For a network that no rotation by 360°/N changes, 360/N is as good as 360.
        seed: of the random numbers.
        white: the highest value of a pixel.

    Example:
        >>> import torch
        >>> from escnn_attention.training.data.images.batches import RandomRotations
        >>> from escnn_attention.training.data.sampling import Draw
        >>> RandomRotations(length=10, degrees=90.0, seed=0)(torch.zeros(2, 1, 8, 8), Draw([3, 7])).shape
        torch.Size([2, 1, 8, 8])
    """

    _STREAM = 1  # of random numbers, beside those of other changes

    def __init__(self, length: int, degrees: float, seed: int, white: int = 255) -> None:
        self.length, self.degrees, self.seed, self.white = length, degrees, seed, white
        self._epoch = -1
        self._angles = np.empty(0)

    def __call__(self, images: Tensor, draw: Draw) -> Tensor:
        """The images (B, C, H, W) of ``draw``, rotated, in float32."""
        if draw.epoch != self._epoch:
            generator = np.random.default_rng((self.seed, draw.epoch, self._STREAM))
            self._angles = generator.uniform(0, math.radians(self.degrees), self.length)
            self._epoch = draw.epoch
        return rotate_images(images, torch.from_numpy(self._angles[np.asarray(draw.indices)])).clamp_(0, self.white)


def rotate_images(images: Tensor, angles: Tensor) -> Tensor:
    """Images rotated about their centre.

    Args:
        images: (B, C, H, W); around them there is nothing but zeros.
        angles: (B,) float64, in radians, counterclockwise.

    Returns:
        (B, C, H, W) float32.
    """
    height, width = images.shape[-2:]
    cos, sin = angles.cos(), angles.sin()
    # Where a pixel comes from, in units of half the sides between the centres of the outermost pixels, y down.
    aspect = max(height - 1, 1) / max(width - 1, 1)
    rows = [cos, -sin * aspect, torch.zeros_like(cos), sin / aspect, cos, torch.zeros_like(cos)]
    grid = nn.functional.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [*images.shape], align_corners=True)
    pixels = images.to(torch.float32)
    return nn.functional.grid_sample(pixels, grid.to(pixels), mode="bicubic", align_corners=True)


class Batches(Dataset[tuple[Tensor, Tensor | None]]):
    """A data set whose items are whole batches: images (B, C, H, W) float32, normalised, and labels (B,) int64 or None.

    Args:
        source: the images.
        mean: one number per channel, of pixels between 0 and 1.
        std: likewise, the standard deviation.
        augment: what is done to training images before that, one change after the other.
        white: the value of a pixel that counts as 1.
    """

    def __init__(
        self,
        source: ImageSource,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Sequence[Augmentation] = (),
        white: int = 255,
    ) -> None:
        self.source, self.augment, self.white = source, tuple(augment), white
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor | None]:
        images, labels = self.source.take(draw.indices)
        for change in self.augment:
            images = change(images, draw)
        return images.to(torch.float32).div_(self.white).sub_(self.mean).div_(self.std), labels
