"""What all Lightning modules here share: an optimiser with a schedule, and reproducible random numbers."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from escnn_attention.training.modules.averaging import AveragedWeights
from escnn_attention.training.modules.decay import parameter_groups
from escnn_attention.training.modules.mean import Mean

__all__ = ["Decay", "OptimizerCallable", "Schedule", "Scheduled", "adam"]

Schedule = Literal["constant", "cosine", "one-cycle", "steps", "plateau"]

Decay = Literal["all", "weights"]

OptimizerCallable = Callable[[Iterable], Optimizer]  # as Lightning's command line knows it


def adam(parameters: Any) -> Optimizer:
    """Adam with a learning rate of 0.001, the default optimiser."""
    return torch.optim.Adam(parameters, lr=1e-3)


class Scheduled(pl.LightningModule):
    """What all modules here share: how weights are learned, with random numbers that are the same after a restart.

    Args:
        optimizer: from the parameters, or groups of them, to an optimiser; its learning rate is the highest of the
            schedule.
        schedule: of the learning rate, step by step. ``"constant"``; ``"cosine"``, which falls to zero like a cosine;
            ``"one-cycle"``, which rises from a 25th and falls to zero with cosine flanks; ``"steps"``, which falls by
            ``gamma`` at each of the ``milestones``; ``"plateau"``, which falls by it when what the best epoch is chosen
            by has not got better for more than ``patience`` epochs.
        warm_up: the epochs in which the learning rate rises: linearly from zero for ``"constant"``, ``"cosine"`` and
            ``"steps"``; none for ``"plateau"``.
        milestones: the epochs, ascending, after which the learning rate falls, for ``"steps"``.
        gamma: the factor by which it falls.
        patience: in epochs, for ``"plateau"``.
        decay: what the weight decay of the optimiser is for: ``"all"`` parameters; or ``"weights"``, none of norms, of
            positional encodings and no biases
            (:func:`~escnn_attention.training.modules.decay.decayed_parameters`). With ``torch.optim.AdamW`` it is
            decoupled from the gradient.
        ema: the decay, below 1, of an exponential moving average of the weights, by which the network is then measured
            and kept: an average over about 1 / (1 − ``ema``) steps
            (:class:`~escnn_attention.training.modules.averaging.AveragedWeights`). None for the weights themselves.
        seed: of the random numbers drawn while training (dropout); each step starts from one of its own, so that it is
            the same whether or not the process was restarted before it.

    Attributes:
        monitor: what the best epoch is chosen by.
        mode: whether it is the highest (``"max"``) or the lowest (``"min"``).

    Raises:
        ValueError: an unknown schedule or decay, a warm-up that is negative or longer than the training, milestones
            that do not ascend or are of another schedule, a factor or an average's decay that is not between 0 and 1,
            or a patience that is negative.

    Example:
        >>> import torch
        >>> from escnn_attention.training import Classifier
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> module = Classifier(network, 10, schedule="cosine", warm_up=1, decay="weights", ema=0.999)  # a Scheduled
        >>> module.monitor
        'valid_accuracy'
    """

    monitor: ClassVar[str] = "valid_accuracy"
    mode: ClassVar[Literal["max", "min"]] = "max"

    network: nn.Module

    def __init__(
        self,
        *,
        optimizer: OptimizerCallable = adam,
        schedule: Schedule = "constant",
        warm_up: float = 0.0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        patience: int = 10,
        decay: Decay = "all",
        ema: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule: got {schedule!r}, needed one of {', '.join(map(repr, get_args(Schedule)))}")
        if not isinstance(warm_up, int | float) or not warm_up >= 0:
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
        if decay not in get_args(Decay):
            raise ValueError(f"decay: got {decay!r}, needed one of {', '.join(map(repr, get_args(Decay)))}")
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema: got {ema!r}, needed a number between 0 and 1, or None")
        self.optimizer = optimizer
        self.decay: Decay = decay
        self.ema = ema
        self.schedule: Schedule = schedule
        self.warm_up = warm_up
        self.milestones = milestones
        self.gamma = gamma
        self.patience = patience
        self.seed = seed
        self.means = nn.ModuleDict()

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        # Processes that share a batch must not drop the same features of different images.
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_index, self.global_rank)) % 2**63)

    def configure_callbacks(self) -> list[pl.Callback]:
        trains = self.ema is not None and self.trainer.state.fn == TrainerFn.FITTING
        return [AveragedWeights(cast(float, self.ema))] if trains else []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimiser = self.optimizer(self.parameters() if self.decay == "all" else parameter_groups(self))
        if self.schedule == "constant" and not self.warm_up:
            return optimiser
        if self.schedule == "plateau":
            if not getattr(getattr(self.trainer, "datamodule", None), "validates", True):
                raise ValueError("schedule: got 'plateau', which needs a part of the data that validates")
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
                optimiser, _OneCycle(optimiser, peak, steps, pct_start=rising / steps, cycle_momentum=False)
            )
        epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        drops = tuple(round(milestone * epoch) for milestone in self.milestones)
        factor = functools.partial(_factor, self.schedule, round(rising), steps, drops=drops, gamma=self.gamma)
        return _stepwise(optimiser, _Factors(optimiser, factor))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A schedule asks for the number of steps, for which Lightning has the workers begin with an epoch: it has to
        # know by then which one that is, and not only when it restores the rest.
        loops = checkpoint.get("loops")
        if loops is not None and self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.trainer.fit_loop.load_state_dict(loops["fit_loop"])

    def on_train_epoch_end(self) -> None:
        metric = self.trainer.callback_metrics.get(self.monitor)
        # Lightning steps after the checkpoint of the epoch is written, so that a training that goes on would lack it.
        if self.schedule == "plateau" and metric is not None:
            cast(ReduceLROnPlateau, self.lr_schedulers()).step(metric)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.schedule != "plateau":
            super().lr_scheduler_step(scheduler, metric)

    def log_mean(self, name: str, value: Tensor, count: int) -> None:
        """Log a mean over the ``count`` things of a batch, as the mean over all things of an epoch."""
        if name not in self.means:
            self.means[name] = Mean().to(self.device)
        mean = cast(Mean, self.means[name])
        mean.update(value, count)
        self.log(name, mean, on_step=False, on_epoch=True, batch_size=count, metric_attribute=f"means.{name}")

    def truth(self, batch: Any) -> Tensor | None:
        """What is true of the things of a batch, as :meth:`describe` takes it; None where the batch does not say."""
        return None

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """What ``predict`` writes of the predictions of all data, beside what is true: one row each.

        Raises:
            NotImplementedError: nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no predictions to write")


class _FromStep(LRScheduler):
    """A schedule that goes on from a step, laid out as here: over more epochs, where the training is longer now."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"] - 1, state_dict["_step_count"]
        self.step()  # which works out the rate of this step
        self._step_count = state_dict["_step_count"]


class _OneCycle(_FromStep, OneCycleLR):
    pass


class _Factors(_FromStep, LambdaLR):
    pass


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
