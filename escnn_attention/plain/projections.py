r"""Equivariant linear maps between the features at a position and the poses of regular fields.

By Frobenius reciprocity every equivariant map from a representation :math:`\rho` to a regular field is
:math:`q(h) = w\,\rho(h)^{-1} f` for one vector w: it reads the same combination of f in the frame of every pose. Every
map from a regular field is :math:`\sum_h f(h)\,\rho(h)\,w`. Both are complete, exact in any precision, and for
permutation representations (regular, quotient, trivial) a gather of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.grouped import collect, spread

__all__ = ["FromPoses", "ProjectionKind", "Scalars", "Segment", "ToPoses"]

ProjectionKind = Literal["group", "pointwise"]


class Segment(Protocol):
    """How the channels of one representation look from every pose: see ``escnn_attention.fibers.FrameSegment``."""

    @property
    def columns(self) -> np.ndarray: ...
    @property
    def matrices(self) -> np.ndarray: ...
    @property
    def permutation(self) -> np.ndarray | None: ...


class _Frames(ExactBuffers):
    r"""Writes weight vectors w in the frame of every pose, :math:`w\,\rho(h)^{-1}`.

    Maps ``(F, size)`` to ``(|H|, F, size)``.
    """

    def __init__(self, segments: Sequence[Segment]):
        super().__init__()
        order = np.concatenate([s.columns.ravel() for s in segments])
        if (order == np.arange(len(order))).all():
            self.order = None
        else:
            self.register_buffer("order", torch.as_tensor(order.argsort()), persistent=False)
        self._stretches: list[slice | None] = []
        for i, segment in enumerate(segments):
            columns = segment.columns.ravel()
            # Channels that lie side by side are a view, whose gradient is one too.
            together = bool((columns == columns[0] + np.arange(len(columns))).all())
            self._stretches.append(slice(int(columns[0]), int(columns[0]) + len(columns)) if together else None)
            self.register_buffer(f"columns_{i}", torch.as_tensor(segment.columns), persistent=False)
            # A gather saves work only where matrices are large: its gradient is slow.
            if segment.permutation is None or segment.matrices.size <= 2**14:
                self.register_exact(f"matrices_{i}", segment.matrices)
            else:
                self.register_buffer(f"permutation_{i}", torch.as_tensor(segment.permutation), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        parts = []
        for i, stretch in enumerate(self._stretches):
            columns = getattr(self, f"columns_{i}")
            of_fields = weight.index_select(1, columns.flatten()) if stretch is None else weight[:, stretch]
            fields = of_fields.unflatten(1, columns.shape)
            if f"permutation_{i}" in self._buffers:
                seen = fields[:, :, getattr(self, f"permutation_{i}")].permute(2, 0, 1, 3)
            else:
                seen = torch.einsum("fmi,hij->hfmj", fields, getattr(self, f"matrices_{i}"))
            parts.append(seen.flatten(2))
        frames = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return frames if self.order is None else frames[:, :, self.order]


class ToPoses(torch.nn.Module):
    r"""From any features to regular fields, position by position.

    Maps ``(B, N, size)`` to ``(groups, B, N, |H|, fields // groups)``.

    Args:
        segments: the representation of the features (``escnn_attention.fibers.frames``).
        size: the channels of the features.
        fields: the number of regular fields to make.
        order: :math:`|H|`.
        groups: the number of groups that the fields are taken apart in.
        kind: ``"group"`` for every equivariant map; ``"pointwise"`` mixes fields and leaves the poses where they are,
            for features that are regular fields.
        bias: how many of the first fields get a bias, one a field: on a regular field only a constant is invariant.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        size: int,
        fields: int,
        order: int,
        *,
        groups: int = 1,
        kind: ProjectionKind = "group",
        bias: int = 0,
    ):
        super().__init__()
        self.kind = kind
        self.order = order
        self.groups = groups
        fan_in = size if kind == "group" else size // order
        self.frames = _Frames(segments) if kind == "group" else None
        self.weight = Parameter(torch.randn(fields, fan_in) / math.sqrt(fan_in))
        self.bias = Parameter(torch.zeros(bias)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.frames is None:
            x = x.unflatten(-1, (-1, self.order)).transpose(-1, -2)
            weight = self.weight.unflatten(0, (self.groups, -1))
        else:
            weight = self.frames(self.weight).unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(1, 2)
        y = spread(x.flatten(0, -2), weight).view(
            self.groups, *x.shape[:2], self.order, len(self.weight) // self.groups
        )
        return y if self.bias is None else y + _of_groups(self.bias, self.groups, len(self.weight)).to(y.dtype)


class FromPoses(ExactBuffers):
    """From regular fields to any features, position by position.

    Maps ``(groups, B, N, |H|, fields // groups)`` to ``(B, N, size)``.

    Args:
        segments: the representation of the features (``escnn_attention.fibers.frames`` with ``dual=True``).
        invariants: ``(size, k)``, a basis of the invariant vectors, along which a bias is learned; None for no bias.
        mass: what the sum over the poses weighs, by which weights are scaled at initialisation; by default ``order``.
        size, fields, order, groups, kind: as in :class:`ToPoses`.
    """

    invariants: Tensor

    def __init__(
        self,
        segments: Sequence[Segment],
        size: int,
        fields: int,
        order: int,
        *,
        groups: int = 1,
        kind: ProjectionKind = "group",
        invariants: np.ndarray | None = None,
        mass: int | None = None,
    ):
        super().__init__()
        self.kind = kind
        self.order = order
        self.groups = groups
        fan_in = fields * (order if mass is None else mass) if kind == "group" else fields
        self.frames = _Frames(segments) if kind == "group" else None
        shape = (fields, size) if kind == "group" else (size // order, fields)
        self.weight = Parameter(torch.randn(shape) / math.sqrt(fan_in))
        self.bias: Parameter | None = None
        if invariants is not None and invariants.shape[1]:
            self.register_exact("invariants", invariants)
            self.bias = Parameter(torch.zeros(invariants.shape[1]))

    def forward(self, y: Tensor) -> Tensor:
        shape = y.shape[1:3]
        if self.frames is None:
            weight = self.weight.T.unflatten(0, (self.groups, -1))
            x = collect(y.flatten(1, 3), weight).unflatten(0, (*shape, self.order)).transpose(-1, -2).flatten(-2)
        else:
            weight = self.frames(self.weight).unflatten(1, (self.groups, -1)).transpose(0, 1)
            x = collect(y.flatten(3).flatten(1, 2), weight.flatten(1, 2)).unflatten(0, shape)
        return x if self.bias is None else x + (self.invariants @ self.bias).to(x.dtype)


class Scalars(torch.nn.Module):
    """From scalar fields to scalar fields, position by position.

    Maps ``(B, N, size)`` to ``(groups, B, N, 1, fields // groups)``.

    Args:
        size: the channels of the features.
        fields: the number of scalar fields to make.
        groups: the number of groups that the fields are taken apart in.
        bias: how many of the first fields get a bias.
    """

    def __init__(self, size: int, fields: int, *, groups: int = 1, bias: int = 0):
        super().__init__()
        self.groups = groups
        self.weight = Parameter(torch.randn(fields, size) / math.sqrt(size))
        self.bias = Parameter(torch.zeros(bias)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = spread(x.flatten(0, 1), self.weight.unflatten(0, (self.groups, -1)))
        y = y.view(self.groups, *x.shape[:2], 1, len(self.weight) // self.groups)
        return y if self.bias is None else y + _of_groups(self.bias, self.groups, len(self.weight)).to(y.dtype)


def _of_groups(bias: Tensor, groups: int, fields: int) -> Tensor:
    """The biases of the first of the fields, and zeros, for ``(groups, B, N, P, fields // groups)``."""
    return F.pad(bias, (0, fields - len(bias))).view(groups, 1, 1, 1, -1)
