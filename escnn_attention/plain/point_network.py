"""Networks on point clouds, on plain tensors: pooling, heads, and what the point transformer exports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention._export import exporting
from escnn_attention.geometry.cache import shared_geometry
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.power_spectrum import PowerSpectrum
from escnn_attention.plain.projections import FromPoses, ToPoses

__all__ = [
    "EquivariantHead",
    "InvariantHead",
    "LiftedHead",
    "PointNetwork",
    "Pool",
    "PosePool",
    "Readout",
    "SymmetricTensors",
    "count_clouds",
    "offsets_from_mean",
    "pool_clouds",
    "symmetric_basis",
]

Pool = Literal["mean", "sum", "max"]
PosePool = Literal["mean", "max", "spectrum"]
Readout = Literal["clouds", "points"]


def count_clouds(batch: Tensor | None, coords: Tensor, mask: Tensor | None = None) -> int:
    """The number of clouds in a batch.

    Args:
        batch: ``(N,)``, the number of the cloud of each point, or None for a single one.
        coords: ``(N, d)``.
        mask: ``(N,)``, False for points that are not there.

    Raises:
        TypeError: ``batch`` is not a tensor of integers, or ``mask`` not one of bool.
        ValueError: one of them has another shape or is on another device, a number is negative, or a cloud has no
            points.

    Example:
        >>> import torch
        >>> from escnn_attention.plain.point_network import count_clouds
        >>> count_clouds(torch.tensor([0, 0, 1, 1, 1]), torch.randn(5, 3))
        2
    """
    _check_of_points("mask", mask, torch.bool, coords)
    _check_of_points("batch", batch, torch.long, coords)
    if exporting():
        return _count_written_down(batch)
    number = len(coords)
    if batch is None:
        sizes = torch.tensor([number if mask is None else int(mask.sum())])
    else:
        if number and int(batch.min()) < 0:
            raise ValueError(f"batch: got {int(batch.min())}, needed the numbers of the clouds from 0")
        sizes = torch.bincount(batch if mask is None else batch[mask], minlength=int(batch.max()) + 1 if number else 1)
    if not bool((sizes > 0).all()):
        raise ValueError(f"batch: cloud {int(sizes.argmin())} has no points, needed at least one in each")
    return len(sizes)


def _check_of_points(name: str, values: Tensor | None, dtype: torch.dtype, coords: Tensor) -> None:
    """``values`` are None, or one of this type for each point of ``coords``."""
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: got {type(values).__name__}, needed a tensor or None")
    if values.dtype != dtype:
        raise TypeError(f"{name}: got {values.dtype}, needed a tensor of {dtype}")
    if values.shape != coords.shape[:1]:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, needed {tuple(coords.shape[:1])}")
    if values.device != coords.device:
        raise ValueError(f"{name}: got a tensor on {values.device}, needed one on {coords.device}, as coords are")


def pool_clouds(x: Tensor, batch: Tensor | None, num_clouds: int, how: Pool, measure: Tensor | None = None) -> Tensor:
    """Features ``(N, C)`` of points to features ``(B, C)`` of clouds.

    Args:
        x: of the points.
        batch: ``(N,)``, the number of the cloud of each point, or None for a single one.
        num_clouds: B.
        how: ``"mean"``, ``"sum"`` or ``"max"``.
        measure: ``(N,)``: a point of measure 2 counts as two in means and sums.
    """
    if batch is None:
        batch = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
    if how == "max":
        lowest = x.new_full((num_clouds, x.shape[1]), -torch.inf)
        return lowest.scatter_reduce(0, batch[:, None].expand_as(x), x, "amax")
    weights = x.new_ones(x.shape[0]) if measure is None else measure.to(x.dtype)
    total = x.new_zeros(num_clouds, x.shape[1]).index_add(0, batch, x * weights[:, None])
    if how == "sum":
        return total
    return total / x.new_zeros(num_clouds).index_add(0, batch, weights)[:, None]


def offsets_from_mean(
    coords: Tensor, batch: Tensor | None, num_clouds: int, mask: Tensor | None = None, measure: Tensor | None = None
) -> Tensor:
    """Where the points ``(N, d)`` are relative to the mean of their cloud; zero for those that a mask hides.

    Args:
        coords: ``(N, d)``.
        batch, mask, measure: ``(N,)``, as in :class:`PointNetwork`.
        num_clouds: the number of clouds.
    """
    if mask is not None and exporting():
        coords, batch, measure = _apart(mask, coords, batch, num_clouds, measure)
        return torch.where(mask[:, None], offsets_from_mean(coords, batch, num_clouds + 1, None, measure), 0.0)
    if mask is not None:
        there = mask.nonzero().squeeze(-1)
        y = offsets_from_mean(coords[there], _part(batch, there), num_clouds, None, _part(measure, there))
        return torch.zeros_like(coords).index_copy(0, there, y)
    means = pool_clouds(coords, batch, num_clouds, "mean", measure)
    return coords - (means if batch is None else means[batch])


def symmetric_basis(dim: int) -> np.ndarray:
    r"""An orthonormal basis of the symmetric matrices, ``(d(d+1)/2, d, d)``.

    First the d matrices :math:`E_{ii}`, then :math:`(E_{ij} + E_{ji})/\sqrt2` for i < j.
    """
    pairs = [(i, i) for i in range(dim)] + [(i, j) for i in range(dim) for j in range(i + 1, dim)]
    basis = np.zeros((len(pairs), dim, dim))
    for k, (i, j) in enumerate(pairs):
        basis[k, i, j] = basis[k, j, i] = 1.0 if i == j else 0.5**0.5
    return basis


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


class InvariantHead(ExactBuffers):
    """Numbers that no element of the group changes: one map to poses, a pooling over them, an MLP.

    Args:
        to_poses: from the features to regular fields; or to invariants, for the power spectrum in place of a pooling.
        weights: ``(|H|,)``, the measure of the poses, of mean 1.
        widths: of the MLP: the fields of ``to_poses``, or its invariants, hidden layers, numbers.
        poses: the pooling over the poses.
        pool: that over the points, or None for numbers at every point.
        readout: whether the MLP acts on clouds, after the pooling, or at points, before it.
        batch_norm: whether what the MLP gets is standardised over the batch.

    Raises:
        ValueError: on application in training, there is one cloud (or point) only to standardise over.
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
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.SiLU(), torch.nn.Linear(before, after)]
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
    """Fields of any type: to regular fields, a nonlinearity at every pose, from there, and a pooling over the points.

    Args:
        to_poses: from the features to regular fields.
        from_poses: from these to the output.
        pool: over the points, or None for fields at every point.
        tensors: what makes matrices of the output, or None.
    """

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
    """The heads of the LieTransformer: a pooling over points and poses together, an MLP behind it or a map before it.

    Args:
        fields: the regular fields of the features.
        order: the number of poses.
        outputs: the numbers of the output.
        pool: over points and poses.
        readout: ``"clouds"`` for an MLP on what is pooled, ``"points"`` for one linear map of what is not yet.
    """

    def __init__(self, fields: int, order: int, outputs: int, pool: Literal["mean", "max"], readout: Readout):
        super().__init__()
        widths = [fields, outputs] if readout == "points" else [fields, fields, fields, outputs]
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.SiLU(), torch.nn.Linear(before, after)]
        self.perceptron = torch.nn.Sequential(*layers)
        self.order = order
        self.pool: Literal["mean", "max"] = pool
        self.readout: Readout = readout

    def forward(self, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None = None) -> Tensor:
        y = x.unflatten(1, (-1, self.order)).transpose(1, 2)  # N, |H|, C
        y = self.perceptron(y) if self.readout == "points" else y
        y = pool_clouds(y.amax(1) if self.pool == "max" else y.mean(1), batch, num_clouds, self.pool, measure)
        return y if self.readout == "points" else self.perceptron(y)


