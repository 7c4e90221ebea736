"""Self-attention and attentive convolution on point clouds, on plain tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.encodings.base import Needs
from escnn_attention.encodings.bias import EncodingBias, FromAllPoses
from escnn_attention.exporting.mode import in_programs, in_rows
from escnn_attention.functional import BETWEEN_POINTS, PointCall, launch
from escnn_attention.functional.autograd import PRECISE, exactly
from escnn_attention.functional.points.call import Halves, PairBias, PairTables, Relate, Values
from escnn_attention.functional.points.reference import probabilities
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Cloud, Points, where_present
from escnn_attention.geometry.relations import LogMotion, Relation
from escnn_attention.groups.random_transformation import LieElement, RandomTransformation
from escnn_attention.plain.cutoff import Cutoff
from escnn_attention.plain.projections import (
    AttentionMode,
    FromPoses,
    GroupTables,
    HeadModule,
    Scalars,
    ToPoses,
    in_one_pose,
    padded,
)


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
        return where_present(self.compute, x, Cloud(coords, edge_index, batch, measure, edge_attr), mask)

    @abstractmethod
    def compute(self, x: Tensor, cloud: Cloud) -> Tensor:
        """The output at points of which no mask hides any."""


class ConvolvedValues(torch.nn.Module):
    r"""Values that pass through a kernel.

    .. math:: \sum_{j, \hat h} \alpha\, W(h^{-1}\Delta, h^{-1}\hat h)\, v(x_j, \hat h), \qquad
        W(\delta, p) = \sum_f \phi_f(\delta)\, W_f[p]

    with functions :math:`\phi_f` of ``dim`` coordinates that a network makes, and a C × C matrix for each of them and
    every pose, or feature of a pose of a continuous group.
    """

    def __init__(
        self, dim: int, num_heads: int, channels: int, num_poses: int, *, features: int, pose_features: int = 0
    ):
        super().__init__()
        self.num_poses = num_poses
        self.features = features
        self.kernel = torch.nn.Sequential(
            torch.nn.Linear(dim, 2 * features), torch.nn.SiLU(), torch.nn.Linear(2 * features, features)
        )
        first = cast(torch.nn.Linear, self.kernel[0])
        torch.nn.init.normal_(first.weight, std=2.0)
        torch.nn.init.uniform_(first.bias, -1, 1)
        self.pose_features = pose_features
        # Of a continuous group the kernel is a constant and a linear function of the features of the pose.
        rows = pose_features + 1 if pose_features and num_poses > 1 else num_poses
        weight = torch.randn(num_heads, rows, features, channels, channels)
        self.weight = Parameter(weight * math.sqrt(4 / (features * channels)))

    def bind(self, quotient: Tensor, relative: Tensor | None) -> Values:
        """The sum of the values, each times the kernel."""
        if self.num_poses == 1:
            weight = self.weight.unsqueeze(1)
        elif self.pose_features and relative is not None:
            features = torch.nn.functional.pad(relative.to(self.weight.dtype), (1, 0), value=1.0)
            weight = torch.einsum("hpr,mrfic->mhpfic", features, self.weight) / math.sqrt(features.shape[-1])
        else:
            weight = self.weight[:, quotient]

        return _Bound(self.kernel, weight, self.features)


class _Bound:
    """The sum of values, each times the kernel, by matrices ``(M, H or 1, P, F, C, C)`` for every pair of poses."""

    def __init__(self, kernel: torch.nn.Module, weight: Tensor, features: int):
        self._kernel, self._weight, self.features = kernel, weight, features

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        poses = seen.shape[1]
        functions = self._kernel(seen).expand(-1, -1, -1, p.shape[-2], -1, -1)
        # For every head and key pose of a group: the values weighted by attention and function,
        # (A · H · F, K) · (K, C).
        weights = torch.einsum("gmhapk,ghapkf->gmpahfk", p, functions)
        sums = weights.flatten(3, 5) @ v.squeeze(2)
        return torch.einsum(
            "gmpahfc,mhpfic->gmhai",
            sums.unflatten(3, weights.shape[3:6]),
            self._weight.expand(-1, poses, -1, -1, -1, -1),
        )


class PointAttention(PointModule, HeadModule):
    """Projections to heads, attention between the poses of points, projection to the output.

    Args:
        project_in, project_out, encoding, tables, mode, needs, query_weight, transformation: as in
            :class:`~escnn_attention.plain.projections.HeadModule`; there is a ``quotient``.
        relation, length_scale, edge_dim, cutoff: as in :class:`escnn_attention.PointSelfAttention`.
        neighbourhood: the rule by which points are neighbours where no edges are given.
        values: what becomes of the values that are attended to; None for their sum.
    """

    quotient: Tensor
    opposite: Tensor | None
    first_half: Tensor | None
    order: Tensor | None
    motion: Tensor | None
    rotation: Tensor | None

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding | PairKernel,
        relation: Relation,
        neighbourhood: Neighbourhood,
        values: ConvolvedValues | None,
        tables: GroupTables,
        mode: AttentionMode,
        needs: Needs,
        *,
        length_scale: float,
        query_weight: float = 1.0,
        transformation: RandomTransformation | None = None,
        edge_dim: int | None = None,
        cutoff: Cutoff | None = None,
    ):
        parts = (project_in, project_out, encoding, needs, tables, mode)
        super().__init__(*parts, query_weight=query_weight, transformation=transformation)
        self.relation = relation
        self.sees_offsets = relation.is_offset
        self.neighbourhood = neighbourhood
        self.values = values
        self.length_scale, self._relation_in_units = length_scale, relation.in_units(length_scale)
        self.edge_dim = edge_dim
        self.cutoff = cutoff
        readout = None if edge_dim is None else torch.randn(2, self.num_heads, edge_dim) / math.sqrt(edge_dim)
        self.edge_readout = None if readout is None else Parameter(readout)
        half, order, opposite = None, None, tables.opposite
        if opposite is not None:
            half = np.flatnonzero(opposite > np.arange(len(opposite)))
            order = np.concatenate([half, opposite[half]]).argsort()
            order = None if (order == np.arange(len(order))).all() else order
        for name, index in (("opposite", opposite), ("first_half", half), ("order", order)):
            self.register_exact(name, index)
        linear, constant = None, None
        if isinstance(relation, LogMotion):
            # Registers have no motion: they are where the key is, and rotated like the query.
            num_poses = (self.quotient if self.relative is None else self.relative).shape[1]
            linear, constant = (padded(t, num_poses) for t in relation.tables(tables.inverse_action))
        self.register_exact("motion", linear)
        self.register_exact("rotation", constant)

    def compute(self, x: Tensor, cloud: Cloud) -> Tensor:
        # Drawn in training only: what a trained layer gives is no matter of chance.
        if self.transformation is None or not self.training:
            return self.attend(x, self._points(cloud), cloud.measure)
        element = self.transformation.draw()
        x = self.transformation.inputs(x, element, inverse=True)
        y = self.attend(x, self._points(cloud, element), cloud.measure)
        return self.transformation.outputs(y, element)

    def _points(self, cloud: Cloud, element: LieElement | None = None) -> Points:
        """The points of a cloud in units of the length scale, transformed by the inverse of an element."""
        # In half precision points that are far from the origin would fall together.
        points = cloud.coords.to(PRECISE[self.action_columns.dtype])
        if self.length_scale != 1:
            points = self.relation.scaled(points, self.length_scale)
        if self.transformation is not None and element is not None:
            # Row vectors, so that the product with the matrix of g is g⁻¹ applied to every point. Not a matrix product,
            # which autocast has in half precision.
            points = (points.unsqueeze(-1) * self.transformation.space(element).to(points)).sum(-2)
        return Points(points, cloud.coords, cloud.edge_index, cloud.batch, self.neighbourhood, cloud.edge_attr)

    def attention_maps(
        self, x: Tensor, cloud: Cloud, queries: Tensor, poses: Sequence[int] | None, mask: Tensor | None = None
    ) -> Tensor:
        """The probabilities of :meth:`escnn_attention.PointSelfAttention.attention_maps`."""
        if self.shared_scores and poses is not None:
            poses = [0] * len(poses)  # all alike
        chosen, queries = None if poses is None else torch.tensor(poses, device=x.device), queries.to(x.device)
        seen = None if mask is None else mask[queries]
        if mask is not None:
            queries = (mask.cumsum(0) - 1).clamp(min=0)[queries]  # their numbers among those that are there

        def by_keys(x: Tensor, cloud: Cloud) -> Tensor:
            call = self.call(x, self._points(cloud), cloud.measure)
            return maps_of_points(call, queries.unsqueeze(0), chosen).movedim(-1, 0)

        maps = where_present(by_keys, x, cloud, mask).movedim(0, -1)
        return maps if seen is None else maps.masked_fill(~seen[:, None, None, None], 0.0)

    def attend(self, x: Tensor, positions: Points, measure: Tensor | None) -> Tensor:
        """The layer on features ``(N, in)`` at the given points: ``(N, out)``."""
        y = BETWEEN_POINTS.compute(self.call(x, positions, measure), self.backend)
        return self.project(y).squeeze(0)

    def call(self, x: Tensor, positions: Points, measure: Tensor | None) -> PointCall:
        """The attention to compute, of features ``(N, in)`` at the given points."""
        if positions.edge_attr is not None or self.edge_dim is not None:
            check_edge_attr(positions.edge_attr, positions.edge_index, self.edge_dim)
        q, k, v = self.to_heads(x.unsqueeze(0))
        query, keys, values = self.query, self.keys, None
        log_measure = None if measure is None else measure.to(self.action_columns.dtype).log().unsqueeze(-1)
        # Keys of one pose, or without poses, all have the same weight.
        if self.log_measure is not None and keys != "own" and not isinstance(self.project_in, Scalars):
            log_measure = self.log_measure.unsqueeze(0) if log_measure is None else log_measure + self.log_measure
        if self.shared_scores:
            q, k, v = in_one_pose(q, k, v)
            query, keys, bias = "own", "all", self._shared_bias(log_measure)
        else:
            # A single query without a pose contributes to every output pose by itself.
            query = "all" if q.shape[3] == 1 else query
            inverse, halves = self.action_columns.permute(1, 2, 0), None
            if self.opposite is not None and self.first_half is not None and self.sees_offsets:
                # From -h an offset looks like the opposite offset from h.
                halves = Halves(self.opposite, self.first_half, self.order)
            tables = PairTables(
                relate=self.relate(),
                inverse_action=inverse,
                quotient=self.quotient,
                relative=self.relative,
                query=query,
                keys=keys,
                log_measure=log_measure,
                halves=halves,
                offsets=self.sees_offsets and self.relation.period is None,
            )
            values = None if self.values is None else self.values.bind(self.quotient, self.relative)
            encoding = self.encoding if self.stabilizer is None else self.seen_encoding
            bias = self.encoding.pair_bias(encoding, tables)
        return PointCall(
            *(q, k, v, bias, positions, positions),
            query=query,
            keys=keys,
            dropout=self.dropout if self.training else 0.0,
            normalization=self.normalization,
            values=values,
            edges=self.edge_readout,
            envelope=self.cutoff,
        )

    def _shared_bias(self, log_measure: Tensor | None) -> PairBias:
        """The bias of a single pose that has the channels of all, with the measure of the keys, ``(N, 1)``."""
        assert isinstance(self.encoding, Encoding)
        seen = FromAllPoses(self.seen_encoding, self.inverse_action)
        inverse = seen.identity
        tables = PairTables(
            relate=SeenFromPoses(self._relation_in_units, inverse),
            inverse_action=inverse,
            quotient=self.quotient.new_zeros(1, 1),
            relative=None,
            query="own",
            keys="all",
            log_measure=log_measure,
            offsets=self.relation.period is None,
        )
        return EncodingBias(seen, tables)

    def relate(self) -> Relate:
        """The function of two points that the encoding gets."""
        if self.motion is not None and self.rotation is not None:
            return SeenMotion(self.motion, self.rotation)
        return SeenFromPoses(self._relation_in_units, self.action_columns.permute(1, 2, 0))


@dataclass(frozen=True, eq=False)
class SeenFromPoses:
    """A relation of points seen from all poses: ``(G, |H|, A, 1, K, D)``, in memory ``(|H|, D, G, A, K)``."""

    relation: Relation
    inverse: Tensor

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        inverse = self.inverse.to(query.dtype)
        if self.relation.is_offset:
            # One axis more: lists of one query are no images to AOTInductor then, whose channels it would have last.
            offset = self.relation(query.unsqueeze(0), key.unsqueeze(0))
            rows = inverse.flatten(0, 1)
            if rows.device.type not in launch.DEVICES:
                rows = rows.contiguous()  # Of two transposed matrices the product takes ten times as long.
            seen = torch.bmm(rows.unsqueeze(0), in_rows(offset.flatten(0, 3).T).unsqueeze(0))
            seen = seen.view(*inverse.shape[:2], *offset.shape[1:4]).permute(2, 0, 3, 4, 1)
        else:
            with exactly(query.device.type):  # as of positions that are far from the origin
                seen = self.relation(*(from_poses(x, inverse) for x in (query, key))).permute(0, 3, 1, 2, 4)
        return seen.unsqueeze(3).to(self.inverse.dtype)


@dataclass(frozen=True, eq=False)
class SeenMotion:
    """The logarithm of the motion from query to key, ``(G, |H|, A, P, K, D)``, a linear function of the offset."""

    linear: Tensor
    constant: Tensor

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        offset = key - query  # G, A, K, d
        seen = torch.einsum("hpij,gakj->ghapki", self.linear.to(offset.dtype), offset)
        return (seen + self.constant.to(offset.dtype)[:, None, :, None]).to(self.linear.dtype)


def maps_of_points(call: PointCall, queries: Tensor, poses: Tensor | None) -> Tensor:
    """The probabilities of queries ``(B, n)`` and poses, ``(B, M, poses, n, query poses, key poses, N')``."""
    p = probabilities(call, queries.to(call.q.device).flatten(), poses)
    return p.unflatten(1, queries.shape).permute(1, 0, 3, 2, 4, 5, 6)


def check_edge_attr(edge_attr: Tensor | None, edge_index: Tensor | None, edge_dim: int | None) -> None:
    """Features of edges are there if they are to be, of as many numbers, for the edges or for all pairs of points."""
    if edge_dim is None:
        if edge_attr is not None:
            raise ValueError("edge_attr: got features of edges, and the layer has no edge_dim; leave one of them out")
        return
    shape = ("edges", edge_dim) if edge_index is not None else ("clouds", "points", "points", edge_dim)
    needed = f"needed ({', '.join(map(str, shape))}) {'with' if edge_index is not None else 'without'} edge_index"
    if edge_attr is None:
        raise ValueError(f"edge_attr: got None, and the layer has edge_dim={edge_dim}; {needed}")
    got = tuple(edge_attr.shape)
    if len(got) != len(shape) or got[-1] != edge_dim or not _fits(edge_attr, edge_index):
        raise ValueError(f"edge_attr: got shape {got}, {needed}")


@in_programs(lambda edge_attr, edge_index: True)
def _fits(edge_attr: Tensor, edge_index: Tensor | None) -> bool:
    """Whether there are features for all edges, or for all pairs of points."""
    got = edge_attr.shape
    return got[0] == edge_index.shape[1] if edge_index is not None else got[1] == got[2]


def from_poses(x: Tensor, inverse: Tensor) -> Tensor:
    """Points ``(..., d)`` as every pose sees them, ``(..., H, d)``: row vectors, times the transposed matrix of h⁻¹."""
    return (x @ inverse.flatten(0, 1).T).unflatten(-1, inverse.shape[:2])
