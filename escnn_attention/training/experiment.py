"""One experiment: a network, its data and its training, from a configuration file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from escnn_attention.training.checkpoints import AtomicCheckpointIO
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file, write_csv, write_json
from escnn_attention.training.history import EpochHistory
from escnn_attention.training.module import Classifier
from escnn_attention.training.quiet import quiet_lightning
from escnn_attention.training.results import hardware, versions

__all__ = ["BEST", "CONFIGURATION", "LAST", "TEST", "ExperimentCLI", "run_experiment"]

BEST, LAST = "best.ckpt", "last.ckpt"
CONFIGURATION = "config.yaml"
EPOCHS = "epochs.csv"
TEST = "test.json"
PREDICTIONS = "predictions.csv"

# What may change about the data from one call to the next.
_INCIDENTAL = ("folder", "num_workers", "download", "eval_batch_size")


def run_experiment(arguments: Sequence[str]) -> ExperimentCLI:
    """Fit, validate, test or predict, as ``escnn-attention`` does.

    Args:
        arguments: the command (``fit``, ``validate``, ``test``, ``predict``) and its options.

    Raises:
        UserError: the folder holds another experiment, a checkpoint is missing, or the data cannot be had.
        SystemExit: an option or a configuration that cannot be parsed; the reason is on stderr.
    """
    with quiet_lightning():
        return ExperimentCLI(
            Classifier,
            pl.LightningDataModule,
            subclass_mode_data=True,
            save_config_callback=_SaveConfiguration,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "escnn-attention"},
            trainer_defaults={"use_distributed_sampler": False},
            args=list(arguments),
        )


class ExperimentCLI(LightningCLI):
    """Lightning's command line, with everything about an experiment in one folder.

    The folder holds ``config.yaml``, ``last.ckpt`` (after every epoch), ``best.ckpt`` (of the highest validation
    accuracy), ``epochs.csv``, TensorBoard's logs in ``tensorboard``, and what ``test`` and ``predict`` write.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--folder", type=Path, required=True, help="Folder of the experiment: checkpoints, logs and results."
        )
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        self.folder = Path(config["folder"])
        stored = _read_configuration(self.folder)
        if stored is not None:
            _check_same(self.folder, stored, _plain(self.parser, self.config, self.subcommand))
        if config.get("ckpt_path") is None:
            checkpoint = self._checkpoint()
            # As "ckpt_path" of the command, which Lightning hands to the trainer.
            config["ckpt_path"] = None if checkpoint is None else str(checkpoint)

    def _checkpoint(self) -> Path | None:
        """What to go on from (``fit``), or the network to use."""
        if self.subcommand == "fit":
            last = self.folder / LAST
            return last if last.exists() else None
        for name in (BEST, LAST):
            if (self.folder / name).exists():
                return self.folder / name
        raise UserError(f"{self.folder} holds no trained network: run 'escnn-attention fit' with this --folder first")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self._get(self.config_init, "trainer", default={})
        self.folder.mkdir(parents=True, exist_ok=True)
        logger = config.get("logger")
        given = config.get("callbacks") or []
        callbacks: list[pl.Callback] = [*given] if isinstance(given, list) else [given]
        if self.subcommand == "fit":
            callbacks += [
                EpochHistory(self.folder / EPOCHS),
                # The best first, so that the last one, from which a run goes on, knows of it.
                ModelCheckpoint(
                    self.folder,
                    filename=Path(BEST).stem,
                    monitor="valid_accuracy",
                    mode="max",
                    enable_version_counter=False,
                ),
                ModelCheckpoint(
                    self.folder, filename=Path(LAST).stem, save_on_train_epoch_end=True, enable_version_counter=False
                ),
            ]
        if self.subcommand == "predict":
            callbacks.append(_PredictionWriter(self.folder / PREDICTIONS))
        if config.get("enable_progress_bar") is not False:
            callbacks.append(RichProgressBar())
        if logger is None:
            logger = (
                TensorBoardLogger(self.folder, name=None, version="tensorboard") if self.subcommand == "fit" else False
            )
        return super().instantiate_trainer(
            default_root_dir=str(self.folder),
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=self.subcommand == "fit",
            plugins=[*(config.get("plugins") or []), AtomicCheckpointIO()],
            **kwargs,
        )

    def after_test(self) -> None:
        """Write what was measured, with everything that it depends on."""
        if not self.trainer.is_global_zero:
            return
        checkpoint = Path(self.config[self.subcommand]["ckpt_path"])
        history = torch.load(checkpoint, map_location="cpu", weights_only=True)
        rows: list[dict[str, float]] = next(
            (state["rows"] for name, state in history["callbacks"].items() if "EpochHistory" in name), []
        )
        write_json(
            self.folder / TEST,
            {
                "accuracy": float(self.trainer.callback_metrics["test_accuracy"]),
                "loss": float(self.trainer.callback_metrics["test_loss"]),
                "epoch": int(history["epoch"]) + 1,
                "parameters": sum(p.numel() for p in self.model.network.parameters() if p.requires_grad),
                "configuration": _plain(self.parser, self.config, self.subcommand),
                "seed": self.config[self.subcommand]["seed_everything"],
                "checkpoint": {"name": checkpoint.name, "sha256": _digest(checkpoint)},
                "curve": rows,
                "versions": versions(),
                "hardware": hardware(),
            },
        )


class _SaveConfiguration(SaveConfigCallback):
    """Keeps the configuration of ``fit`` in the folder of the experiment."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            with atomic_file(Path(self.config["folder"]) / CONFIGURATION, "w") as file:
                file.write(self.parser.dump(self.config))


class _PredictionWriter(BasePredictionWriter):
    """Writes one line an image: its number, the class, and the probabilities of all classes."""

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError("predict runs in one process: give --trainer.devices 1")

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        probabilities = torch.cat(list(predictions)).float().cpu()
        write_csv(
            self.path,
            [
                {"image": i, "class": int(p.argmax()), **{f"p{j}": float(value) for j, value in enumerate(p)}}
                for i, p in enumerate(probabilities)
            ],
        )


def _plain(parser: LightningArgumentParser, config: Any, subcommand: str | None) -> dict[str, Any]:
    """The configuration of a command as plain values."""
    dumped = yaml.safe_load(parser.dump(config))
    plain: dict[str, Any] = dumped if subcommand is None else dumped[subcommand]
    return plain


def _read_configuration(folder: Path) -> dict[str, Any] | None:
    try:
        stored = yaml.safe_load((folder / CONFIGURATION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except yaml.YAMLError as error:
        raise UserError(f"{folder / CONFIGURATION} is damaged ({error}): choose another --folder") from error
    if not isinstance(stored, dict):
        raise UserError(f"{folder / CONFIGURATION} is no configuration: choose another --folder")
    return stored


def _check_same(folder: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The network, its training and its data are those of the folder."""
    old, new = (
        {name: value for part in ("seed_everything", "model", "data") for name, value in _flat(part, config.get(part))}
        for config in (stored, now)
    )
    changed = [
        f"{name} ({old.get(name)} there, {new.get(name)} now)"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and name.rpartition(".")[2] not in _INCIDENTAL
    ]
    if changed:
        raise UserError(
            f"{folder} holds an experiment with another configuration: {', '.join(changed)}. Choose another --folder"
        )


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}", inner)]
    return [(name, json.dumps(value))]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
