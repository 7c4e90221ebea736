"""Lightning modules for clouds of points: classification, regression, trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from escnn_attention._checks import check_length, check_option, check_probability
from escnn_attention.models.hamiltonian import HamiltonianNetwork
from escnn_attention.training.data.clouds.base import Clouds
from escnn_attention.training.modules.classifier import class_columns
from escnn_attention.training.modules.scheduled import Scheduled


class PointModule(Scheduled):
    """Trains a network of ``(features, coords, batch=batch)``, and of ``edge_attr`` where :class:`.Clouds` have it."""

    def forward(self, clouds: Clouds) -> Tensor:
        """The output of the network for a batch."""
        of_pairs = {} if clouds.edge_attr is None else {"edge_attr": clouds.edge_attr}
        return self.run(clouds.features, clouds.coords, batch=clouds.batch, **of_pairs)

    @staticmethod
    def targets(batch: Clouds) -> Tensor:
        """The targets of the clouds, ``(B, T, …)``; ``(B,)`` counts as ``(B, 1)``."""
        return batch.targets if batch.targets.dim() > 1 else batch.targets[:, None]

    def _inputs(self, batch: Clouds) -> Clouds:
        return batch

    def _count(self, batch: Clouds) -> int:
        return len(batch.targets)


class TrajectoryModule(PointModule):
    """Trains a network on trajectories: clouds whose ``point_targets`` ``(N, T, 2, d)`` are T frames.

    Args:
        step: the time from one frame to the next, positive; by default ``step`` of the data.
        **options: of :class:`~.scheduled.Scheduled`, such as ``optimizer`` and ``schedule``.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises, or another step.
    """

    def __init__(self, network: nn.Module, *, step: float | None = None, **options: Any) -> None:
        super().__init__(network, **options)
        self.step = None if step is None else check_length("step", step, "time")

    def frames(self, clouds: Clouds) -> Tensor:
        """The frames of a batch, at least two of them."""
        if clouds.point_targets is None or clouds.point_targets.dim() != 4 or clouds.point_targets.shape[1] < 2:
            found = None if clouds.point_targets is None else tuple(clouds.point_targets.shape)
            raise ValueError(f"point_targets: got {found}, needed at least two frames, (points, frames, 2, d)")
        return clouds.point_targets

    def time_of_step(self) -> float:
        """The time from one frame to the next, which the module or the data must know."""
        step = self.told_by_data("step") if self.step is None else self.step
        if step is None:
            raise ValueError("step: got None, and the data does not say the time from one frame to the next")
        return float(step)

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        self.log_mean(f"{part}_error", self._loss(output, batch), len(batch.targets))


def numbered(thing: str, names: Sequence[str], values: Tensor, truth: Tensor | None) -> list[dict[str, Any]]:
    """Rows of numbers: the number of each ``thing``, its values by name, and the true ones as ``true_NAME``."""
    columns = [*names, *([] if truth is None else [f"true_{name}" for name in names])]
    both = values if truth is None else torch.cat([values, truth], 1)
    return [{thing: i, **dict(zip(columns, row.tolist(), strict=True))} for i, row in enumerate(both)]


class PointClassifier(PointModule):
    """Trains a network that gives the logits of clouds, by cross-entropy: of one classification, or of several.

    The accuracy is the mean over all classifications, and ``exact`` the part of the clouds in which all are right.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, num_targets * num_classes)``.
        num_classes: of each classification.
        num_targets: the number of classifications, such as counts of several things.
        label_smoothing, options: of :class:`~.classifier.Classifier`.

    Raises:
        ValueError: as :class:`~.classifier.Classifier` raises; on a batch, also targets of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointClassifier
        >>> from escnn import gspaces
        >>> network = PointTransformer(gspaces.rot2dOnR2(4), 1, 4 * 3, fields=4, num_blocks=1)
        >>> batch = Clouds(torch.randn(5, 2), torch.ones(5, 1), torch.tensor([0, 0, 0, 1, 1]), torch.zeros(2, 4))
        >>> PointClassifier(network, num_classes=3, num_targets=4)(batch).shape
        torch.Size([2, 4, 3])
    """

    monitor: ClassVar[str] = "valid_accuracy"
    mode: ClassVar[Literal["max", "min"]] = "max"

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        num_targets: int = 1,
        *,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        self.num_classes, self.num_targets = num_classes, num_targets
        self.loss = nn.CrossEntropyLoss(label_smoothing=check_probability("label_smoothing", label_smoothing))
        for part in ("valid", "test"):
            setattr(self, f"{part}_accuracy", MulticlassAccuracy(num_classes, average="micro"))

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

    def truth(self, batch: Clouds) -> Tensor:
        """The classes ``(B, num_targets)``."""
        labels = self.targets(batch)
        if labels.shape[1:] != (self.num_targets,):
            raise ValueError(f"num_targets: got {self.num_targets}, but targets are {tuple(batch.targets.shape)}")
        return labels

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a cloud: its number, and of each classification the class, the label and the probabilities of all."""
        rows = []
        for i, cloud in enumerate(predictions):
            row: dict[str, Any] = {"cloud": i}
            for t, probabilities in enumerate(cloud):
                mark = "" if self.num_targets == 1 else f"{t}_"
                row |= class_columns(probabilities, None if truth is None else truth[i, t], mark)
            rows.append(row)
        return rows

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return self.loss(output.flatten(0, 1), self.truth(batch).flatten())

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        labels = self.truth(batch)
        self.log_metric(f"{part}_accuracy", len(labels), output.flatten(0, 1), labels.flatten())
        if self.num_targets > 1:
            exact = (output.argmax(2) == labels).all(1).float()
            self.log_mean(f"{part}_exact", exact.mean(), len(labels))


