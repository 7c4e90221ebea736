"""What the tests of experiments share: how to call, and what is left in a folder."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from escnn_attention.training.experiment import run_experiment

ROOT = Path(__file__).parents[3]

SHORT = {"trainer__max_epochs": 1, "model__schedule": "constant", "model__warm_up": 0}
SHORT |= {"data__init_args__limit_train": 8, "data__init_args__limit_valid": 4}
"""The shortest training: one step."""

# The parts of a checkpoint that Lightning needs.
WHOLE = {"state_dict": {}, "epoch": 0, "optimizer_states": [], "lr_schedulers": [], "loops": {"fit_loop": {}}}
WHOLE["pytorch-lightning_version"] = "2.6.0"


def of(path: str, /, **arguments: Any) -> dict[str, Any]:
    """What is made by a class or function of these arguments, as a configuration has it."""
    return {"class_path": path, "init_args": arguments}


def write_task(folder: Path, task: str, model: dict[str, Any], data: dict[str, Any]) -> Path:
    """The configuration of a training of two epochs."""
    trainer = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    file = folder / "experiment.yaml"
    file.write_text(
        yaml.safe_dump({"task": task, "trainer": trainer, "model": model, "data": data}, sort_keys=False),
        encoding="utf-8",
    )
    return file


def quiet_trainer(**options: Any) -> pl.Trainer:
    """One on the CPU that prints and keeps nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(**{"accelerator": "cpu", **dict.fromkeys(off, False), **options})


def call(command: str, file: Path, folder: str | Path, *more: Any) -> None:
    run_experiment([command, "--config", str(file), "--folder", str(folder), *map(str, more)])


def weights(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    return torch.load(folder / name, weights_only=True)["state_dict"]


def rows(folder: Path, name: str = "epochs.csv") -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
