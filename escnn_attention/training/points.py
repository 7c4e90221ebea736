"""The Lightning modules that train networks on point clouds: numbers and tensors, classes, trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from escnn_attention.models.hamiltonian import HamiltonianNetwork
from escnn_attention.training.data.points import Clouds
from escnn_attention.training.module import OptimizerCallable, Schedule, Scheduled

__all__ = ["PointClassifier", "PointDynamics", "PointRegression"]


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


class _PointModule(Scheduled):
    """Trains a network of ``(features, coords, batch=batch)`` on :class:`~.data.points.Clouds`."""

    def training_step(self, batch: Clouds, batch_index: int) -> Tensor:
        loss = self._loss(self(batch), batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.targets), sync_dist=True)
        return loss

    def validation_step(self, batch: Clouds, batch_index: int) -> None:
        self._evaluate("valid", batch)

    def test_step(self, batch: Clouds, batch_index: int) -> None:
        self._evaluate("test", batch)

    def forward(self, clouds: Clouds) -> Tensor:
        """What the network says of a batch."""
        output: Tensor = self.network(clouds.features, clouds.coords, batch=clouds.batch)
        return output

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        raise NotImplementedError

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        """Log everything but the loss."""
        raise NotImplementedError

    def _evaluate(self, part: str, batch: Clouds) -> None:
        output = self(batch)
        self._measure(part, output, batch)
        loss = self._loss(output, batch)
        self._log(f"{part}_loss", loss, batch)

    def _log(self, name: str, value: Any, batch: Clouds) -> None:
        self.log(name, value, on_step=False, on_epoch=True, batch_size=len(batch.targets), sync_dist=True)


class PointRegression(_PointModule):
    r"""Trains a network that gives numbers or tensors of clouds.

    Targets may be standardised: where the data has an ``original`` (as :class:`~.data.qm9.QM9` has), mean absolute
    errors are in its units, as ``test_mae_NAME`` of each of its ``targets``. ``error`` is the mean absolute error of
    what the data gives, over all targets; the epoch with the lowest is the best.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, T)`` or ``(B, d, d)``, as the targets are; those of
            shape ``(B,)`` are taken as ``(B, 1)``.
        loss: ``"l1"`` or ``"mse"``, of what the data gives.
        optimizer, schedule, warm_up, seed: see :class:`~.module.Classifier`.

    Raises:
        ValueError: an unknown loss or schedule; on a batch, an output of another shape than the targets.

    Example:
        >>> import torch
        >>> from escnn import gspaces
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointRegression
        >>> network = PointTransformer(gspaces.rot2dOnR2(4), 3, 2, fields=4, num_blocks=1)
        >>> batch = Clouds(torch.randn(5, 2), torch.randn(5, 3), torch.tensor([0, 0, 0, 1, 1]), torch.randn(2, 2))
        >>> PointRegression(network)(batch).shape
        torch.Size([2, 2])
    """

    monitor: ClassVar[str] = "valid_error"
    mode: ClassVar[Literal["max", "min"]] = "min"

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: Literal["l1", "mse"] = "l1",
        optimizer: OptimizerCallable = _adam,
        schedule: Schedule = "constant",
        warm_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, schedule, warm_up, seed)
        if loss not in ("l1", "mse"):
            raise ValueError(f"loss: got {loss!r}, needed 'l1' or 'mse'")
        self.network = network
        self.loss = nn.L1Loss() if loss == "l1" else nn.MSELoss()

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The predictions, in the units of the data."""
        return self._original(self(batch))

    def describe(self, predictions: Tensor) -> list[dict[str, Any]]:
        """One row a cloud: its number and the predictions; those of tensors by their indices."""
        names = self._names(predictions)
        if predictions.dim() > 2:
            names = [f"{names[0]}_{i}{j}" for i in range(predictions.shape[1]) for j in range(predictions.shape[2])]
        return [
            {"cloud": i, **dict(zip(names, row.tolist(), strict=True))}
            for i, row in enumerate(predictions.flatten(start_dim=1))
        ]

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        loss: Tensor = self.loss(output, self._targets(output, batch))
        return loss

    def _targets(self, output: Tensor, batch: Clouds) -> Tensor:
        targets = batch.targets if batch.targets.dim() > 1 else batch.targets[:, None]
        if output.shape != targets.shape:
            raise ValueError(f"network: got an output {tuple(output.shape)}, needed {tuple(targets.shape)}")
        return targets

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        targets = self._targets(output, batch)
        self._log(f"{part}_error", (output - targets).abs().mean(), batch)
        errors = (self._original(output) - self._original(targets)).abs()
        by_target = errors.mean().view(1) if errors.dim() > 2 else errors.mean(0)
        for name, value in zip(self._names(output), by_target, strict=True):
            self._log(f"{part}_mae_{name}", value, batch)

    def _original(self, values: Tensor) -> Tensor:
        original = getattr(self._data(), "original", None)
        found: Tensor = values if original is None else original(values)
        return found

    def _names(self, values: Tensor) -> list[str]:
        count = 1 if values.dim() > 2 else values.shape[1]
        names: Sequence[str] | None = getattr(self._data(), "targets", None)
        return [f"target{i}" for i in range(count)] if names is None else list(names)

    def _data(self) -> Any:
        return None if self._trainer is None else getattr(self.trainer, "datamodule", None)


