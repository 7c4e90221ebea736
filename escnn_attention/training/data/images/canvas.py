"""Several digits on a larger canvas, each pixel with the digit that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from escnn_attention.training.data.base import PARTS, InMemory, integers, one_of
from escnn_attention.training.data.images.base import PublishedImages, rotate_images
from escnn_attention.training.data.images.digits import SIZE, Digits
from escnn_attention.training.data.images.mnist import MNIST
from escnn_attention.training.data.images.rotmnist import RotMNIST
from escnn_attention.training.errors import UserError

DigitSource = Literal["digits", "mnist", "rotmnist"]

_CROP = 3  # off each side of MNIST's images: 1 % of the ink is there
_TRIALS = 200  # to place all digits of a canvas


class DigitCanvas(PublishedImages):
    """Digits at random places of a black canvas, and for each pixel its class: 0 is the background, c + 1 the digit c.

    Canvases are made once, from the images of each part of a data set of digits with the ``seed`` of the canvases.
    Digits do not overlap. A pixel at least half as bright as white belongs to the digit in whose square it is.

    Args:
        size: the side of a canvas in pixels.
        digits: the number of digits on each.
        source: the digits: ``"digits"``, those of scikit-learn, which need no files; ``"mnist"`` or ``"rotmnist"``,
            which are looked for in ``folder``.
        digit_size: the side of a digit in pixels. The middle 22×22 pixels of MNIST's images are shrunk to it, with
            antialiasing.
        num_train, num_valid, num_test: the numbers of canvases.
        rotate_test: whether each test canvas is rotated about its centre by an angle of its own.
        canvas_seed: of places, choices of digits and angles.
        options: those of :class:`~.base.PublishedImages`, such as ``folder`` and ``batch_size``. ``rotate_train`` is
            not among them: it would not rotate the classes.

    Raises:
        UserError: an unknown source, a canvas that is too small for its digits, digits larger than those of MNIST or
            smaller than 8, ``rotate_train``, or as :class:`~.base.PublishedImages` raises.

    In a configuration file::

        task: segmentation
        data:
          class_path: escnn_attention.training.DigitCanvas
          init_args:
            batch_size: 16

    >>> data = DigitCanvas(num_train=16, batch_size=8)
    >>> data.setup("fit")
    >>> images, labels = next(iter(data.train_dataloader()))
    >>> images.shape, labels.shape
    (torch.Size([8, 1, 48, 48]), torch.Size([8, 48, 48]))
    """

    in_channels = 1
    num_classes = 11
    mean = (0.103,)
    std = (0.249,)

    def __init__(
        self,
        size: int = 48,
        digits: int = 3,
        source: DigitSource = "digits",
        digit_size: int = 16,
        num_train: int = 2000,
        num_valid: int = 300,
        num_test: int = 600,
        rotate_test: bool = False,
        canvas_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of(get_args(DigitSource), source=source)
        counts = {"num_train": num_train, "num_valid": num_valid, "num_test": num_test, "digits": digits}
        integers(1, size=size, **counts)
        integers(0, canvas_seed=canvas_seed)
        integers(SIZE, digit_size=digit_size)
        if self.rotate_train:
            raise UserError("rotate_train: got a rotation of the images alone, needed 0: classes of pixels stay")
        self.source_name, self.size, self.digits, self.digit_size = source, size, digits, digit_size
        self.numbers = dict(zip(PARTS, (num_train, num_valid, num_test), strict=True))
        self.rotate_test, self.canvas_seed = rotate_test, canvas_seed
        self.digit_data = self._data_of_digits(options.get("folder"), self.download)
        if digit_size > self.digit_data.size:
            raise UserError(f"digit_size: got {digit_size}, needed at most {self.digit_data.size}, that of {source!r}")
        # Digits stay inside when the canvas is rotated.
        self._reach = size / 2 - digit_size / math.sqrt(2)
        self._places(np.random.default_rng(0))

    @property
    def files(self) -> str:  # type: ignore[override]
        """The files of the digits."""
        return self.digit_data.files

    def _data_of_digits(self, folder: Path | None, download: bool) -> PublishedImages:
        if self.source_name == "digits":
            return Digits(self.digit_size)
        kind: type[MNIST] | type[RotMNIST] = MNIST if self.source_name == "mnist" else RotMNIST
        return kind(folder=folder, download=download)

    def _prepare_folder(self, folder: Path) -> None:
        self.digit_data._prepare_folder(folder)

    def _folder(self) -> Path:
        return self.digit_data._folder()

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory] | None:
        sources = self.digit_data._read(folder, dict.fromkeys(parts))
        if sources is None:
            return None
        return {part: self._canvases(part, sources[part]) for part in parts}  # type: ignore[arg-type]

    def _canvases(self, part: str, source: InMemory) -> InMemory:
        """The canvases of a part, with the class of every pixel."""
        generator = np.random.default_rng((self.canvas_seed, PARTS.index(part)))
        number, side, white = self.numbers[part], self.digit_size, self.digit_data.white
        crop = 0 if self.source_name == "digits" else _CROP
        images = torch.zeros(number, 1, self.size, self.size, dtype=torch.uint8)
        squares = torch.zeros(number, self.size, self.size, dtype=torch.long)  # the class of the digit in each
        for canvas in range(number):
            chosen = generator.integers(len(source), size=self.digits)
            places = self._places(generator)
            digits, classes = source.take(chosen.tolist())
            digits = digits[..., crop:-crop, crop:-crop] if crop else digits
            digits = nn.functional.interpolate(
                digits.to(torch.float32) * (255 / white), (side, side), mode="bicubic", antialias=True
            )
            for digit, kind, (row, column) in zip(_bytes(digits), classes, places, strict=True):
                area = (slice(row, row + side), slice(column, column + side))
                images[(canvas, 0, *area)] = digit[0]
                squares[(canvas, *area)] = kind + 1
        if part == "test" and self.rotate_test:
            angles = torch.from_numpy(generator.uniform(0, 2 * math.pi, number))
            images = _bytes(rotate_images(images, angles))
            squares = rotate_images(squares[:, None].double(), angles, "nearest")[:, 0].long()
        return InMemory(images, torch.where(images[:, 0] >= 128, squares, 0))

    def _places(self, generator: np.random.Generator) -> list[tuple[int, int]]:
        """The upper left corners of the digits of a canvas, which do not overlap."""
        side = self.digit_size
        for _ in range(_TRIALS if self._reach >= 0 else 0):
            found: list[tuple[int, int]] = []
            for _ in range(20 * self.digits):
                radius, angle = self._reach * math.sqrt(generator.random()), 2 * math.pi * generator.random()
                centre = (radius * math.sin(angle), radius * math.cos(angle))
                row, column = (round((self.size - side) / 2 + x) for x in centre)
                if all(max(abs(row - r), abs(column - c)) >= side for r, c in found):
                    found.append((row, column))
                if len(found) == self.digits:
                    return found
        raise UserError(f"size: got {self.size}, needed a larger canvas for {self.digits} digits of {side} pixels")


def _bytes(images: Tensor) -> Tensor:
    return images.round().clamp(0, 255).to(torch.uint8)