class PointNetwork(torch.nn.Module):
    """Blocks between an embedding and a head, on ``(N, in)`` with coordinates ``(N, d)``.

    Args:
        embedding: at every point.
        blocks: of ``(x, coords, edge_index, batch, mask, measure, edge_attr)``.
        norm: at every point.
        head: of ``(x, batch, num_clouds, measure)``.
        positions: None, or the length that is 1 for positions, which the features are to tell of.
        waves: None, or what is added to the embedding, of the coordinates.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        blocks: Sequence[torch.nn.Module],
        norm: torch.nn.Module,
        head: torch.nn.Module,
        positions: float | None = None,
        waves: torch.nn.Module | None = None,
    ):
        super().__init__()
        self.embedding = embedding
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.positions = positions
        self.waves = waves

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
        if self.positions is not None:
            offsets = offsets_from_mean(coords, batch, num_clouds, mask, measure).to(x.dtype)
            x = torch.cat([x, offsets / self.positions], dim=1)
        y = self.embedding(x)
        y = y if self.waves is None else y + self.waves(coords)
        with shared_geometry():
            for block in self.blocks:
                y = block(y, coords, edge_index, batch, mask, measure, edge_attr)
        return read(self.head, self.norm(y), batch, num_clouds, mask, measure)


def read(
    head: torch.nn.Module,
    x: Tensor,
    batch: Tensor | None,
    num_clouds: int,
    mask: Tensor | None,
    measure: Tensor | None,
) -> Tensor:
    """The output of a head for the points that are there; at the others, where it has one, zero."""
    if mask is None:
        y: Tensor = head(x, batch, num_clouds, measure)
        return y
    if exporting():
        x, batch, measure = _apart(mask, x, batch, num_clouds, measure)
        y = head(x, batch, num_clouds + 1, measure)
        if getattr(head, "pool", None) is not None:
            return y[:num_clouds]
        return torch.where(mask.view(-1, *[1] * (y.dim() - 1)), y, 0.0)
    there = mask.nonzero().squeeze(-1)
    y = head(x[there], _part(batch, there), num_clouds, _part(measure, there))
    if getattr(head, "pool", None) is not None:
        return y
    return y.new_zeros(len(x), *y.shape[1:]).index_copy(0, there, y)


def _part(values: Tensor | None, chosen: Tensor) -> Tensor | None:
    return None if values is None else values[chosen]


def _apart(
    mask: Tensor, x: Tensor, batch: Tensor | None, num_clouds: int, measure: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features, clouds and measures, with zeros of measure 1 in one more cloud for the points that a mask hides."""
    cloud = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    measure = None if measure is None else torch.where(mask, measure, 1.0)
    return torch.where(mask[:, None], x, 0.0), torch.where(mask, cloud, num_clouds), measure


def _count_written_down(batch: Tensor | None) -> int:
    """The number of clouds, which a program works out anew for every batch."""
    if batch is None:
        return 1
    number: int = batch.max().item() + 1  # type: ignore[assignment]
    torch._check(number >= 1)
    return number
