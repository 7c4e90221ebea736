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


def process(rank: int, world_size: int) -> SimpleNamespace:
    """The trainer in one of several processes, as far as a data module asks."""
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0))),
    )
