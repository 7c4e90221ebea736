"""The Lightning module that trains a network to give numbers or tensors of point clouds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from escnn_attention.training.data.clouds.batch import Clouds
from escnn_attention.training.modules.point_module import PointModule, numbered

__all__ = ["PointRegression"]


class PointRegression(PointModule):
    r"""Trains a network that gives numbers or tensors of clouds.

    Targets may be standardised: where the data has an ``original`` (as :class:`~escnn_attention.training.QM9` has),
    mean absolute errors are in its units, as ``test_mae_NAME`` of each of its ``targets``. ``error`` is the mean
    absolute error of what the data gives, over all targets; the epoch with the lowest is the best.

    Args:
        network: of ``(features, coords, batch=batch)`` to ``(B, T)`` or ``(B, d, d)``, as the targets are; those of
            shape ``(B,)`` are taken as ``(B, 1)``.
        loss: ``"l1"`` or ``"mse"``, of what the data gives.
        **options: of the training, such as ``optimizer`` and ``schedule``: see :class:`~.scheduled.Scheduled`.

    Raises:
        ValueError: an unknown loss; as :class:`~.scheduled.Scheduled` raises; on a batch, an output of another shape
            than the targets.

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

    monitor: ClassVar[str] = "valid_error"
    mode: ClassVar[Literal["max", "min"]] = "min"

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: Literal["l1", "mse"] = "l1",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if loss not in ("l1", "mse"):
            raise ValueError(f"loss: got {loss!r}, needed 'l1' or 'mse'")
        self.network = network
        self.loss = nn.L1Loss() if loss == "l1" else nn.MSELoss()

    def predict_step(self, batch: Clouds, batch_index: int) -> Tensor:
        """The predictions, in the units of the data."""
        return self._original(self(batch))

    def truth(self, batch: Clouds) -> Tensor:
        """The targets, in the units of the data."""
        return self._original(batch.targets if batch.targets.dim() > 1 else batch.targets[:, None])

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a cloud: its number, the predictions and the targets; those of tensors by their indices."""
        names = self._names(predictions)
        if predictions.dim() > 2:
            names = [f"{names[0]}_{i}{j}" for i in range(predictions.shape[1]) for j in range(predictions.shape[2])]
        return numbered("cloud", names, predictions.flatten(1), None if truth is None else truth.flatten(1))

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
        self.log_mean(f"{part}_error", (output - targets).abs().mean(), len(batch.targets))
        errors = (self._original(output) - self._original(targets)).abs()
        by_target = errors.mean().view(1) if errors.dim() > 2 else errors.mean(0)
        for name, value in zip(self._names(output), by_target, strict=True):
            self.log_mean(f"{part}_mae_{name}", value, len(batch.targets))

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
