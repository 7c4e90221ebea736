from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from escnn_attention.training.comparison.images import ImageData, load_images
from escnn_attention.training.comparison.progress import Reporter
from escnn_attention.training.comparison.settings import Settings
from tests import samples


class Listener(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(message)

    def heard(self, part: str) -> bool:
        return any(part in message for message in self.messages)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return load_images("digits")


@pytest.fixture
def tiny(tmp_path: Path) -> Settings:
    """A comparison that takes seconds: small networks, few images, one epoch."""
    return Settings(
        networks=("cnn",),
        parameters=600,
        epochs=1,
        batch_size=25,
        limit_train=50,
        limit_test=20,
        output=tmp_path / "run",
        accelerator="cpu",
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rotmnist_arrays() -> dict[str, np.ndarray]:
    """A small stand-in for rotmnist.npz: other images, the same format."""
    return samples.rotmnist(train=6, valid=3, test=4)