class PointClassifier(_PointModule):
    """Trains a network that gives the logits of clouds, by cross-entropy: of one classification, or of several.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, num_targets * num_classes)``.
        num_classes: of each classification.
        num_targets: the number of classifications, such as counts of several things. The accuracy is the mean over all
            of them, and ``exact`` the part of the clouds in which all are right.
        label_smoothing: of the cross-entropy.
        optimizer, schedule, warm_up, seed: see :class:`~.module.Classifier`.

    Raises:
        ValueError: an unknown schedule; on a batch, an output or targets of another shape.

    Example:
        >>> import torch
        >>> from escnn import gspaces
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointClassifier
        >>> network = PointTransformer(gspaces.rot2dOnR2(4), 1, 4 * 3, fields=4, num_blocks=1)
        >>> batch = Clouds(torch.randn(5, 2), torch.ones(5, 1), torch.tensor([0, 0, 0, 1, 1]), torch.zeros(2, 4))
        >>> PointClassifier(network, num_classes=3, num_targets=4)(batch).shape
        torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        num_targets: int = 1,
        *,
        label_smoothing: float = 0.0,
        optimizer: OptimizerCallable = _adam,
        schedule: Schedule = "constant",
        warm_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, schedule, warm_up, seed)
        self.network = network
        self.num_classes, self.num_targets = num_classes, num_targets
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.valid_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.valid_exact, self.test_exact = MeanMetric(), MeanMetric()

    def forward(self, clouds: Clouds) -> Tensor:
        """The logits ``(B, num_targets, num_classes)``."""
        output = super().forward(clouds)
        if output.shape[1:] != (self.num_targets * self.num_classes,):
            raise ValueError(
                f"network: got an output {tuple(output.shape)}, needed {len(clouds.targets)} clouds of "
                f"{self.num_targets} · {self.num_classes}"
            )
        return output.unflatten(1, (self.num_targets, self.num_classes))

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The probabilities ``(B, num_targets, num_classes)``."""
        return self(batch).softmax(dim=2)

    def describe(self, predictions: Tensor) -> list[dict[str, Any]]:
        """One row a cloud: its number, and of each classification the class and the probabilities of all."""
        rows = []
        for i, cloud in enumerate(predictions):
            row: dict[str, Any] = {"cloud": i}
            for t, probabilities in enumerate(cloud):
                mark = "" if self.num_targets == 1 else f"{t}_"
                row[f"{mark}class"] = int(probabilities.argmax())
                row.update({f"{mark}p{j}": float(p) for j, p in enumerate(probabilities)})
            rows.append(row)
        return rows

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        loss: Tensor = self.loss(output.flatten(0, 1), self._labels(batch).flatten())
        return loss

    def _labels(self, batch: Clouds) -> Tensor:
        """``(B, num_targets)``."""
        labels = batch.targets if batch.targets.dim() > 1 else batch.targets[:, None]
        if labels.shape[1:] != (self.num_targets,):
            raise ValueError(f"num_targets: got {self.num_targets}, but targets are {tuple(batch.targets.shape)}")
        return labels

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        labels = self._labels(batch)
        accuracy, exact = getattr(self, f"{part}_accuracy"), getattr(self, f"{part}_exact")
        accuracy(output.flatten(0, 1), labels.flatten())
        self.log(f"{part}_accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(labels))
        if self.num_targets > 1:
            exact.update((output.argmax(2) == labels).all(1).float())
            self.log(f"{part}_exact", exact, on_step=False, on_epoch=True, batch_size=len(labels))


class PointDynamics(_PointModule):
    """Trains a Hamiltonian network by the trajectories that it gives.

    The loss is the mean square of the difference of positions and momenta, over the frames that are predicted, which
    are all but the first. (A mean that includes the first, which is given, is (T − 1)/T of it.) ``error`` is the same,
    and the epoch with the lowest is the best. ``drift`` is how far the energy that the network conserves changes along
    a trajectory at most, relative to the true energy in the first frame.

    Args:
        network: a :class:`~escnn_attention.models.HamiltonianNetwork`.
        step: the time from one frame to the next; by default what the data says (``step``).
        substeps: the steps of the integrator between two frames.
        optimizer, schedule, warm_up, seed: see :class:`~.module.Classifier`.

    Raises:
        TypeError: another network.
        ValueError: an unknown schedule; no step that is known; on a batch, no frames.

    Example:
        >>> import torch
        >>> from escnn import gspaces
        >>> from escnn_attention.models import HamiltonianNetwork, PointTransformer
        >>> from escnn_attention.training import Clouds, PointDynamics
        >>> network = HamiltonianNetwork(PointTransformer(gspaces.rot2dOnR2(4), 2, 1, fields=4, num_blocks=1))
        >>> frames = torch.randn(6, 5, 2, 2)
        >>> batch = Clouds(frames[:, 0, 0], torch.rand(6, 2) + 1, torch.zeros(6).long(), torch.ones(1), frames)
        >>> PointDynamics(network, step=0.01)(batch).shape
        torch.Size([6, 5, 2, 2])
    """

    monitor: ClassVar[str] = "valid_error"
    mode: ClassVar[Literal["max", "min"]] = "min"

    network: HamiltonianNetwork

    def __init__(
        self,
        network: nn.Module,
        *,
        step: float | None = None,
        substeps: int = 1,
        optimizer: OptimizerCallable = _adam,
        schedule: Schedule = "constant",
        warm_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, schedule, warm_up, seed)
        if not isinstance(network, HamiltonianNetwork):
            raise TypeError(f"network: got {type(network).__name__}, needed a HamiltonianNetwork")
        if step is not None and not step > 0:
            raise ValueError(f"step: got {step!r}, needed a positive time")
        self.network = network
        self.step = step
        self.substeps = substeps

    def forward(self, clouds: Clouds) -> Tensor:
        """The trajectories ``(N, T, 2, d)`` from the first frames, as many frames as the clouds have."""
        frames = self._frames(clouds)
        return self.network(
            frames[:, 0, 0],
            frames[:, 0, 1],
            clouds.features,
            clouds.batch,
            num_frames=frames.shape[1],
            step=self._step(),
            substeps=self.substeps,
        )

    def _frames(self, clouds: Clouds) -> Tensor:
        if clouds.point_targets is None or clouds.point_targets.dim() != 4 or clouds.point_targets.shape[1] < 2:
            found = None if clouds.point_targets is None else tuple(clouds.point_targets.shape)
            raise ValueError(f"point_targets: got {found}, needed at least two frames, (points, frames, 2, d)")
        return clouds.point_targets

    def _step(self) -> float:
        if self.step is not None:
            return self.step
        step = None if self._trainer is None else getattr(getattr(self.trainer, "datamodule", None), "step", None)
        if step is None:
            raise ValueError("step: got None, and the data does not say the time from one frame to the next")
        return float(step)

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return (output - self._frames(batch))[:, 1:].square().mean()

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        self._log(f"{part}_error", self._loss(output, batch), batch)
        energies = torch.stack(
            [
                self.network.energy(output[:, t, 0], output[:, t, 1], batch.features, batch.batch)
                for t in range(output.shape[1])
            ]
        )
        drift = ((energies - energies[0]).abs().amax(0) / batch.targets.abs()).mean()
        self._log(f"{part}_drift", drift, batch)
