"""The log of the finished epochs, kept inside the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from escnn_attention.training.files import write_csv


class EpochHistory(pl.Callback):
    """One row per finished epoch, in the checkpoint and as ``epochs.csv``.

    The rows are part of the checkpoint, so that both always tell of the same epochs. The CSV file is written from them
    once the checkpoint of the epoch is safe, and again at a resumption, so that it never tells of an epoch that would
    have to be run again.

    Args:
        path: the CSV file.
        measure: what the best epoch is chosen by.

    Attributes:
        rows: dictionaries with ``epoch`` (from 1), ``train_loss``, ``valid_loss``, the measure, by default
            ``valid_accuracy`` (from 0 to 1), ``learning_rate`` (at the end of the epoch), ``seconds`` (training only,
            without validation) and ``memory``, the peak in megabytes since the process began to train, above what it
            held then: allocated by PyTorch on CUDA; elsewhere the resident memory of the process, read before and
            after every backward pass.
    """

    def __init__(self, path: Path, measure: str = "valid_accuracy") -> None:
        self.path = path
        self.measure = measure
        self.rows: list[dict[str, Any]] = []
        self._started = 0.0
        self._seconds = 0.0
        self._validated = False
        self._memory_before = self._memory_peak = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def _write(self, trainer: pl.Trainer) -> None:
        if self.rows and trainer.is_global_zero:
            names = {name: None for row in self.rows for name in row}  # rows of an older version may have fewer
            write_csv(self.path, [{**names, **row} for row in self.rows])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._memory_before = self._memory_peak = _memory(device)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._memory_peak = max(self._memory_peak, _memory(trainer.strategy.root_device))

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._memory_peak = max(self._memory_peak, _memory(trainer.strategy.root_device))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)  # the epoch before, whose checkpoint is written by now
        self._validated = False
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._seconds = time.perf_counter() - self._started

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        row: dict[str, Any] = {"epoch": trainer.current_epoch + 1}
        for name, is_new in (("train_loss", True), ("valid_loss", self._validated), (self.measure, self._validated)):
            measured = trainer.callback_metrics.get(name) if is_new else None
            row[name] = None if measured is None else float(measured)
        row["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        row["seconds"] = self._seconds
        row["memory"] = round((self._memory_peak - self._memory_before) / 1e6, 1)
        self.rows.append(row)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Also where there was nothing left to train: a process that was killed may not have come this far.
        self._write(trainer)


def _memory(device: torch.device) -> int:
    """Bytes in use: the peak of PyTorch's on CUDA, which it records itself; else what the process holds."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
