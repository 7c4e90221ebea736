"""The base of all Lightning modules: optimisers with schedules, averaged weights, and reproducible random numbers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import escnn.nn
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torchmetrics import Metric

from escnn_attention._checks import check_bool, check_int, check_option
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.nn.cuda_graphs import CudaGraphs
from escnn_attention.plain.blocks import LayerScale
from escnn_attention.plain.embeddings import PositionTable
from escnn_attention.plain.image_networks import ClassToken
from escnn_attention.plain.norms import LayerNorm
from escnn_attention.plain.point_network import PoseWaves
from escnn_attention.plain.projections import QueryKeyNorm, Registers


class Mean(Metric):
    r"""The mean :math:`\sum_b n_b v_b / \sum_b n_b` of values :math:`v_b` that are means over :math:`n_b` things.

    Both sums run over the batches of all processes, in single precision at least; NaN makes the mean NaN. (What
    Lightning logs with ``sync_dist`` is divided by the mean number of things of a process, rounded down.)

    Example:
        >>> mean = Mean()
        >>> mean.update(torch.tensor(1.0), 3)
        >>> mean.update(torch.tensor(5.0), 1)
        >>> mean.compute().item()
        2.0
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, value: Tensor, count: int) -> None:
        precision = torch.promote_types(value.dtype, torch.float32)
        self.total = self.total.to(precision) + count * value.detach().to(precision)
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count


class AveragedWeights(EMAWeightAveraging):
    r"""An exponential moving average of the weights, by which a network is measured and kept.

    After each step :math:`\bar\theta \leftarrow \gamma\bar\theta + (1 - \gamma)\theta`, where ``decay`` is
    :math:`\gamma`. Buffers are those of the network that trains: running statistics are averages already.

    It extends Lightning's callback to networks whose buffers come and go: escnn's convolutions make filters from their
    weights when they leave the training mode. Filters are made again from the averaged weights.

    Example:
        >>> from escnn_attention.training.modules.scheduled import AveragedWeights
        >>> AveragedWeights(0.999).should_update(step_idx=0)
        True
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, decay=decay)
        self._filters: set[str] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            average = self._average_model.module
            self._filters = {name for name, _ in average.eval().named_buffers()}
            self._filters -= {name for name, _ in average.train().named_buffers()}
            average.eval()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with self._without_filters(pl_module):
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_save_checkpoint(self, *args: Any) -> None:
        if self._average_model is not None:
            self._average_model.module.train().eval()  # which makes filters of the weights that it has now
        super().on_save_checkpoint(*args)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        with self._without_filters(pl_module):
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        with self._without_filters(pl_module):
            super()._copy_average_to_current(pl_module)

    @contextlib.contextmanager
    def _without_filters(self, pl_module: pl.LightningModule) -> Iterator[None]:
        """Take the buffers that are made of weights out of both networks, so that all others stand side by side."""
        assert self._average_model is not None
        taken: list[tuple[torch.nn.Module, str, Tensor | None]] = []
        for network, name in itertools.product((pl_module, self._average_model.module), self._filters):
            path, _, last = name.rpartition(".")
            owner = network.get_submodule(path)
            if last in owner._buffers:
                taken.append((owner, last, owner._buffers.pop(last)))
        yield
        for owner, last, buffer in taken:
            owner._buffers[last] = buffer
        if not pl_module.training:
            pl_module.train().eval()


# Modules whose parameters are scales, shifts, thresholds, positional encodings or tokens.
_SPARED: tuple[type, ...] = (
    Encoding,
    PairKernel,
    PositionTable,
    PoseWaves,
    QueryKeyNorm,
    ClassToken,
    Registers,
    LayerScale,
    LayerNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    escnn.nn.IIDBatchNorm1d,
    escnn.nn.IIDBatchNorm2d,
    escnn.nn.IIDBatchNorm3d,
    escnn.nn.GNormBatchNorm,
    escnn.nn.InducedNormBatchNorm,
    escnn.nn.InducedNormNonLinearity,
    escnn.nn.NormBatchNorm,
    escnn.nn.NormNonLinearity,
)


def decayed_parameters(network: nn.Module) -> list[str]:
    """The names of the parameters of a network that decoupled weight decay is for: the weights of linear maps.

    Norms, gains, positional encodings and kernels, class tokens, registers and biases are left out: decay would change
    their scale without making the network simpler. So do the recipes of timm and DeiT, which spare position embeddings
    and class tokens. Parameters of unknown modules count as weights.

    Example:
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn_attention.training.modules.scheduled import decayed_parameters
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> decayed_parameters(GroupSelfAttention(fields, fields, num_heads=2, kernel_size=3))
        ['plain.project_in.weight', 'plain.project_out.weight']
    """
    spared: set[int] = set()
    for module in network.modules():
        if isinstance(module, _SPARED):
            spared.update(id(parameter) for parameter in module.parameters())
        spared.update(
            id(parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if name in ("bias", "tokens") or name.startswith("bias_") or name.endswith("_bias")
        )
    return [name for name, parameter in network.named_parameters() if id(parameter) not in spared]


def parameter_groups(network: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a network in groups for an optimiser: those that decay, and those whose weight decay is 0."""
    chosen = set(decayed_parameters(network))
    weights = [parameter for name, parameter in network.named_parameters() if name in chosen]
    others = [parameter for name, parameter in network.named_parameters() if name not in chosen]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