class PointRegression(PointModule):
    r"""Trains a network that gives numbers or tensors of clouds.

    ``error`` is the mean absolute error of what the data gives, over all targets; the epoch with the lowest is the
    best. ``mae_NAME`` is that of each of the ``targets`` of the data, in its units: as what ``original`` makes of
    standardised values, where the data has it, as :class:`~escnn_attention.training.QM9` has.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, T)`` or ``(B, d, d)``, as the targets are; those of
            shape ``(B,)`` are taken as ``(B, 1)``.
        loss: ``"l1"`` or ``"mse"``, of what the data gives.
        **options: of :class:`~.scheduled.Scheduled`, such as ``optimizer`` and ``schedule``.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises, or another loss; on a batch, an output of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointRegression
        >>> from escnn import gspaces
        >>> network = PointTransformer(gspaces.rot2dOnR2(4), 3, 2, fields=4, num_blocks=1)
        >>> batch = Clouds(torch.randn(5, 2), torch.randn(5, 3), torch.tensor([0, 0, 0, 1, 1]), torch.randn(2, 2))
        >>> PointRegression(network)(batch).shape
        torch.Size([2, 2])
    """

    def __init__(self, network: nn.Module, *, loss: Literal["l1", "mse"] = "l1", **options: Any) -> None:
        super().__init__(network, **options)
        check_option("loss", loss, ("l1", "mse"))
        self.loss = nn.L1Loss() if loss == "l1" else nn.MSELoss()

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The predictions, in the units of the data."""
        return self._original(self(batch))

    def truth(self, batch: Clouds) -> Tensor:
        """The targets, in the units of the data."""
        return self._original(self.targets(batch))

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a cloud: its number, the predictions and the targets; those of tensors by their indices."""
        names = self._names(predictions)
        if predictions.dim() > 2:
            names = [f"{names[0]}_{i}{j}" for i in range(predictions.shape[1]) for j in range(predictions.shape[2])]
        return numbered("cloud", names, predictions.flatten(1), None if truth is None else truth.flatten(1))

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        targets = self.targets(batch)
        if output.shape != targets.shape:
            raise ValueError(f"network: got an output {tuple(output.shape)}, needed {tuple(targets.shape)}")
        return self.loss(output, targets)

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        targets = self.targets(batch)
        self.log_mean(f"{part}_error", (output - targets).abs().mean(), len(batch.targets))
        errors = (self._original(output) - self._original(targets)).abs()
        by_target = errors.mean().view(1) if errors.dim() > 2 else errors.mean(0)
        for name, value in zip(self._names(output), by_target, strict=True):
            self.log_mean(f"{part}_mae_{name}", value, len(batch.targets))

    def _original(self, values: Tensor) -> Tensor:
        return self.told_by_data("original", lambda x: x)(values)

    def _names(self, values: Tensor) -> list[str]:
        count = 1 if values.dim() > 2 else values.shape[1]
        return list(self.told_by_data("targets", [f"target{i}" for i in range(count)]))


