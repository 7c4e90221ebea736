"""Training of one network of the comparison: an experiment, in the folder of that name."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from escnn_attention.functional.layout import without_prefix
from escnn_attention.training.comparison.images import ImageData
from escnn_attention.training.comparison.progress import EpochProgress, Reporter
from escnn_attention.training.comparison.settings import Settings
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import LAST, run_experiment
from escnn_attention.training.experiment.checkpoints import read_checkpoint, write_checkpoint
from escnn_attention.training.experiment.described import build_described
from escnn_attention.training.experiment.history import EpochHistory

_WAY_OUT = "choose another --output, or give --restart, which moves the run aside"
_LABEL_SMOOTHING = 0.05
_WEIGHT_DECAY = 1e-2
_WARM_UP = 0.2  # part of the epochs in which the learning rate grows to its maximum


@dataclass(frozen=True)
class Training:
    """A network that is trained.

    Attributes:
        network: its weights after the last epoch.
        seconds_per_epoch: median over the epochs, without validation.
        device: where it was trained last.
    """

    network: nn.Module
    seconds_per_epoch: float
    device: torch.device


def configure(network: dict[str, Any], data: ImageData, settings: Settings) -> dict[str, Any]:
    """The configuration of a training, as ``escnn-attention fit`` takes it from a file."""
    epochs = settings.epoch_count
    return {
        "seed_everything": settings.seed,
        "trainer": {
            "accelerator": _accelerator(settings.accelerator),
            "devices": 1,
            "max_epochs": epochs,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        },
        "model": {
            "network": network,
            "num_classes": data.num_classes,
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": settings.learning_rate, "weight_decay": _WEIGHT_DECAY},
            },
            "schedule": "one-cycle",
            "warm_up": _WARM_UP * epochs,
            "label_smoothing": _LABEL_SMOOTHING,
        },
        "data": data.describe(settings.batch_size),
    }


def train(name: str, configuration: dict[str, Any], settings: Settings, report: Reporter) -> Training:
    """Train a network, from the checkpoint of the last finished epoch if there is one.

    Args:
        name: of the network, and of its folder.
        configuration: of the training: that of :func:`configure`, or one like it.
        settings: the number of epochs, and the folder.
        report: told what happens.

    Raises:
        UserError: the accelerator is not there, or the checkpoint does not fit the network.
        KeyboardInterrupt: on Ctrl-C.
    """
    folder, epochs = settings.folder / name, settings.epoch_count
    checkpoint = folder / LAST
    if checkpoint.exists():
        _, finished = read_network(configuration["model"]["network"], checkpoint)
        if finished < epochs:
            report.say(f"resuming {name} at epoch {finished + 1} of {epochs} from {checkpoint}")
        else:
            report.say(f"{name}: all {epochs} epochs are in {checkpoint}")
    with report.bar(f"training {name}") as advance:
        try:
            experiment = run_experiment({**configuration, "folder": str(folder)}, [EpochProgress(advance)])
        except SystemExit as error:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from error
    trainer = experiment.trainer
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    history = next(callback for callback in callbacks if isinstance(callback, EpochHistory))
    return Training(
        network=experiment.model.network,
        seconds_per_epoch=statistics.median(row["seconds"] for row in history.rows),
        device=trainer.strategy.root_device,
    )


def read_network(network: dict[str, Any], checkpoint: Path) -> tuple[nn.Module, int]:
    """The network of a description with the weights of a checkpoint, in eval mode, and the epochs that are finished.

    A checkpoint in which the same weights have other names, in the same order, is written anew with those of today.

    Raises:
        UserError: the checkpoint cannot be read or is of another network.
    """
    content = read_checkpoint(checkpoint, f"Move it away, {_WAY_OUT}")
    built = build_described(network)
    expected = {f"network.{name}": value.shape for name, value in built.state_dict().items()}
    state = content.get("state_dict", {})
    found = without_prefix(state, "network.")
    if [value.shape for value in found.values()] != list(expected.values()) or "epoch" not in content:
        raise UserError(f"{checkpoint} is of another network than this version of escnn_attention builds: {_WAY_OUT}")
    if [f"network.{name}" for name in found] != list(expected):
        content["state_dict"] = _renamed(state, list(expected))
        write_checkpoint(checkpoint, content)
    try:
        built.load_state_dict(_renamed(found, list(built.state_dict())))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} cannot be loaded: {error}") from None
    return built.eval(), int(content["epoch"]) + 1


def _renamed(state: Mapping[str, Tensor], names: Sequence[str]) -> OrderedDict[str, Tensor]:
    """A state dict with other names, in the layouts that it says."""
    renamed = OrderedDict(zip(names, state.values(), strict=True))
    if hasattr(state, "_metadata"):
        renamed._metadata = state._metadata  # type: ignore[attr-defined]
    return renamed


def _accelerator(name: str) -> str:
    available = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in available:
        raise UserError(f"unknown accelerator {name!r}: choose one of {', '.join(available)}")
    if not available[name]:
        raise UserError(f"there is no accelerator {name!r} that torch can use here: leave --accelerator at auto")
    return name
