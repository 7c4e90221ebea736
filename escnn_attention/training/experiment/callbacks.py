"""Callbacks of ``fit`` and ``predict``: checkpoints, configuration, history of the epochs, predictions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.progress import BarColumn
from torch import Tensor

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import BEST, CONFIGURATION, EPOCHS, LAST, WRITTEN
from escnn_attention.training.experiment.configuration import scheduled_epochs
from escnn_attention.training.files import as_csv, atomic_file, keep_aside, locked, write_csv
from escnn_attention.training.modules.scheduled import Scheduled


class EpochHistory(pl.Callback):
    """One row per finished epoch, in the checkpoint and as ``epochs.csv``.

    The CSV file is written from the rows in the checkpoint once the checkpoint of the epoch is complete, and again when
    a training resumes, so that it never has an epoch that must be run again.

    Attributes:
        rows: dictionaries with ``epoch`` (from 1), ``train_loss``, ``valid_loss``, the ``measure`` that chooses the
            best epoch, ``learning_rate`` (at the end of the epoch), ``seconds`` (training only, without validation) and
            ``memory``, the peak in megabytes since the process began to train, above what it held then: allocated by
            PyTorch on CUDA; elsewhere the resident memory of the process, read before and after every backward pass.
    """

    def __init__(self, path: Path, measure: str = "valid_accuracy") -> None:
        self.path, self.measure = path, measure
        self.rows: list[dict[str, Any]] = []
        self._seconds, self._validated = 0.0, False

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def _write(self, trainer: pl.Trainer) -> None:
        if self.rows and trainer.is_global_zero:
            write_csv(self.path, self.rows)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._memory_before = self._memory_peak = _memory(device)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._memory_peak = max(self._memory_peak, _memory(trainer.strategy.root_device))

    on_after_backward = on_before_backward

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
        for name in ("train_loss", "valid_loss", self.measure):
            measured = trainer.callback_metrics.get(name) if name == "train_loss" or self._validated else None
            row[name] = None if measured is None else float(measured)
        row["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        row["seconds"] = self._seconds
        row["memory"] = round((self._memory_peak - self._memory_before) / 1e6, 1)
        self.rows.append(row)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)  # also where nothing was left to train: a killed process may not have come this far


def _memory(device: torch.device) -> int:
    """Bytes in use: the peak of PyTorch's on CUDA, which it records itself; else what the process holds."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


_OF_THE_CALL = ("folder", "ckpt_path", "config", "recipe")
_SECONDS = 0.5  # from one reading of the loss to the next


class _InFolder(ModelCheckpoint):
    """One checkpoint in the folder of an experiment, which may be moved, copied or mounted elsewhere."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        path, score = self.format_checkpoint_name({}), state_dict["best_model_score"]
        # A score without its file is that of another folder: the next epoch is the best here.
        if Path(path).is_file() and score is not None:
            here = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path}
            super().load_state_dict({**state_dict, **here, "best_k_models": {path: score}})


# Lightning distinguishes callbacks by their classes.
class _Best(_InFolder):
    pass


class _Last(_InFolder):
    pass


class _Provenance(pl.Callback):
    """Stores ``facts`` of a training in its checkpoints: configuration, versions and hardware.

    Where a schedule was laid out over other numbers of epochs before, these are added, as ``earlier_max_epochs``.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def state_dict(self) -> dict[str, Any]:
        return self.facts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = (scheduled_epochs(facts["configuration"]) for facts in (state_dict, self.facts))
        earlier = [*state_dict.get("earlier_max_epochs", []), *([before] if before != now else [])]
        if earlier:
            self.facts = {**self.facts, "earlier_max_epochs": earlier}


def training_callbacks(
    folder: Path,
    configuration: Mapping[str, Any],
    facts: dict[str, Any],
    model: Scheduled,
    data: pl.LightningDataModule,
) -> list[pl.Callback]:
    """The callbacks that write the files of a training."""
    # Without a monitor the best is the last one.
    monitor = model.monitor if getattr(data, "validates", True) else None
    # The best first, so that the last one, from which a run resumes, contains its state.
    return [
        SaveConfiguration(folder, configuration),
        EpochHistory(folder / EPOCHS, model.monitor),
        _Provenance(facts),
        _Best(folder, Path(BEST).stem, monitor=monitor, mode=model.mode, enable_version_counter=False),
        _Last(folder, Path(LAST).stem, save_on_train_epoch_end=True, enable_version_counter=False),
    ]


class SaveConfiguration(pl.Callback):
    """Keeps the configuration of ``fit`` in the folder of the experiment."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        self.path = folder / CONFIGURATION
        self.kept = {name: value for name, value in configuration.items() if name not in _OF_THE_CALL}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            with atomic_file(self.path, "w") as file:
                file.write(f"{WRITTEN}\n")
                yaml.safe_dump(self.kept, file, sort_keys=False)


class ProgressLine(RichProgressBar):
    """Lightning's progress bar with the loss of the step, and the newest measure of the validation part."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_format=".4g"))
        self._loss: dict[str, float] = {}
        self._read_at = -math.inf

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        # Reading the loss waits for the device, which would slow every step down.
        if time.monotonic() - self._read_at > _SECONDS or trainer.is_last_batch:
            self._loss = {"loss": float(outputs["loss"]) * trainer.accumulate_grad_batches}
            self._read_at = time.monotonic()
        super().on_train_batch_end(trainer, pl_module, outputs, *args)

    def get_metrics(self, trainer: pl.Trainer, pl_module: Any) -> dict[str, Any]:
        shown = {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
        measured = trainer.callback_metrics.get(pl_module.monitor)
        return {**shown, **self._loss, **({} if measured is None else {pl_module.monitor: float(measured)})}

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        columns: list[Any] = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 10  # which leaves room for the numbers
        return columns


class PredictionWriter(pl.Callback):
    """Writes one line for each image or cloud, as the module describes it, with the target where the data has it.

    What is predicted at every position is in an ``.npz`` file beside them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._predictions: list[Tensor] = []
        self._truth: list[Tensor | None] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError("predict runs in one process: give --trainer.devices 1")
        if not isinstance(pl_module, Scheduled) or type(pl_module).describe is Scheduled.describe:
            raise UserError(f"predict: {type(pl_module).__name__} has nothing to write; use test")

    def on_predict_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._predictions.append(outputs.cpu())
        self._truth.append(pl_module.truth(batch))

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        known = [truth for truth in self._truth if truth is not None]
        truth = torch.cat(known).cpu() if known and len(known) == len(self._truth) else None
        predictions = torch.cat(self._predictions)
        if predictions.dtype == torch.bfloat16:  # which NumPy does not have
            predictions = predictions.float()
        rows = pl_module.describe(predictions.float(), truth)
        if (names := pl_module.told_by_data("names")) is not None:
            rows = [{**row, "image": name} for row, name in zip(rows, names, strict=True)]
        text = as_csv(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            arrays = self.path.with_suffix(".npz")
            if self.path.exists() and self.path.read_bytes() != text.encode():
                aside = keep_aside(self.path)
                if arrays.exists():
                    arrays.rename(aside.with_suffix(".npz"))
            if pl_module.keeps_arrays:
                with atomic_file(arrays) as opened:
                    np.savez_compressed(opened, predictions=predictions.numpy())
            with atomic_file(self.path, "w") as file:
                file.write(text)
