"""The mean over everything that is measured, however it is spread over batches and processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["Mean"]


class Mean(Metric):
    r"""The mean :math:`\sum_b n_b v_b / \sum_b n_b` of values :math:`v_b` that are means over :math:`n_b` things.

    Both sums run over the batches of all processes. (What Lightning logs with ``sync_dist`` is divided by the mean
    number of things of a process, rounded down.) A value that is not a number makes the mean so.

    Example:
        >>> import torch
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
        """Add the mean ``value`` of ``count`` things, in single precision at least."""
        precision = torch.promote_types(value.dtype, torch.float32)
        self.total = self.total.to(precision) + count * value.detach().to(precision)
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count
