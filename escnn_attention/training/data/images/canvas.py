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
from escnn_attention.training.data.images.digits import Digits
from escnn_attention.training.data.images.mnist import MNIST
from escnn_attention.training.errors import UserError

DigitSource = Literal["digits", "mnist"]

_SIZE, _DIGITS, _SIDE = 48, 3, 16  # the sides of a canvas and of a digit in pixels, and the digits of a canvas
_REACH = _SIZE / 2 - _SIDE / math.sqrt(2)  # of their centres: digits stay inside when the canvas is rotated
_SEED = 0  # of places, choices of digits and angles, which are part of the data set
_CROP = 3  # off each side of MNIST's images: 1 % of the ink is there


class DigitCanvas(PublishedImages):
    """Three digits at random places of a black canvas, and the class of each pixel: 0, the background, c + 1, digit c.

    Canvases of 48×48 pixels are made once, from the images of each part of a data set of digits, which are 16×16 pixels
    and do not overlap. A pixel at least half as bright as white belongs to the digit in whose square it is.

    Args:
        source: the digits: ``"digits"``, those of scikit-learn, which need no files; or ``"mnist"``, which is looked
            for in ``folder``, and whose middle 22×22 pixels are shrunk with antialiasing.
        num_train, num_valid, num_test: the numbers of canvases.
        rotate_test: whether each test canvas is rotated about its centre by an angle of its own.
        **options: of :class:`~.base.PublishedImages` but ``rotate_train``, which would not rotate the classes.

    Raises:
        UserError: an unknown source, ``rotate_train``, or as :class:`~.base.PublishedImages` raises.

    >>> data = DigitCanvas(num_train=16, batch_size=8)
    >>> data.setup("fit")
    >>> images, labels = next(iter(data.train_dataloader()))
    >>> images.shape, labels.shape
    (torch.Size([8, 1, 48, 48]), torch.Size([8, 48, 48]))
    """

    in_channels = 1
    num_classes = 11
    size = _SIZE
    mean = (0.103,)
    std = (0.249,)

    def __init__(
        self,
        source: DigitSource = "digits",
        num_train: int = 2000,
        num_valid: int = 300,
        num_test: int = 600,
        rotate_test: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of(get_args(DigitSource), source=source)
        integers(1, num_train=num_train, num_valid=num_valid, num_test=num_test)
        if self.rotate_train:
            raise UserError("rotate_train: got a rotation of the images alone, needed 0: classes of pixels stay")
        self.source_name, self.rotate_test = source, rotate_test
        self.numbers = dict(zip(PARTS, (num_train, num_valid, num_test), strict=True))
        self.digit_data = Digits(_SIDE) if source == "digits" else MNIST(self.folder, download=self.download)
        self.files = self.digit_data.files

    def _prepare_folder(self, folder: Path) -> None:
        self.digit_data._prepare_folder(folder)

    def _folder(self) -> Path:
        return self.digit_data._folder()

    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, InMemory]:
        sources = self.digit_data._read(folder, dict.fromkeys(parts))
        return {part: self._canvases(part, sources[part]) for part in parts}  # type: ignore[arg-type]

    def _canvases(self, part: str, source: InMemory) -> InMemory:
        generator = np.random.default_rng((_SEED, PARTS.index(part)))
        number, white = self.numbers[part], self.digit_data.white
        crop = 0 if self.source_name == "digits" else _CROP
        images = torch.zeros(number, 1, _SIZE, _SIZE, dtype=torch.uint8)
        squares = torch.zeros(number, _SIZE, _SIZE, dtype=torch.long)  # the class of the digit in each
        for canvas in range(number):
            chosen = generator.integers(len(source), size=_DIGITS)
            digits, classes = source.take(chosen.tolist())
            digits = digits[..., crop:-crop, crop:-crop] if crop else digits
            digits = nn.functional.interpolate(
                digits.to(torch.float32) * (255 / white), (_SIDE, _SIDE), mode="bicubic", antialias=True
            )
            for digit, kind, (row, column) in zip(_bytes(digits), classes, _places(generator), strict=True):
                area = (slice(row, row + _SIDE), slice(column, column + _SIDE))
                images[(canvas, 0, *area)] = digit[0]
                squares[(canvas, *area)] = kind + 1
        if part == "test" and self.rotate_test:
            angles = torch.from_numpy(generator.uniform(0, 2 * math.pi, number))
            images = _bytes(rotate_images(images, angles))
            squares = rotate_images(squares[:, None].double(), angles, "nearest")[:, 0].long()
        return InMemory(images, torch.where(images[:, 0] >= 128, squares, 0))


def _places(generator: np.random.Generator) -> list[tuple[int, int]]:
    """The upper left corners of the digits of a canvas, which do not overlap."""
    found: list[tuple[int, int]] = []
    trials = 0
    while len(found) < _DIGITS:
        if trials == 20 * _DIGITS:
            found, trials = [], 0
        radius, angle = _REACH * math.sqrt(generator.random()), 2 * math.pi * generator.random()
        centre = (radius * math.sin(angle), radius * math.cos(angle))
        row, column = (round((_SIZE - _SIDE) / 2 + x) for x in centre)
        if all(max(abs(row - r), abs(column - c)) >= _SIDE for r, c in found):
            found.append((row, column))
        trials += 1
    return found


def _bytes(images: Tensor) -> Tensor:
    return images.round().clamp(0, 255).to(torch.uint8)
