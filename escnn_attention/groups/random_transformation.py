r"""Random elements of a continuous group and their matrices, on plain tensors.

Every element is :math:`g = c \exp(\sum_i x_i X_i)` with one c for each connected component of the group and X a basis
of its Lie algebra, and a representation of it is :math:`\rho(g) = \rho(c) \exp(\sum_i x_i\, d\rho(X_i))`: with the
matrices :math:`\rho(c)` and :math:`d\rho(X_i)` any element can be represented without knowing more of the group. The
exponential has no singularities, unlike the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LieElement:
    r"""An element :math:`c \exp(\sum_i x_i X_i)`: the angle or vector x ``(k,)`` of a rotation, and the number of c."""

    vector: Tensor
    component: int = 0


class LieRepresentation(torch.nn.Module):
    """The matrices of elements in one representation, in float64 on the CPU, of generators and components."""

    def __init__(self, generators: np.ndarray, components: np.ndarray):
        super().__init__()
        # No buffers: small matrices that are exponentiated in float64 whatever the precision and device of the layer.
        self.generators = torch.tensor(generators, dtype=torch.float64, device="cpu")
        self.components = torch.tensor(components, dtype=torch.float64, device="cpu")
        self.inverses = torch.tensor(np.linalg.inv(components), dtype=torch.float64, device="cpu")

    @property
    def trivial(self) -> bool:
        """Whether every element is represented by the identity."""
        identity = torch.eye(self.generators.shape[-1], dtype=torch.float64)
        return not bool(self.generators.any()) and bool((self.components == identity).all())

    def forward(self, element: LieElement, inverse: bool = False) -> Tensor:
        """``(n, n)``; the matrix of an element or of its inverse."""
        sign = -1 if inverse else 1
        exponential = torch.matrix_exp(sign * torch.tensordot(element.vector, self.generators, 1))
        if inverse:
            return exponential @ self.inverses[element.component]
        return self.components[element.component] @ exponential


class FieldTransformation(torch.nn.Module):
    """The action of elements on the channels ``(m, n)`` of the m fields of each representation, ``(B, size, ...)``."""

    def __init__(self, columns: Sequence[np.ndarray], representations: Sequence[LieRepresentation]):
        super().__init__()
        kept = [(c, r) for c, r in zip(columns, representations, strict=True) if not r.trivial]
        self.representations = torch.nn.ModuleList(r for _, r in kept)
        for i, (of_fields, _) in enumerate(kept):
            self.register_buffer(f"columns_{i}", torch.as_tensor(of_fields), persistent=False)

    def forward(self, x: Tensor, element: LieElement, inverse: bool = False) -> Tensor:
        for i, representation in enumerate(self.representations):
            columns = getattr(self, f"columns_{i}")
            matrix = representation(element, inverse).to(x.device, x.dtype)
            fields = x[:, columns.flatten()].unflatten(1, columns.shape)
            # Autocast has products in half precision.
            transformed = torch.einsum("ij,bmj...->bmi...", matrix, fields).to(x.dtype)
            x = x.index_copy(1, columns.flatten(), transformed.flatten(1, 2))
        return x


class RandomTransformation(torch.nn.Module):
    r"""Transforms the samples of a layer, :math:`h_s \to g h_s`, by a random element g.

    Because :math:`\rho(g h_s)^{-1} = \rho(h_s)^{-1} \rho(g)^{-1}`, it is enough to transform the features by
    :math:`\rho_\mathrm{in}(g)^{-1}` and the coordinates by :math:`g^{-1}`, to apply the layer, and to transform the
    output by :math:`\rho_\mathrm{out}(g)`. The relative elements :math:`h_s^{-1} h_t` do not change.
    """

    def __init__(self, inputs: FieldTransformation, outputs: FieldTransformation, space: LieRepresentation):
        super().__init__()
        self.inputs, self.outputs, self.space = inputs, outputs, space

    def draw(self) -> LieElement:
        """An element from the Haar measure, drawn with torch's generator on the CPU."""
        dimension, components = len(self.space.generators), len(self.space.components)
        if dimension == 1:
            vector = 2 * math.pi * torch.rand(1, dtype=torch.float64, device="cpu")
        else:
            # A Gaussian direction in four dimensions is a uniform unit quaternion.
            real, *imaginary = torch.randn(4, dtype=torch.float64, device="cpu")
            axis = torch.stack(imaginary)
            length = axis.norm()
            vector = axis / length.clamp(min=1e-300) * 2 * torch.atan2(length, real)
        return LieElement(vector, int(torch.randint(components, (), device="cpu")))
