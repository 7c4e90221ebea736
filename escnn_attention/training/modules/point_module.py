"""What the Lightning modules for point clouds share."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.scheduled import Scheduled

__all__ = ["PointModule"]


class PointModule(Scheduled):
    """Trains a network of ``(features, coords, batch=batch)`` on :class:`~escnn_attention.training.Clouds`."""

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
        self.log_mean(f"{part}_loss", self._loss(output, batch), len(batch.targets))
