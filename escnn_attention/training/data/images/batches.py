"""Images in memory, or in a file, as a network takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from escnn_attention.training.data.sampling import Draw


class ImageSource(Protocol):
    """Images and what they show, wherever they are."""

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 and labels (B,) int64."""
        ...


class ImagesInMemory:
    """Images that are kept as bytes.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


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


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose items are whole batches: images (B, C, H, W) float32, normalised, and labels (B,) int64.

    Args:
        source: the images.
        mean: one number per channel, of pixels between 0 and 1.
        std: likewise, the standard deviation.
        augment: what is done to training images before that.
        white: the value of a pixel that counts as 1.
    """

    def __init__(
        self,
        source: ImageSource,
        mean: Sequence[float],
        std: Sequence[float],
        augment: FlipAndCrop | None = None,
        white: int = 255,
    ) -> None:
        self.source, self.augment, self.white = source, augment, white
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor]:
        images, labels = self.source.take(draw.indices)
        if self.augment is not None:
            images = self.augment(images, draw)
        return images.to(torch.float32).div_(self.white).sub_(self.mean).div_(self.std), labels
