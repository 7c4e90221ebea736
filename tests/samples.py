"""Stand-ins for data sets: other images, the same format; and for the trainer that data modules ask."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def needs(file: str) -> pytest.MarkDecorator:
    """A mark of tests with a file of real data."""
    there = (Path(os.environ.get("ESCNN_ATTENTION_DATA", "")) / file).exists()
    return pytest.mark.skipif(not there, reason=f"ESCNN_ATTENTION_DATA names no folder with {file}")


def rotmnist(train: int, valid: int, test: int) -> dict[str, np.ndarray]:
    """The arrays of rotmnist.npz, with so many images in each part."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("valid", valid), ("test", test)):
        arrays[f"{part}_images"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = draw.integers(0, 10, count)
    return arrays


QUIET = {"trainer.enable_progress_bar": False, "trainer.enable_model_summary": False, "model.warm_up": 0}
"""What a training of an example takes in a test."""


def like_cifar10(patch: pytest.MonkeyPatch, number: int) -> None:
    """So many random images in place of those of CIFAR-10, of all classes in turn."""
    from escnn_attention.training import CIFAR10
    from escnn_attention.training.data.base import InMemory

    images = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8)
    source = InMemory(images, torch.arange(number) % 10)
    patch.setattr(CIFAR10, "_read", lambda data, folder, parts: dict.fromkeys(parts, source))
    patch.setattr(CIFAR10, "_prepare_folder", lambda data, folder: None)


def process(rank: int, world_size: int) -> SimpleNamespace:
    """The trainer in one of several processes, as far as a data module asks."""
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0))),
    )
