"""How the job tells what it is doing: nothing here prints, the command line fills it in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import lightning.pytorch as pl


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, completed: int, total: int | None = None, note: str = "") -> None:
        """Move the bar to ``completed`` of ``total`` (``None``: as before), with a short ``note`` behind the bar."""


class Reporter:
    """Takes messages and progress, and drops them. Subclass it to show them."""

    def say(self, message: str) -> None:
        """One line about what happens."""

    @contextlib.contextmanager
    def bar(self, title: str, total: int | None = None, *, size: bool = False) -> Iterator[Advance]:
        """A progress bar that is shown while the block runs.

        Args:
            title: in front of the bar.
            total: steps to be done, ``None`` where that is not known yet.
            size: the steps are bytes.
        """
        yield lambda completed, total=None, note="": None


class EpochProgress(pl.Callback):
    """One bar over all batches of all epochs, starting where a resumed run starts.

    Args:
        advance: moves the bar.
    """

    def __init__(self, advance: Advance) -> None:
        self.advance = advance
        self.note = ""

    def _move(self, trainer: pl.Trainer, epochs: int, batches: int) -> None:
        per_epoch = int(trainer.num_training_batches)
        assert trainer.max_epochs is not None  # the job always sets it
        of_all = f"epoch {min(epochs + 1, trainer.max_epochs)}/{trainer.max_epochs}"
        self.advance(epochs * per_epoch + batches, trainer.max_epochs * per_epoch, f"{of_all}{self.note}")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._move(trainer, trainer.current_epoch, 0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._move(trainer, trainer.current_epoch, batch_idx + 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note = f", valid {100 * float(trainer.callback_metrics['valid_accuracy']):.1f} %"
        self._move(trainer, trainer.current_epoch, int(trainer.num_training_batches))