class PointDynamics(TrajectoryModule):
    """Trains a Hamiltonian network by the trajectories that it gives.

    The loss is the mean square of the difference of positions and momenta, over all frames but the first. (A mean that
    includes the first, which is given, is (T − 1)/T of it.) ``error`` is the same, and the epoch with the lowest is the
    best. ``drift`` is how far the energy that the network conserves changes along a trajectory at most, relative to the
    true energy in the first frame.

    Args:
        network: a :class:`~escnn_attention.models.HamiltonianNetwork`.
        substeps: the steps of the integrator between two frames.
        **options: of :class:`TrajectoryModule`, such as ``step`` and ``optimizer``.

    Raises:
        TypeError: another network.
        ValueError: as :class:`TrajectoryModule` raises; no known step; on a batch, no frames, or features of pairs.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HamiltonianNetwork, PointTransformer
        >>> from escnn_attention.training import Clouds, PointDynamics
        >>> from escnn import gspaces
        >>> network = HamiltonianNetwork(PointTransformer(gspaces.rot2dOnR2(4), 2, 1, fields=4, num_blocks=1))
        >>> frames = torch.randn(6, 5, 2, 2)
        >>> batch = Clouds(frames[:, 0, 0], torch.rand(6, 2) + 1, torch.zeros(6).long(), torch.ones(1), frames)
        >>> PointDynamics(network, step=0.01)(batch).shape
        torch.Size([6, 5, 2, 2])
    """

    network: HamiltonianNetwork

    def __init__(self, network: nn.Module, *, substeps: int = 1, **options: Any) -> None:
        super().__init__(network, **options)
        if not isinstance(network, HamiltonianNetwork):
            raise TypeError(f"network: got {type(network).__name__}, needed a HamiltonianNetwork")
        self.substeps = substeps

    def forward(self, clouds: Clouds) -> Tensor:
        """The trajectories ``(N, T, 2, d)`` from the first frames, as many frames as the clouds have."""
        frames = self.frames(clouds)
        if clouds.edge_attr is not None:
            raise ValueError("edge_attr: got features of pairs, and a HamiltonianNetwork takes none; leave them out")
        return self.run(
            frames[:, 0, 0],
            frames[:, 0, 1],
            clouds.features,
            clouds.batch,
            num_frames=frames.shape[1],
            step=self.time_of_step(),
            substeps=self.substeps,
        )

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return (output - self.frames(batch))[:, 1:].square().mean()

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        super()._measure(part, output, batch)
        frames = (frame.unbind(1) for frame in output.unbind(1))
        energies = torch.stack([self.network.energy(q, p, batch.features, batch.batch) for q, p in frames])
        drift = ((energies - energies[0]).abs().amax(0) / batch.targets.abs()).mean()
        self.log_mean(f"{part}_drift", drift, len(batch.targets))


class PointForecast(TrajectoryModule):
    r"""Trains a network to forecast the positions of bodies from their positions and velocities.

    .. math:: \hat q_i(T) = q_i(0) + T\,v_i(0) + f_i\big((c_1, v_1(0)), q_1(0), (c_2, v_2(0)), q_2(0), \dots\big)

    The network f takes the features c of all bodies and, in the channels behind them, their velocities; its output is
    the displacement of each body from uniform motion. If it is equivariant to a group with the velocities as a vector
    field, the forecast is, and to translations. The loss is the mean square over all coordinates of all bodies, in the
    last of the frames that the clouds have. ``error`` is the same, and the epoch with the lowest is the best.

    Args:
        network: of ``(features, coords, batch=batch)`` with features ``(N, C + d)`` to ``(N, d)``, such as a
            :class:`~escnn_attention.models.PointTransformer` with ``pool=None`` and ``"vector"`` as its output.
        **options: of :class:`TrajectoryModule`, such as ``optimizer`` and ``step``, T where there are two frames.

    Raises:
        ValueError: as :class:`TrajectoryModule` raises; no known step; a network with its vector before its scalars; on
            a batch, no frames, or another output shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.training import Clouds, PointForecast
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = {"scalar": 1, "vector": 1}
        >>> network = PointTransformer(g, fields, "vector", fields=4, num_blocks=1, pool=None)
        >>> frames = torch.randn(6, 2, 2, 2)
        >>> batch = Clouds(frames[:, 0, 0], torch.ones(6, 1), torch.zeros(6).long(), torch.ones(1), frames)
        >>> PointForecast(network, step=1.0)(batch).shape
        torch.Size([6, 2])
    """

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, **options)
        in_type: Any = getattr(network, "in_type", None)
        sizes = [representation.size for representation in getattr(in_type, "representations", ())]
        if sizes and sizes[-1] == 1 and in_type.gspace.dimensionality in sizes:  # the velocity is one of these fields
            raise ValueError(
                f"network: got scalars behind a vector in its in_type, {in_type}; needed the velocity last"
            )

    def forward(self, clouds: Clouds) -> Tensor:
        """The positions ``(N, d)`` in the last frame."""
        frames = self.frames(clouds)
        velocities = frames[:, 0, 1]
        misses = super().forward(clouds._replace(features=torch.cat([clouds.features, velocities], dim=1)))
        if misses.shape != clouds.coords.shape:
            raise ValueError(f"network: got an output {tuple(misses.shape)}, needed {tuple(clouds.coords.shape)}")
        return clouds.coords + (frames.shape[1] - 1) * self.time_of_step() * velocities + misses

    def truth(self, batch: Clouds) -> Tensor:
        """The true positions ``(N, d)`` in the last frame."""
        return self.frames(batch)[:, -1, 0]

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a body, of all clouds end to end: its number, and where it is predicted and is in the last frame."""
        return numbered("body", [f"x{j}" for j in range(predictions.shape[1])], predictions, truth)

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        return (output - self.truth(batch)).square().mean()
