"""Kernels between poses, on plain tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._export import refuse_scripting
from escnn_attention.functional.layout import Versioned

__all__ = ["PoseKernel"]


class PoseKernel(Versioned):
    r"""A kernel between fields over poses: all entries of an orbit of the group are one number.

    Returns ``(out_fields, out poses, in_fields, in poses, *kernel)``. Equal entries stay equal in every precision, so
    that the kernel is as equivariant as the table of orbits.

    Args:
        out_fields, in_fields: the number of fields on either side.
        orbits: ``(out poses, in poses, *kernel)``, the number of the orbit that each entry belongs to.
        basis: ``(m, orbits)``, the kernels to combine; None for a weight of its own for each orbit.
        gain: the expected sum of the squares of all entries that make one output channel, when weights are drawn.
    """

    __prepare_scriptable__ = refuse_scripting

    orbits: Tensor
    basis: Tensor | None

    def __init__(self, out_fields: int, in_fields: int, orbits: np.ndarray, basis: np.ndarray | None, gain: float):
        super().__init__()
        self.register_buffer("orbits", torch.as_tensor(orbits), persistent=False)
        # In the state, as escnn has it: weights mean nothing without the basis that they were learned in.
        self.register_buffer("basis", None if basis is None else torch.as_tensor(basis).to(torch.get_default_dtype()))
        size = int(orbits.max()) + 1 if basis is None else len(basis)
        self.weight = Parameter(torch.empty(out_fields, in_fields, size))
        energy = 1.0 if basis is None else float(np.square(basis).sum(0)[orbits].mean())
        torch.nn.init.normal_(self.weight, std=math.sqrt(gain / (in_fields * orbits[0].size * energy)))

    def forward(self) -> Tensor:
        values = self.weight if self.basis is None else self.weight @ self.basis.to(self.weight.dtype)
        kernel = values.index_select(2, self.orbits.flatten()).unflatten(2, self.orbits.shape)
        return kernel.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{tuple(self.orbits.shape)}, weight={tuple(self.weight.shape)}, basis={self.basis is not None}"
