"""What the Lightning modules for point clouds share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.scheduled import Scheduled

__all__ = ["PointModule", "TrajectoryModule", "numbered"]


class PointModule(Scheduled):
    """Trains a network of ``(features, coords, batch=batch)`` on :class:`~escnn_attention.training.Clouds`.

    Where these have ``edge_attr`` the network gets it, too.
    """

    def training_step(self, batch: Clouds, batch_index: int) -> Tensor:
        loss = self._loss(self(batch), batch)
        self.log_mean("train_loss", loss, len(batch.targets))
        return loss

    def validation_step(self, batch: Clouds, batch_index: int) -> None:
        self._evaluate("valid", batch)

    def test_step(self, batch: Clouds, batch_index: int) -> None:
        self._evaluate("test", batch)

    def forward(self, clouds: Clouds) -> Tensor:
        """What the network says of a batch."""
        return self.output(clouds.features, clouds)

    def output(self, features: Tensor, clouds: Clouds) -> Tensor:
        """What the network says of the points of a batch with these features, and of their pairs with those it has."""
        of_pairs = {} if clouds.edge_attr is None else {"edge_attr": clouds.edge_attr}
        output: Tensor = self.network(features, clouds.coords, batch=clouds.batch, **of_pairs)
        return output

    def _loss(self, output: Tensor, batch: Clouds) -> Tensor:
        raise NotImplementedError

    def _measure(self, part: str, output: Tensor, batch: Clouds) -> None:
        """Log everything but the loss."""
        raise NotImplementedError

    def _evaluate(self, part: str, batch: Clouds) -> None:
        output = self(batch)
        self._measure(part, output, batch)
        self.log_mean(f"{part}_loss", self._loss(output, batch), len(batch.targets))


class TrajectoryModule(PointModule):
    """Trains a network on trajectories: clouds whose ``point_targets`` ``(N, T, 2, d)`` are T frames.

    Args:
        step: the time from one frame to the next; by default what the data says (``step``).
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises; a step that is not positive.
    """

    monitor: ClassVar[str] = "valid_error"
    mode: ClassVar[Literal["max", "min"]] = "min"

    def __init__(self, *, step: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        if step is not None and not step > 0:
            raise ValueError(f"step: got {step!r}, needed a positive time")
        self.step = step

    def frames(self, clouds: Clouds) -> Tensor:
        """The frames of a batch, if it has at least two of them.

        Raises:
            ValueError: it has not.
        """
        if clouds.point_targets is None or clouds.point_targets.dim() != 4 or clouds.point_targets.shape[1] < 2:
            found = None if clouds.point_targets is None else tuple(clouds.point_targets.shape)
            raise ValueError(f"point_targets: got {found}, needed at least two frames, (points, frames, 2, d)")
        return clouds.point_targets

    def time_of_step(self) -> float:
        """The time from one frame to the next.

        Raises:
            ValueError: nobody says it.
        """
        if self.step is not None:
            return self.step
        step = None if self._trainer is None else getattr(getattr(self.trainer, "datamodule", None), "step", None)
        if step is None:
            raise ValueError("step: got None, and the data does not say the time from one frame to the next")
        return float(step)


def numbered(thing: str, names: Sequence[str], values: Tensor, truth: Tensor | None) -> list[dict[str, Any]]:
    """Rows of numbers: the number of each ``thing``, its values by name, and the true ones as ``true_NAME``."""
    columns = [*names, *([] if truth is None else [f"true_{name}" for name in names])]
    both = values if truth is None else torch.cat([values, truth], 1)
    return [{thing: i, **dict(zip(columns, row.tolist(), strict=True))} for i, row in enumerate(both)]
