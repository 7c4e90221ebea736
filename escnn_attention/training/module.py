"""The Lightning module that trains a classifier, and what others have in common with it."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["Classifier", "Schedule", "Scheduled"]

Schedule = Literal["constant", "cosine", "one-cycle", "steps", "plateau"]

OptimizerCallable = Callable[[Iterable], Optimizer]  # as Lightning's command line knows it


class Scheduled(pl.LightningModule):
    """What all modules here share: an optimiser with a schedule, and random numbers that are the same after a restart.

    Args:
        optimizer, schedule, warm_up, seed, milestones, gamma, patience: see :class:`Classifier`.

    Raises:
        ValueError: an unknown schedule, a warm-up that is negative, milestones that do not ascend or are of another
            schedule, a factor that is not between 0 and 1, or a patience that is negative.
    """

    monitor: ClassVar[str] = "valid_accuracy"
    """What the best epoch is chosen by."""
    mode: ClassVar[Literal["max", "min"]] = "max"
    """Whether it is the highest or the lowest."""

    network: nn.Module

    def __init__(
        self,
        optimizer: OptimizerCallable,
        schedule: Schedule,
        warm_up: float,
        seed: int,
        *,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        patience: int = 10,
    ) -> None:
        super().__init__()
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule: got {schedule!r}, needed one of {', '.join(map(repr, get_args(Schedule)))}")
        if not warm_up >= 0:
            raise ValueError(f"warm_up: got {warm_up!r}, needed a number of epochs that is not negative")
        if warm_up and schedule == "plateau":
            raise ValueError(f"warm_up: got {warm_up!r}, needed 0 for the schedule 'plateau'")
        milestones = tuple(milestones)
        if bool(milestones) != (schedule == "steps"):
            raise ValueError(f"milestones: got {milestones} for the schedule {schedule!r}; 'steps' alone needs them")
        if list(milestones) != sorted(set(milestones)) or (milestones and milestones[0] < 1):
            raise ValueError(f"milestones: got {milestones}, needed ascending numbers of epochs")
        if not 0 < gamma < 1:
            raise ValueError(f"gamma: got {gamma!r}, needed a number between 0 and 1")
        if patience < 0:
            raise ValueError(f"patience: got {patience!r}, needed a number of epochs that is not negative")
        self.optimizer = optimizer
        self.schedule: Schedule = schedule
        self.warm_up = warm_up
        self.milestones = milestones
        self.gamma = gamma
        self.patience = patience
        self.seed = seed

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        # Processes that share a batch must not drop the same features of different images.
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_index, self.global_rank)) % 2**63)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimiser = self.optimizer(self.parameters())
        if self.schedule == "constant" and not self.warm_up:
            return optimiser
        if self.schedule == "plateau":
            plateau = ReduceLROnPlateau(optimiser, self.mode, factor=self.gamma, patience=self.patience, threshold=0.0)
            return {"optimizer": optimiser, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}
        steps = int(self.trainer.estimated_stepping_batches)
        epochs = steps * self.trainer.accumulate_grad_batches / self.trainer.num_training_batches
        if self.warm_up > epochs:
            raise ValueError(f"warm_up: got {self.warm_up:g} epochs, but the training has {epochs:g}")
        rising = self.warm_up * self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        if self.schedule == "one-cycle":
            peak = optimiser.param_groups[0]["lr"]
            return _stepwise(
                optimiser, OneCycleLR(optimiser, peak, steps, pct_start=rising / steps, cycle_momentum=False)
            )
        epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        drops = tuple(round(milestone * epoch) for milestone in self.milestones)
        factor = functools.partial(_factor, self.schedule, round(rising), steps, drops=drops, gamma=self.gamma)
        return _stepwise(optimiser, LambdaLR(optimiser, factor))

    def describe(self, predictions: Tensor) -> list[dict[str, Any]]:
        """What ``predict`` writes of the predictions of all test data: one row each.

        Raises:
            NotImplementedError: nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no predictions to write")


class Classifier(Scheduled):
    r"""Trains a network that gives logits, by cross-entropy.

    Args:
        network: images ``(B, C, H, W)`` to logits ``(B, num_classes)``.
        num_classes: the number of classes; by default what the network says (``network.num_classes``).
        optimizer: from the parameters to an optimiser; its learning rate is the highest of the schedule.
        schedule: of the learning rate, step by step. ``"constant"``; ``"cosine"``, which falls to zero like a cosine;
            ``"one-cycle"``, which rises from a 25th and falls to zero with cosine flanks; ``"steps"``, which falls by
            ``gamma`` at each of the ``milestones``; ``"plateau"``, which falls by it when the validation accuracy has
            not risen for more than ``patience`` epochs.
        warm_up: the epochs in which the learning rate rises: linearly from zero for ``"constant"``, ``"cosine"`` and
            ``"steps"``; none for ``"plateau"``.
        milestones: the epochs, ascending, after which the learning rate falls, for ``"steps"``.
        gamma: the factor by which it falls.
        patience: in epochs, for ``"plateau"``.
        label_smoothing: of the cross-entropy.
        seed: of the random numbers drawn while training (dropout); each step starts from one of its own, so that it is
            the same whether or not the process was restarted before it.

    Raises:
        ValueError: no number of classes, an unknown schedule, a warm-up that is negative or longer than the training,
            milestones that do not ascend or are of another schedule, a factor that is not between 0 and 1, or a
            patience that is negative.

    Example:
        >>> import torch
        >>> from escnn_attention.training import Classifier
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> Classifier(network, 10, schedule="cosine", warm_up=1)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int | None = None,
        *,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        schedule: Schedule = "constant",
        warm_up: float = 0.0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        patience: int = 10,
        label_smoothing: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, schedule, warm_up, seed, milestones=milestones, gamma=gamma, patience=patience)
        if num_classes is None:
            num_classes = getattr(network, "num_classes", None)
        if not isinstance(num_classes, int):
            raise ValueError(f"num_classes: {type(network).__name__} does not tell, so it has to be given")
        self.network = network
        self.num_classes = num_classes
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.valid_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self._logits(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(labels), sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._evaluate("valid", self.valid_accuracy, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._evaluate("test", self.test_accuracy, batch)

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The probabilities of the classes, ``(B, num_classes)``."""
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(images).softmax(dim=1)

    def describe(self, predictions: Tensor) -> list[dict[str, Any]]:
        """One row an image: its number, the class, and the probabilities of all classes."""
        return [
            {"image": i, "class": int(p.argmax()), **{f"p{j}": float(value) for j, value in enumerate(p)}}
            for i, p in enumerate(predictions)
        ]

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self(images)
        if logits.shape != (len(images), self.num_classes):
            raise ValueError(
                f"network: got {tuple(logits.shape)} for {len(images)} images, needed one number for each of the"
                f" {self.num_classes} classes, {(len(images), self.num_classes)}"
            )
        return logits

    def _evaluate(self, part: str, accuracy: MulticlassAccuracy, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self._logits(images)
        accuracy(logits, labels)
        self.log(f"{part}_accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(labels))
        self.log(
            f"{part}_loss",
            self.loss(logits, labels),
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
            sync_dist=True,
        )


def _stepwise(optimiser: Optimizer, schedule: Any) -> OptimizerLRScheduler:
    return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _factor(
    schedule: Schedule, rising: int, steps: int, step: int, *, drops: Sequence[int] = (), gamma: float = 0.1
) -> float:
    """The learning rate of a step, as a part of the highest."""
    if step < rising:
        return step / rising
    if schedule == "constant":
        return 1.0
    if schedule == "steps":
        return gamma ** bisect_right(drops, step)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))
