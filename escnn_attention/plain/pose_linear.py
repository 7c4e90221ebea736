"""Pointwise equivariant maps, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.groups.random_transformation import RandomTransformation
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.projections import FromPoses, ToPoses


class PoseLinear(torch.nn.Module):
    """A projection to or from poses as a map of features ``(B, size, *space)``."""

    def __init__(self, projection: ToPoses | FromPoses, order: int):
        super().__init__()
        self.projection = projection
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        # Channels last, and as one row of positions.
        y = x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1)
        if isinstance(self.projection, ToPoses):
            y = self.projection(y).squeeze(0).transpose(-1, -2).flatten(-2)
        else:
            y = self.projection(y.unflatten(-1, (-1, self.order)).transpose(-1, -2).unsqueeze(0))
        return y.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 2 else y.squeeze(1)


class PoseFeedForward(torch.nn.Module):
    """A map to poses, a nonlinearity and a map back of features ``(B, size, *space)``; samples may be transformed."""

    def __init__(
        self,
        expand: ToPoses,
        activation: torch.nn.Module,
        contract: FromPoses,
        transformation: RandomTransformation | None = None,
    ):
        super().__init__()
        self.expand, self.activation, self.contract = expand, activation, contract
        self.transformation = transformation

    def forward(self, x: Tensor) -> Tensor:
        element = self.transformation.draw() if self.transformation is not None and self.training else None
        if element is not None:
            assert self.transformation is not None
            x = self.transformation.inputs(x, element, inverse=True)
        y = self.expand(x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1))
        y = self.contract(self.activation(y))
        y = y.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 2 else y.squeeze(1)
        if element is not None:
            assert self.transformation is not None
            y = self.transformation.outputs(y, element)
        return y


class Isotypic(NamedTuple):
    """Where an irrep of size d occurs: ``(m, d, in)`` and ``(out, n, d)``, and its endomorphisms ``(k, d, d)``."""

    source: np.ndarray
    target: np.ndarray
    endomorphisms: np.ndarray


class FieldLinear(ExactBuffers):
    """A linear map of ``(B, in, *space)`` that mixes the copies of each irrep, with a bias along the invariants."""

    invariants: Tensor

    def __init__(self, parts: Sequence[Isotypic], out: int, invariants: np.ndarray | None):
        super().__init__()
        self.out = out
        self.weights = torch.nn.ParameterList()
        for i, (source, target, endomorphisms) in enumerate(parts):
            for name, value in (("source", source), ("target", target), ("endomorphisms", endomorphisms)):
                self.register_exact(f"{name}_{i}", value)
            shape = (target.shape[1], source.shape[0], len(endomorphisms))
            self.weights.append(Parameter(torch.randn(shape) / math.sqrt(shape[1] * shape[2])))
        self.bias: Parameter | None = None
        if invariants is not None and invariants.shape[1]:
            self.register_exact("invariants", invariants)
            self.bias = Parameter(torch.zeros(invariants.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self.out, *x.shape[2:])
        for i, weight in enumerate(self.weights):
            source, target = getattr(self, f"source_{i}"), getattr(self, f"target_{i}")
            mixed = torch.einsum("nmk,kde,mei->ndi", weight, getattr(self, f"endomorphisms_{i}"), source)
            y = y + torch.einsum("ond,ndi,bi...->bo...", target, mixed, x)
        if self.bias is not None:
            y = y + (self.invariants @ self.bias).to(y.dtype).view(-1, *[1] * (x.dim() - 2))
        return y