Schedule = Literal["constant", "cosine", "one-cycle", "steps", "plateau"]

Decay = Literal["all", "weights"]

OptimizerCallable = Callable[[Iterable], Optimizer]  # as Lightning's command line knows it


def adam(parameters: Any) -> Optimizer:
    """Adam with a learning rate of 0.001, the default optimiser."""
    return torch.optim.Adam(parameters, lr=1e-3)


class Scheduled(pl.LightningModule):
    """Base of the Lightning modules here: an optimiser with a schedule, and random numbers that survive a restart.

    Args:
        optimizer: from the parameters, or groups of them, to an optimiser, with the highest rate of the schedule.
        schedule: of the learning rate, step by step. ``"constant"``; ``"cosine"``, which falls to zero like a cosine;
            ``"one-cycle"``, which rises from a 25th and falls to zero with cosine flanks; ``"steps"``, which falls by
            the factor ``gamma`` after each of the epochs ``milestones``, ascending; ``"plateau"``, which falls by
            ``gamma`` when the measure of the best epoch has not improved in more than ``patience`` validated epochs.
        warm_up: the epochs in which the learning rate rises: linearly from zero for ``"constant"``, ``"cosine"`` and
            ``"steps"``; none for ``"plateau"``.
        milestones, gamma, patience: see ``schedule``.
        decay: the parameters with weight decay: ``"all"``, or ``"weights"`` without norms, positional encodings, tokens
            and biases (:func:`decayed_parameters`). With ``torch.optim.AdamW`` it is decoupled from the gradient.
        ema: the decay, below 1, of an exponential moving average of the weights, by which the network is then measured
            and kept: over about 1 / (1 − ``ema``) steps (:class:`AveragedWeights`). None for the weights themselves.
        seed: of the random numbers of dropout. Each step has its own, so that a restart does not change them.
        cuda_graphs: whether passes of the network on a GPU run from recorded graphs
            (:class:`~escnn_attention.CudaGraphs`), which small batches need to keep a GPU busy.

    Attributes:
        monitor, mode: the measure that chooses the best epoch, which has the highest (``"max"``) or lowest (``"min"``).
        keeps_arrays: whether ``predict`` writes what is predicted as an array, beside the rows of :meth:`describe`.

    Raises:
        ValueError: another argument; in training, a warm-up that is longer, or ``"plateau"`` where no data validates.

    Example:
        >>> import torch
        >>> from escnn_attention.training import Classifier
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> module = Classifier(network, 10, schedule="cosine", warm_up=1, decay="weights", ema=0.999)  # a Scheduled
        >>> module.monitor
        'valid_accuracy'
    """

    monitor: ClassVar[str] = "valid_error"
    mode: ClassVar[Literal["max", "min"]] = "min"
    keeps_arrays: ClassVar[bool] = False

    def __init__(
        self,
        network: nn.Module,
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
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        check_option("schedule", schedule, get_args(Schedule))
        check_option("decay", decay, get_args(Decay))
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
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema: got {ema!r}, needed a number between 0 and 1, or None")
        self.optimizer, self.decay, self.ema, self.seed = optimizer, decay, ema, seed
        self.schedule: Schedule = schedule
        self.warm_up, self.milestones, self.gamma = warm_up, milestones, gamma
        self.patience = check_int("patience", patience, least=0)
        self._validated = False  # in this epoch, of which a checkpoint may hold the rest only
        self.means = nn.ModuleDict()
        self.cuda_graphs = check_bool("cuda_graphs", cuda_graphs)
        self._graphs: tuple[CudaGraphs, ...] = ()  # no child module: checkpoints hold the network itself

    def run(self, *inputs: Any, **named: Any) -> Any:
        """The output of the network, from a graph where ``cuda_graphs`` are asked for."""
        if not self.cuda_graphs:
            return self.network(*inputs, **named)
        if not self._graphs or self._graphs[0].network is not self.network:
            self._graphs = (CudaGraphs(self.network),)
        return self._graphs[0](*inputs, **named)

    def told_by_data(self, name: str, default: Any = None) -> Any:
        """An attribute of the data module of the trainer, where there is one."""
        return getattr(getattr(self._trainer, "datamodule", None), name, default)

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        # Processes that share a batch must not drop the same features of different images.
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_index, self.global_rank)) % 2**63)

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.ema is None or self.trainer.state.fn != TrainerFn.FITTING:
            return []
        return [AveragedWeights(self.ema)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimiser = self.optimizer(self.parameters() if self.decay == "all" else parameter_groups(self))
        if self.schedule == "constant" and not self.warm_up:
            return optimiser
        if self.schedule == "plateau":
            if not (self.told_by_data("validates", True) and self.trainer.limit_val_batches):
                raise ValueError("schedule: got 'plateau', which needs a part of the data that validates")
            plateau = ReduceLROnPlateau(optimiser, self.mode, factor=self.gamma, patience=self.patience, threshold=0.0)
            # Lightning would step after it has written the checkpoint of the epoch, which would then lack the step, and
            # in epochs without a validation: on_train_epoch_end steps.
            never: Any = {"scheduler": plateau, "monitor": self.monitor, "frequency": sys.maxsize}
            return {"optimizer": optimiser, "lr_scheduler": never}
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps) and self.schedule in ("cosine", "one-cycle"):
            raise ValueError(f"schedule: got {self.schedule!r}, which needs a number of epochs, trainer.max_epochs")
        self.trainer.fit_loop.setup_data()  # which counts the batches, if nothing has before
        if math.isinf(batches := self.trainer.num_training_batches):
            raise ValueError(
                f"schedule: got {self.schedule!r} for data without a length, needed trainer.limit_train_batches"
            )
        # The last step of an epoch may be of fewer batches than the others.
        in_epoch = math.ceil(batches / self.trainer.accumulate_grad_batches)
        if self.warm_up > (epochs := steps / in_epoch):
            raise ValueError(f"warm_up: got {self.warm_up:g} epochs, but the training has {epochs:g}")
        drops = tuple(milestone * in_epoch for milestone in self.milestones)
        factor = functools.partial(_factor, self.schedule, self.warm_up * in_epoch, steps, drops, self.gamma)
        rates = _FromStep(optimiser, factor)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A schedule asks for the number of steps, for which Lightning starts the workers of an epoch: it must know the
        # epoch by then, before it restores the rest.
        loops = checkpoint.get("loops")
        if loops is not None and self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.trainer.fit_loop.load_state_dict(loops["fit_loop"])

    def on_train_epoch_start(self) -> None:
        self._validated = False

    def on_validation_end(self) -> None:
        self._validated = True

    def on_train_epoch_end(self) -> None:
        if self.schedule == "plateau" and self._validated:
            metric = self.trainer.callback_metrics[self.monitor]
            cast(ReduceLROnPlateau, self.lr_schedulers()).step(metric)

    def forward(self, inputs: Any) -> Tensor:
        return self.run(inputs)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = self._loss(self(self._inputs(batch)), batch)
        self.log_mean("train_loss", loss, self._count(batch))
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self._evaluate("valid", batch)

    def test_step(self, batch: Any, batch_index: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        """The predictions that :meth:`describe` describes."""
        return self(self._inputs(batch))

    def _inputs(self, batch: Any) -> Any:
        """What ``forward`` takes of a batch, which may have targets behind its inputs."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def _count(self, batch: Any) -> int:
        """The things in a batch."""
        return len(batch[1])

    @abstractmethod
    def _loss(self, output: Tensor, batch: Any) -> Tensor: ...

    @abstractmethod
    def _measure(self, part: str, output: Tensor, batch: Any) -> None:
        """Log everything but the loss of a batch of the part ``"valid"`` or ``"test"``."""

    def _evaluate(self, part: str, batch: Any) -> None:
        output = self(self._inputs(batch))
        loss = self._loss(output, batch)
        self._measure(part, output, batch)
        self.log_mean(f"{part}_loss", loss, self._count(batch))

    def log_metric(self, name: str, count: int, *given: Tensor) -> None:
        """Log the metric with this name, which is ``given`` the values of the ``count`` things of a batch."""
        metric = getattr(self, name)
        metric(*given)
        self.log(name, metric, on_step=False, on_epoch=True, batch_size=count)

    def log_mean(self, name: str, value: Tensor, count: int) -> None:
        """Log a mean over the ``count`` things of a batch, as the mean over all things of an epoch."""
        if name not in self.means:
            self.means[name] = Mean().to(self.device)
        mean = cast(Mean, self.means[name])
        mean.update(value, count)
        self.log(name, mean, on_step=False, on_epoch=True, batch_size=count, metric_attribute=f"means.{name}")

    def truth(self, batch: Any) -> Tensor | None:
        """The targets of a batch for :meth:`describe`, by default its second part; None where the batch has none."""
        return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """The rows that ``predict`` writes: one for each prediction, with the target if it is known."""
        raise NotImplementedError(f"{type(self).__name__} has no predictions to write")


class _FromStep(LambdaLR):
    """A schedule that resumes at a step with the layout of this training, which may have more epochs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"] - 1, state_dict["_step_count"]
        self.step()  # which works out the rate of this step
        self._step_count = state_dict["_step_count"]


def _factor(schedule: Schedule, rising: float, steps: float, drops: Sequence[int], gamma: float, step: int) -> float:
    """The learning rate of a step, as a part of the highest."""
    if schedule == "one-cycle":  # as torch's OneCycleLR, also where one of its flanks has no step
        top = rising - 1
        if step <= top:
            return _cosine(1 / 25, 1.0, step / top if top else 1.0)
        return _cosine(1.0, 1 / 25e4, (step - top) / (steps - 1 - top or 1))
    if step < (rising := round(rising)):
        return step / rising
    if schedule == "constant":
        return 1.0
    if schedule == "steps":
        return gamma ** bisect_right(drops, step)
    return _cosine(1.0, 0.0, (step - rising) / max(1, steps - rising))


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(1.0, part)))
