"""Networks on point clouds and their heads, on plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.exporting.mode import in_programs
from escnn_attention.geometry.cache import shared_geometry
from escnn_attention.geometry.points import Cloud, in_places, those_there
from escnn_attention.plain.blocks import Parts
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.cloud_pooling import Pool, count_clouds, offsets_from_mean, pool_clouds, pools, read
from escnn_attention.plain.invariants import PowerSpectrum
from escnn_attention.plain.projections import FromPoses, ToPoses

PosePool = Literal["mean", "max", "spectrum"]
Readout = Literal["clouds", "points"]


def symmetric_basis(dim: int) -> np.ndarray:
    r"""An orthonormal basis of symmetric d × d matrices: :math:`E_{ii}`, then :math:`(E_{ij} + E_{ji})/\sqrt2`."""
    pairs = [(i, i) for i in range(dim)] + [(i, j) for i in range(dim) for j in range(i + 1, dim)]
    basis = np.zeros((len(pairs), dim, dim))
    for k, (i, j) in enumerate(pairs):
        basis[k, i, j] = basis[k, j, i] = 1.0 if i == j else 0.5**0.5
    return basis


def even_part(signs: Tensor | None, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    r"""The even part :math:`\tfrac12 (f(x) + f(Sx))` of a network; S has the diagonal ``signs``, None for f itself.

    >>> even_part(torch.tensor([-1.0, 1.0]), lambda x: x + x**2, torch.tensor([[3.0, 3.0]]))
    tensor([[ 9., 12.]])
    """
    y = network(x)
    return y if signs is None else (y + network(x * signs.to(x))) / 2


class SymmetricTensors(ExactBuffers):
    r"""Symmetric d × d matrices as :math:`d(d+1)/2` numbers, and back.

    The numbers are the coordinates in an orthonormal basis, so that the norm of a matrix (Frobenius) is that of its
    numbers, and the group acts on them orthogonally: see :func:`escnn_attention.models.symmetric_tensor_repr`.

    Args:
        dim: d.

    Shape:
        ``(..., d(d+1)/2)`` to ``(..., d, d)``; :meth:`from_matrices` is the inverse.

    Example:
        >>> import torch
        >>> from escnn_attention.models import SymmetricTensors
        >>> tensors = SymmetricTensors(2)
        >>> matrices = torch.tensor([[[1.0, 2.0], [2.0, 3.0]]])
        >>> torch.allclose(tensors(tensors.from_matrices(matrices)), matrices)
        True
    """

    basis: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_exact("basis", symmetric_basis(dim))

    def forward(self, numbers: Tensor) -> Tensor:
        """The matrices ``(..., d, d)`` with the coordinates ``(..., d(d+1)/2)``."""
        return torch.einsum("...a,aij->...ij", numbers, self.basis.to(numbers.dtype))

    def from_matrices(self, matrices: Tensor) -> Tensor:
        """The coordinates of matrices; of one that is not symmetric, those of its symmetric part."""
        return torch.einsum("...ij,aij->...a", matrices, self.basis.to(matrices.dtype))


def _layers(widths: Sequence[int]) -> list[torch.nn.Module]:
    """Linear maps between these widths, each behind a SiLU."""
    pairs = itertools.pairwise(widths)
    return [layer for pair in pairs for layer in (torch.nn.SiLU(), torch.nn.Linear(*pair))]


class InvariantHead(ExactBuffers):
    """Numbers that no element of the group changes: a map to poses, a pooling over them, an MLP.

    Args:
        to_poses: from the features to regular fields, or to their power spectrum in place of a pooling.
        weights: ``(|H|,)``, the measure of the poses, of mean 1.
        widths: of the MLP, from the fields of ``to_poses`` to the numbers.
        poses, pool: the pooling over the poses, and over the points; None for numbers at every point.
        readout: whether the MLP acts on clouds, after the pooling, or at points, before it.
        batch_norm: whether the input of the MLP is standardised over the batch, in training of several clouds.
    """

    weights: Tensor

    def __init__(
        self,
        to_poses: ToPoses | PowerSpectrum,
        weights: np.ndarray,
        widths: Sequence[int],
        *,
        poses: PosePool,
        pool: Pool | None,
        readout: Readout,
        batch_norm: bool = False,
    ):
        super().__init__()
        self.to_poses = to_poses
        self.register_exact("weights", weights)
        layers = _layers(widths)
        first = torch.nn.BatchNorm1d(widths[0]) if batch_norm else torch.nn.Identity()
        self.perceptron = torch.nn.Sequential(first, *layers[1:])  # the poses have had a SiLU
        self.poses: PosePool = poses
        self.pool: Pool | None = pool
        self.readout: Readout = readout

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        if isinstance(self.to_poses, PowerSpectrum):
            y: Tensor = self.to_poses(x)
        else:
            seen = F.silu(self.to_poses(x.unsqueeze(0))[0, 0])  # N, |H|, C
            y = seen.amax(1) if self.poses == "max" else (seen * self.weights.to(seen.dtype)[:, None]).mean(1)
        if self.pool is None:
            return self._perceive(y)
        if self.readout == "points":
            return pool_clouds(self._perceive(y), batch, num_clouds, self.pool, measure)
        return self._perceive(pool_clouds(y, batch, num_clouds, self.pool, measure))

    def _perceive(self, y: Tensor) -> Tensor:
        norm = self.perceptron[0]
        if isinstance(norm, torch.nn.BatchNorm1d) and norm.training and len(y) == 1:
            what = "cloud" if self.pool is not None and self.readout == "clouds" else "point"
            raise ValueError(f"batch: got one {what}, but batch_norm standardises over at least two in training")
        z: Tensor = self.perceptron(y)
        return z


class EquivariantHead(torch.nn.Module):
    """Fields of any type: to regular fields, a nonlinearity, from these, and a pooling over the points, if any."""

    def __init__(
        self, to_poses: ToPoses, from_poses: FromPoses, pool: Pool | None, tensors: SymmetricTensors | None = None
    ):
        super().__init__()
        self.to_poses = to_poses
        self.from_poses = from_poses
        self.pool: Pool | None = pool
        self.tensors = tensors

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        y: Tensor = self.from_poses(F.silu(self.to_poses(x.unsqueeze(0))))[0]
        if self.pool is not None:
            y = pool_clouds(y, batch, num_clouds, self.pool, measure)
        return y if self.tensors is None else self.tensors(y)


class LiftedHead(torch.nn.Module):
    """The heads of the LieTransformer: a linear map and a pooling over points and poses, or that and an MLP."""

    def __init__(self, fields: int, order: int, outputs: int, pool: Literal["mean", "max"], readout: Readout):
        super().__init__()
        widths = [fields, outputs] if readout == "points" else [fields, fields, fields, outputs]
        self.perceptron = torch.nn.Sequential(*_layers(widths))
        self.order = order
        self.pool: Literal["mean", "max"] = pool
        self.readout: Readout = readout

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        y = x.unflatten(1, (-1, self.order)).transpose(1, 2)  # N, |H|, C
        y = self.perceptron(y) if self.readout == "points" else y
        y = pool_clouds(y.amax(1) if self.pool == "max" else y.mean(1), batch, num_clouds, self.pool, measure)
        return y if self.readout == "points" else self.perceptron(y)


class PointNetwork(Parts, ExactBuffers):
    """A network on clouds: ``blocks`` between an ``embedding`` and a ``head``.

    Attributes:
        norm: None, or a module between the last block and the head.
        positions: None, or the unit of length of the positions that are added to the features.
        waves: None, or a module of the coordinates that is added to the embedding.
        signs: None, or those of the input under which the output is :func:`even <even_part>`.
    """

    head: Any

    optional = ("norm", "waves")

    def __init__(self, positions: float | None = None, signs: np.ndarray | Tensor | None = None, **parts: Any):
        super().__init__(**parts)
        self.positions = positions
        self.register_exact("signs", signs)

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
        """The output of the head: see :meth:`escnn_attention.models.PointTransformer.forward`."""
        if x.dim() != 2 or coords.dim() != 2 or x.shape[0] != coords.shape[0]:
            raise ValueError(
                f"coords: got shape {tuple(coords.shape)} with features of shape {tuple(x.shape)}, needed (points, d) "
                "and (points, channels)"
            )
        num_clouds = count_clouds(batch, coords, mask)
        self._check_clouds(coords, edge_index, batch, mask, measure, edge_attr)
        with shared_geometry():
            return _of_those_there(self, x, Cloud(coords, edge_index, batch, measure, edge_attr), mask, num_clouds)

    def compute(self, x: Tensor, cloud: Cloud, mask: Tensor | None, num_clouds: int) -> Tensor:
        """The output of the head, of features and clouds that were checked."""
        coords, edge_index, batch, measure, edge_attr, _ = cloud
        offsets: Tensor | None = None
        if self.positions is not None:
            offsets = offsets_from_mean(coords, batch, num_clouds, mask, measure).to(x.dtype) / self.positions

        def network(x: Tensor) -> Tensor:
            y = self._at_points(self.embedding, x if offsets is None else torch.cat([x, offsets], dim=1), coords)
            y = y if self.waves is None else y + self.waves(coords)
            for block in self.blocks:
                y = self._between_points(block, y, coords, edge_index, batch, mask, measure, edge_attr)
            y = y if self.norm is None else self._at_points(self.norm, y, coords)
            return read(self.head, y, batch, num_clouds, mask, measure)

        return even_part(self.signs, network, x)

    def _check_clouds(self, coords: Tensor, *arguments: Tensor | None) -> None:
        """Check the arguments of a call, which :meth:`_between_points` describes."""

    def _at_points(self, module: torch.nn.Module, x: Tensor, coords: Tensor) -> Tensor:
        """Apply a module at every point."""
        y: Tensor = module(x)
        return y

    def _between_points(self, block: torch.nn.Module, x: Tensor, coords: Tensor, *arguments: Tensor | None) -> Tensor:
        """Apply a block; the arguments are the edges, the clouds, the mask, the measure and the features of edges."""
        y: Tensor = block(x, coords, *arguments)
        return y


@in_programs(PointNetwork.compute)
def _of_those_there(network: PointNetwork, x: Tensor, cloud: Cloud, mask: Tensor | None, num_clouds: int) -> Tensor:
    """The output for the points that a mask shows: hidden ones are in no statistics, and reach no gradient."""
    if mask is None:
        return network.compute(x, cloud, None, num_clouds)
    there, x, cloud = those_there(x, cloud, mask)
    y = network.compute(x, cloud, None, num_clouds)
    return y if pools(network.head) else in_places(y, there, mask)


class PoseWaves(ExactBuffers):
    r"""Regular fields of a position, :math:`[\cos \Omega h^{-1}x,\; \sin \Omega h^{-1}x]`, with a learned Ω."""

    inverse_action: Tensor

    def __init__(self, frequencies: int, inverse_action: np.ndarray):
        super().__init__()
        self.frequencies = Parameter(torch.randn(frequencies, inverse_action.shape[-1]))
        self.register_exact("inverse_action", inverse_action)

    def forward(self, coords: Tensor) -> Tensor:
        seen = torch.einsum("hij,nj->nhi", self.inverse_action, coords.to(self.inverse_action.dtype))
        angle = seen @ self.frequencies.T  # N, |H|, F
        return torch.cat([angle.cos(), angle.sin()], dim=-1).transpose(1, 2).flatten(1)


class PlatonicHead(torch.nn.Module):
    """Pools over the points of a cloud, or does not, divides, and reads fields off by several parts, side by side."""

    def __init__(self, parts: Sequence[torch.nn.Module], pool: Literal["mean", "sum"] | None, divisor: float):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.pool: Literal["mean", "sum"] | None = pool
        self.divisor = divisor

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        if self.pool is not None:
            x = pool_clouds(x, batch, num_clouds, self.pool, measure) / self.divisor
        return torch.cat([part(x) for part in self.parts], dim=1)
