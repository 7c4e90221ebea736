"""The base class of the networks on point clouds, with the checks of their call and their export."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention.exporting.modules import exported_parts
from escnn_attention.geometry.cache import checked
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.module import check_cloud, check_points
from escnn_attention.plain.point_network import PointNetwork


class CloudNetwork(PretrainedMixin, PointNetwork):
    """An embedding, blocks and a head between points: the base class of the networks on clouds.

    A subclass sets ``embedding``, ``blocks`` and ``head``, and where it has them ``norm``, ``positions``, ``waves`` and
    ``signs``: see :class:`~escnn_attention.plain.point_network.PointNetwork`.
    """

    def __init__(self, gspace: GSpace, in_type: FieldType):
        super().__init__()
        self.gspace = gspace
        self.in_type = in_type

    def forward(  # type: ignore[override]
        self,
        input: GeometricTensor | Tensor,
        coords: Tensor | None = None,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """The output of the head.

        Args:
            input: the features, as a GeometricTensor with coordinates, or as a tensor ``(N, in_type.size)``.
            coords: ``(N, d)``, where ``input`` is a tensor.
            edge_index, batch, mask, measure, edge_attr: as in :meth:`PointSelfAttention.forward`. Pooling leaves out
                the points that a mask hides, and means and sums weigh points by their measure.

        Raises:
            TypeError, ValueError: as the layers raise; features or ``coords`` of another shape, a cloud without points,
                or with a batch norm a single cloud in training.
        """
        return self._forward(self._as_cloud(input, coords), edge_index, batch, mask, measure, edge_attr)

    def _as_cloud(self, input: GeometricTensor | Tensor, coords: Tensor | None) -> GeometricTensor:
        """The features at points, if they fit the network."""
        if isinstance(input, Tensor):
            input = GeometricTensor(input, self.in_type, self._check_coords(coords, input))
        elif coords is not None:
            raise ValueError("coords: got some beside a GeometricTensor, which has its own; leave them out")
        return check_points(input, self.in_type, self)

    def _forward(self, x: GeometricTensor, *arguments: Tensor | None) -> Tensor:
        return PointNetwork.forward(self, x.tensor, x.coords, *arguments)

    def _check_clouds(self, coords: Tensor, *arguments: Tensor | None) -> None:
        checked(check_cloud, coords, *arguments)

    def _at_points(self, module: torch.nn.Module, x: Tensor, coords: Tensor) -> Tensor:
        y: GeometricTensor = module(GeometricTensor(x, cast(EquivariantModule, module).in_type, coords))
        return y.tensor

    def _between_points(self, block: torch.nn.Module, x: Tensor, coords: Tensor, *arguments: Tensor | None) -> Tensor:
        edge_index, batch, mask, measure, edge_attr = arguments
        y = GeometricTensor(x, cast(EquivariantModule, block).in_type, coords)
        y = block(y, edge_index, batch, mask=mask, measure=measure, edge_attr=edge_attr)
        return y.tensor

    def _check_coords(self, coords: Any, features: Tensor) -> Tensor:
        """``coords``, if they are those of features that are a tensor."""
        size, dim = self.in_type.size, self.gspace.dimensionality
        if features.dim() != 2 or features.shape[1] != size:
            raise ValueError(f"input: got shape {tuple(features.shape)}, needed (points, {size})")
        needed = f"needed (points, {dim}) with features that are a tensor"
        if coords is None:
            raise ValueError(f"coords: got none, {needed}")
        if not isinstance(coords, Tensor):
            raise TypeError(f"coords: got {type(coords).__name__}, {needed}")
        if coords.shape != (len(features), dim):
            raise ValueError(f"coords: got shape {tuple(coords.shape)}, needed ({len(features)}, {dim})")
        if not coords.dtype.is_floating_point:
            raise TypeError(f"coords: got {coords.dtype}, needed floating-point numbers")
        if coords.device != features.device:
            raise ValueError(f"coords: got a tensor on {coords.device}, needed one on {features.device}, as input is")
        return coords

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode.

        It maps ``(x, coords, edge_index=None, batch=None, mask=None, measure=None, edge_attr=None)`` to the output.
        """
        make = partial(PointNetwork, self.positions, self.signs)
        return exported_parts(self, make, leave_out=("lift",))
