"""What a data set of images is to the comparison."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Split:
    """Images and what they show.

    Attributes:
        images: (N, H, W) float32, from 0 (background) to 1.
        labels: (N,) int64.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        """The first ``count`` images (all of them for ``None``)."""
        return Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class ImageData:
    """A data set with its three parts.

    Attributes:
        name: ``"digits"`` or ``"rotmnist"``.
        train, valid, test: the parts. The validation part is only watched: nothing is selected by it.
        num_classes: number of classes.
        source: where the images come from, for people.
        upright: what an image that is not turned any further is like in this data set, for people.
    """

    name: str
    train: Split
    valid: Split
    test: Split
    num_classes: int
    source: str
    upright: str

    @property
    def size(self) -> int:
        """Side of the square images in pixels."""
        return int(self.train.images.shape[-1])

    def normalisation(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        return float(self.train.images.mean()), float(self.train.images.std())

    def limited(self, train: int | None, test: int | None) -> ImageData:
        """The same data with the first ``train`` training and the first ``test`` test images only."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))

    def fingerprint(self) -> str:
        """A digest of all images and labels: equal for equal data, wherever it was read from."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid, self.test):
            digest.update(repr(part.images.shape).encode())
            digest.update(np.ascontiguousarray(part.images).tobytes())
            digest.update(np.ascontiguousarray(part.labels).tobytes())
        return digest.hexdigest()[:16]
