"""The Lightning module that trains a network from fields to fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from escnn_attention.training.modules.scheduled import Scheduled


class _Squares(Metric):
    """Sums over a part of the data: of squared errors and of squared targets of each field, and the positions."""

    full_state_update = False
    errors: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, fields: int) -> None:
        super().__init__()
        for name in ("errors", "squares"):
            self.add_state(name, torch.zeros(fields, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, errors: Tensor, squares: Tensor, count: int) -> None:
        self.errors += errors.detach().double()
        self.squares += squares.detach().double()
        self.count += count

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """The relative mean squared error of each field, its root mean squared error, and whether it has the former.

        The relative error of a field whose targets are zero is NaN.
        """
        there = self.squares != 0
        return self.errors / self.squares.where(there, torch.nan), (self.errors / self.count).sqrt(), there


class FieldModule(Scheduled):
    r"""Trains a network from fields to fields, by the relative mean squared error.

    With the fields k of the output, such as a pressure and a velocity, over all positions x of a batch

    .. math:: \ell = \frac1K \sum_k \frac{\sum_x |\hat y_k(x) - y_k(x)|^2}{\sum_x |y_k(x)|^2}

    A field whose targets are zero in the whole batch has no relative error, and is left out of the sum. The network is
    measured by the same over all positions of a part of the data: ``error`` is the mean over the fields whose targets
    are not zero everywhere, and ``error_0``, ``error_1``, ... are those of each, and ``rmse_0``, ... are
    :math:`\sqrt{\langle |\hat y_k - y_k|^2 \rangle}`.

    Args:
        network: inputs ``(B, C, *space)`` to outputs ``(B, C', *space)``, such as a
            :class:`~escnn_attention.models.FieldUNet`.
        fields: the number of channels of each field of the output; by default those of ``network.out_type``.
        **options: of :class:`~.scheduled.Scheduled`, such as ``optimizer`` and ``schedule``.

    Raises:
        ValueError: as :class:`~.scheduled.Scheduled` raises, or no fields; on a batch, an output of another shape.

    Example:
        >>> import torch
        >>> from escnn_attention.models import FieldUNet
        >>> from escnn_attention.training import FieldModule
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = FieldUNet(g, 1, {"scalar": 1, "vector": 1}, widths=(2, 2), attention=(0, 1), num_heads=1)
        >>> module = FieldModule(network)
        >>> module.fields, module(torch.randn(2, 1, 8, 8)).shape
        ((1, 2), torch.Size([2, 3, 8, 8]))
    """

    keeps_arrays: ClassVar[bool] = True

    def __init__(self, network: nn.Module, fields: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(network, **options)
        if fields is None:
            representations = getattr(getattr(network, "out_type", None), "representations", ())
            fields = [r.size for r in representations]
        if not fields or not all(isinstance(size, int) and size > 0 for size in fields):
            raise ValueError(f"fields: got {fields!r} for {type(network).__name__}, needed the channels of each field")
        self.fields = tuple(fields)
        self.valid_squares, self.test_squares = _Squares(len(fields)), _Squares(len(fields))

    def on_validation_epoch_end(self) -> None:
        self._report("valid")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def describe(self, predictions: Tensor, truth: Tensor | None = None) -> list[dict[str, Any]]:
        """One row a sample: its number, the root mean square of each field, and with targets the relative errors."""
        rows = []
        for i, fields in enumerate(predictions):
            row: dict[str, Any] = {"sample": i}
            for k, field in enumerate(fields.split(self.fields)):
                row[f"rms_{k}"] = float(field.square().sum(0).mean().sqrt())
            if truth is not None:
                errors, squares = self._squares(fields[None], truth[i : i + 1])
                row |= {f"error_{k}": float(value) for k, value in enumerate(errors / squares)}
            rows.append(row)
        return rows

    def _squares(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the squared errors and of the squared targets of each field."""
        if outputs.shape != targets.shape or outputs.shape[1] != sum(self.fields):
            raise ValueError(
                f"network: got {tuple(outputs.shape)} for targets {tuple(targets.shape)}, needed the same shape, with"
                f" {sum(self.fields)} channels"
            )
        precision = torch.promote_types(outputs.dtype, torch.float32)  # half precision has no such large sums
        targets = targets.to(precision)
        errors, squares = (
            torch.stack([part.square().sum() for part in values.split(self.fields, dim=1)])
            for values in (outputs.to(precision) - targets, targets)
        )
        return errors, squares

    def _loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        errors, squares = self._squares(output, batch[1])
        there = squares != 0
        return (errors / squares.where(there, 1.0)).where(there, 0.0).mean()

    def _measure(self, part: str, output: Tensor, batch: tuple[Tensor, Tensor]) -> None:
        positions = batch[0].shape[2:].numel() * len(batch[0])
        getattr(self, f"{part}_squares").update(*self._squares(output, batch[1]), positions)

    def _evaluate(self, part: str, batch: tuple[Tensor, Tensor]) -> None:
        self._measure(part, self(batch[0]), batch)  # the error is the loss

    def _report(self, part: str) -> None:
        squares = getattr(self, f"{part}_squares")
        # torchmetrics drops the axis of a single field.
        errors, rmse, there = map(torch.atleast_1d, squares.compute())
        squares.reset()
        self.log(f"{part}_error", errors[there].mean().float(), rank_zero_only=False)
        for k, (error, root) in enumerate(zip(errors, rmse, strict=True)):
            self.log(f"{part}_error_{k}", error.float())
            self.log(f"{part}_rmse_{k}", root.float())
