"""What a comparison can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NETWORK_NAMES = ("cnn", "steerable", "hybrid", "gsa-net")
"""The networks, in the order of the table."""

DEFAULT_EPOCHS = {"digits": 15, "rotmnist": 10}
"""Epochs by data set, where none are asked for."""

LARGEST_SEED = 2**32 - 1
"""That Lightning takes, as NumPy does."""


@dataclass(frozen=True)
class Settings:
    """The options of ``escnn-attention compare``; the command line describes each.

    More than one of ``jobs`` trains networks side by side, in new processes, which import the main module: a script
    that asks for it does so below ``if __name__ == "__main__":``. ``epochs`` and ``output`` have defaults that depend
    on the data: see :meth:`epoch_count` and :meth:`folder`.
    """

    networks: tuple[str, ...] = NETWORK_NAMES
    data: str = "digits"
    data_dir: Path | None = None
    group: str = "c16"
    parameters: int = 20_000
    epochs: int | None = None
    batch_size: int = 32
    learning_rate: float = 6e-3
    seed: int = 0
    limit_train: int | None = None
    limit_test: int | None = None
    output: Path | None = None
    restart: bool = False
    accelerator: str = "auto"
    jobs: int = 1

    @property
    def epoch_count(self) -> int:
        """``epochs``, or the default of the data set."""
        return DEFAULT_EPOCHS[self.data] if self.epochs is None else self.epochs

    @property
    def folder(self) -> Path:
        """The folder of the run: ``output``, or ``runs/compare-DATA``."""
        return Path("runs") / f"compare-{self.data}" if self.output is None else self.output

    def configuration(self, fingerprint: str) -> dict[str, str | int | float | None]:
        """What the result of a network depends on, by the names of the command line's options.

        Args:
            fingerprint: of the images (:meth:`.data.ImageData.fingerprint`): the same name may stand for other images.
        """
        return {
            "data": self.data,
            "images": fingerprint,
            "group": self.group.lower(),
            "parameters": self.parameters,
            "epochs": self.epoch_count,
            "batch-size": self.batch_size,
            "learning-rate": self.learning_rate,
            "seed": self.seed,
            "limit-train": self.limit_train,
            "limit-test": self.limit_test,
        }
