"""What ``fit`` and ``predict`` have Lightning write: checkpoints, configuration, predictions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.progress import BarColumn
from torch import Tensor

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import PROVENANCE
from escnn_attention.training.experiment.configuration import scheduled_epochs
from escnn_attention.training.experiment.folder import BEST, CONFIGURATION, LAST, WRITTEN
from escnn_attention.training.experiment.result import say_kept
from escnn_attention.training.files import as_csv, atomic_file, keep_aside, locked
from escnn_attention.training.modules.scheduled import Scheduled

_OF_THE_CALL = ("folder", "ckpt_path", "config")
_SECONDS = 0.5  # from one reading of the loss to the next


class _InFolder(ModelCheckpoint):
    """One checkpoint in the folder of an experiment, wherever that has been moved to, copied or mounted."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        path = self.format_checkpoint_name({})
        score = state_dict["best_model_score"]
        # A score without its file is that of another folder: the next epoch is the best here.
        if Path(path).is_file() and score is not None:
            here = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path}
            super().load_state_dict({**state_dict, **here, "best_k_models": {path: score}})


class _Best(_InFolder):
    """The checkpoint of the best epoch. A class of its own, as Lightning tells callbacks apart by their classes.

    Without a monitor it is that of the last one.
    """

    def __init__(self, folder: Path, monitor: str | None, mode: str) -> None:
        super().__init__(folder, Path(BEST).stem, monitor=monitor, mode=mode, enable_version_counter=False)


class _Last(_InFolder):
    """The checkpoint of the last epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Path(LAST).stem, save_on_train_epoch_end=True, enable_version_counter=False)


class Provenance(pl.Callback):
    """Has checkpoints say by what they were made.

    Args:
        facts: ``configuration``, ``versions`` and ``hardware``. Where a schedule was laid out over other numbers of
            epochs before, these are added, as ``earlier_max_epochs``.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    @property
    def state_key(self) -> str:
        return PROVENANCE

    def state_dict(self) -> dict[str, Any]:
        return self.facts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = (scheduled_epochs(facts["configuration"]) for facts in (state_dict, self.facts))
        earlier = [*state_dict.get("earlier_max_epochs", []), *([before] if before != now else [])]
        if earlier:
            self.facts = {**self.facts, "earlier_max_epochs": earlier}


def checkpoint_callbacks(folder: Path, model: Scheduled, data: pl.LightningDataModule) -> list[pl.Callback]:
    """What keeps the best and the last checkpoint of a training."""
    monitor = model.monitor if getattr(data, "validates", True) else None
    # The best first, so that the last one, from which a run goes on, knows of it.
    return [_Best(folder, monitor, model.mode), _Last(folder)]


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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # To read it is to wait for the device, which would take time in every step.
        if time.monotonic() - self._read_at > _SECONDS or trainer.is_last_batch:
            self._loss = {"loss": float(outputs["loss"]) * trainer.accumulate_grad_batches}
            self._read_at = time.monotonic()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        shown = {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
        monitor = cast(Scheduled, pl_module).monitor
        measured = trainer.callback_metrics.get(monitor)
        return {**shown, **self._loss, **({} if measured is None else {monitor: float(measured)})}

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        columns: list[Any] = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 10  # which leaves room for the numbers
        return columns


class PredictionWriter(BasePredictionWriter):
    """Writes one line for each image or cloud, as the module describes it, with what is true where the data says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch_and_epoch")
        self.path = path
        self._truth: list[Tensor | None] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError("predict runs in one process: give --trainer.devices 1")
        if not isinstance(pl_module, Scheduled) or type(pl_module).describe is Scheduled.describe:
            raise UserError(f"predict: {type(pl_module).__name__} has nothing to write; use test")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self._truth.append(cast(Scheduled, pl_module).truth(batch))

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        known = [truth for truth in self._truth if truth is not None]
        truth = torch.cat(known).cpu() if known and len(known) == len(predictions) else None
        rows = cast(Scheduled, pl_module).describe(torch.cat(list(predictions)).float().cpu(), truth)
        names = getattr(trainer.datamodule, "names", None)  # type: ignore[attr-defined]
        if names is not None:
            rows = [{**row, "image": name} for row, name in zip(rows, names, strict=True)]
        text = as_csv(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            if self.path.exists() and self.path.read_bytes() != text.encode():
                say_kept(self.path, keep_aside(self.path))
            with atomic_file(self.path, "w") as file:
                file.write(text)
