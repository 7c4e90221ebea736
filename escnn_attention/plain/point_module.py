"""What plain modules on points share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention.geometry.points import only_shown, where_present

__all__ = ["PointModule"]


class PointModule(torch.nn.Module, ABC):
    """A module on features ``(N, in)`` at points, which leaves those out that a mask hides."""

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Features ``(N, out)`` of features ``(N, in)``: see :meth:`escnn_attention.PointSelfAttention.forward`."""
        if mask is None:
            return self.of_all(x, coords, edge_index, batch, measure, edge_attr)
        present = only_shown if exporting() else where_present
        return present(self.of_all, mask, x, coords, edge_index, batch, measure, edge_attr)

    @abstractmethod
    def of_all(
        self,
        x: Tensor,
        coords: Tensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """The module on points that are all there, none of them hidden by a mask."""
