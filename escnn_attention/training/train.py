"""Training of one network, interruptible at any moment."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from escnn_attention.training.checkpoints import AtomicCheckpointIO, read_checkpoint
from escnn_attention.training.datamodule import ImageDataModule
from escnn_attention.training.errors import UserError
from escnn_attention.training.history import EpochHistory
from escnn_attention.training.images import ImageData
from escnn_attention.training.module import Classifier
from escnn_attention.training.progress import EpochProgress, Reporter
from escnn_attention.training.quiet import quiet_lightning
from escnn_attention.training.settings import Settings

CHECKPOINT = "last.ckpt"
EPOCHS = "epochs.csv"

_WAY_OUT = "Start afresh with --restart, which moves the run aside"

_LABEL_SMOOTHING = 0.05
_WEIGHT_DECAY = 1e-2
_WARM_UP = 0.2  # part of the epochs in which the learning rate grows to its maximum


@dataclass(frozen=True)
class Training:
    """A network that is trained.

    Attributes:
        seconds_per_epoch: median over the epochs, without validation.
        device: where it was trained last.
    """

    seconds_per_epoch: float
    device: torch.device


def train(
    name: str, network: nn.Module, data: ImageData, settings: Settings, folder: Path, report: Reporter
) -> Training:
    """Train ``network`` in place, from the checkpoint in ``folder`` if there is one.

    A checkpoint is written at the end of every epoch, in one step, so that at most the epoch under way is lost. The
    order of the images and the random numbers of an epoch depend on the seed and the epoch only, and the state of the
    optimiser, of its schedule and of the batch norms is part of the checkpoint: on the same machine, with the same
    number of threads, a run that was killed and resumed gives the same weights as one that was not.

    Args:
        name: of the network, for messages.
        network: images to logits.
        data: the images.
        settings: epochs, batch size, learning rate, seed, accelerator.
        folder: for ``last.ckpt`` and ``epochs.csv``.
        report: told what happens.

    Raises:
        UserError: the accelerator is not there, or the checkpoint does not fit the network.
        KeyboardInterrupt: on Ctrl-C.
    """
    epochs = settings.epoch_count
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT
    history = EpochHistory(folder / EPOCHS)
    model = Classifier(
        network,
        data.num_classes,
        optimizer=functools.partial(torch.optim.AdamW, lr=settings.learning_rate, weight_decay=_WEIGHT_DECAY),
        schedule="one-cycle",
        warm_up=_WARM_UP * epochs,
        label_smoothing=_LABEL_SMOOTHING,
        seed=settings.seed,
    )
    resumed = checkpoint.exists()
    if resumed:
        finished = _finished_epochs(checkpoint, model)
        if finished < epochs:
            report.say(f"resuming {name} at epoch {finished + 1} of {epochs} from {checkpoint}")
        else:
            report.say(f"{name}: all {epochs} epochs are in {checkpoint}")
    with quiet_lightning(), report.bar(f"training {name}") as advance:
        trainer = pl.Trainer(
            accelerator=_accelerator(settings.accelerator),
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            plugins=[AtomicCheckpointIO()],
            callbacks=[
                history,
                EpochProgress(advance),
                ModelCheckpoint(
                    folder, filename=checkpoint.stem, save_on_train_epoch_end=True, enable_version_counter=False
                ),
            ],
        )
        try:
            trainer.fit(
                model,
                datamodule=ImageDataModule(data, settings.batch_size, settings.seed),
                ckpt_path=checkpoint if resumed else None,
            )
        except SystemExit as error:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from error
    return Training(
        seconds_per_epoch=statistics.median(row["seconds"] for row in history.rows),
        device=trainer.strategy.root_device,
    )


def load_weights(network: nn.Module, checkpoint: Path) -> None:
    """Give ``network`` the weights from a checkpoint of :func:`train`.

    Raises:
        UserError: the checkpoint cannot be read or is of another network.
    """
    model = Classifier(network, num_classes=2)
    _load(model, read_checkpoint(checkpoint, _WAY_OUT)["state_dict"], checkpoint)


def _finished_epochs(checkpoint: Path, model: Classifier) -> int:
    content = read_checkpoint(checkpoint, _WAY_OUT)
    _load(model, content["state_dict"], checkpoint)
    return int(content["epoch"]) + 1


def _load(model: Classifier, state: dict[str, torch.Tensor], checkpoint: Path) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint} is of another network than this version of escnn_attention builds: choose another --output,"
            " or give --restart, which moves the run aside"
        ) from error


def _accelerator(name: str) -> str:
    available = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in available:
        raise UserError(f"unknown accelerator {name!r}: choose one of {', '.join(available)}")
    if not available[name]:
        raise UserError(f"there is no accelerator {name!r} that torch can use here: leave --accelerator at auto")
    return name
