"""Self-attention and attentive convolution on point clouds, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from escnn_attention._precision import working_precision
from escnn_attention.encodings import Encoding
from escnn_attention.encodings.pair_kernel import Halves, PairKernel
from escnn_attention.functional import KeyMode, PositionalBias, QueryMode, attention
from escnn_attention.functional.call import Call
from escnn_attention.functional.fold import fold_frames, fold_keys
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.points.attention import (
    Normalization,
    Scores,
    ScoreTerms,
    mix_values,
    point_attention,
)
from escnn_attention.geometry.cache import cached
from escnn_attention.geometry.clouds import Cloud, Lists, Neighbourhood, Neighbours, WholeClouds, cloud_slices
from escnn_attention.geometry.relations import Offset, Relation
from escnn_attention.groups.random_transformation import RandomTransformation
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.convolved_values import ConvolvedValues
from escnn_attention.plain.point_module import PointModule
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses
from escnn_attention.plain.self_attention import terms_of

__all__ = ["PointAttention"]


class PointAttention(PointModule, ExactBuffers):
    """Projections to heads, attention between the poses of points, projection to the output.

    It knows the group by tables only and needs no escnn.

    Args:
        project_in: from the features to 3 · ``num_heads`` · C fields: the queries, the values and the keys.
        project_out: from ``num_heads`` · C regular fields to the output.
        encoding: a bound encoding or kernel.
        relation: what it sees of two points.
        neighbourhood: the rule by which points are neighbours where no edges are given.
        values: what becomes of the values that are attended to; None for their sum.
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        quotient: ``(|H|, |H|)``; the index of h⁻¹ĥ.
        opposite: ``(|H|,)``; the index of -h, where H has the inversion of space; None elsewhere.
        relative: ``(|H|, |H|, F)``; features of h⁻¹ĥ, or None.
        log_measure: ``(|H|,)``; the logarithms of the weights of the poses, or None where all are 1.
        query_weight: the measure of a query pose, with ``query="all"``.
        transformation: by what the samples are transformed in training; None where they are fixed.
        num_heads, query, keys, normalization, dropout, backend, length_scale: as in
            :class:`escnn_attention.PointSelfAttention`.
    """

    inverse_action: Tensor
    quotient: Tensor
    opposite: Tensor | None
    first_half: Tensor | None
    order: Tensor | None
    relative: Tensor | None
    log_measure: Tensor | None

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding | PairKernel,
        relation: Relation,
        neighbourhood: Neighbourhood,
        values: ConvolvedValues | None,
        *,
        inverse_action: np.ndarray,
        quotient: np.ndarray,
        relative: np.ndarray | None,
        log_measure: np.ndarray | None,
        num_heads: int,
        query: QueryMode,
        keys: KeyMode,
        normalization: Normalization,
        dropout: float,
        length_scale: float,
        backend: str,
        query_weight: float = 1.0,
        transformation: RandomTransformation | None = None,
        opposite: np.ndarray | None = None,
    ):
        super().__init__()
        self.project_in = project_in
        self.project_out = project_out
        self.encoding = encoding
        self.relation = relation
        self.neighbourhood = neighbourhood
        self.values = values
        self.num_heads = num_heads
        self.query: QueryMode = query
        self.keys: KeyMode = keys
        self.normalization: Normalization = normalization
        self.dropout = dropout
        self.length_scale = length_scale
        self.backend = backend
        self.query_weight = query_weight
        self.transformation = transformation
        self.register_exact("inverse_action", inverse_action)
        self.register_buffer("quotient", torch.as_tensor(quotient), persistent=False)
        half = order = None
        if opposite is not None:
            half = np.flatnonzero(opposite > np.arange(len(opposite)))
            order = np.concatenate([half, opposite[half]]).argsort()
            order = None if (order == np.arange(len(order))).all() else order
        for name, index in (("opposite", opposite), ("first_half", half), ("order", order)):
            self.register_buffer(name, None if index is None else torch.as_tensor(index), persistent=False)
        self.register_exact("relative", relative)
        self.register_exact("log_measure", log_measure)

    def of_all(
        self, x: Tensor, coords: Tensor, edge_index: Tensor | None, batch: Tensor | None, measure: Tensor | None
    ) -> Tensor:
        # Drawn in training only: what a trained layer gives is no matter of chance.
        element = self.transformation.draw() if self.transformation is not None and self.training else None
        if self.transformation is not None and element is not None:
            x = self.transformation.inputs(x, element, inverse=True)
        # (3 · M, 1, N, P, C) to three times (N, M, P, C).
        q, v, k = self.project_in(x.unsqueeze(0)).squeeze(1).unflatten(0, (3, self.num_heads)).transpose(1, 2)
        # In half precision points that are far from the origin would fall together.
        points = coords.to(working_precision(self.inverse_action.dtype))
        points = points if self.length_scale == 1 else points / self.length_scale
        if self.transformation is not None and element is not None:
            # Row vectors, so that the product with the matrix of g is g⁻¹ applied to every point. Not a matrix product,
            # which autocast has in half precision.
            points = (points.unsqueeze(-1) * self.transformation.space(element).to(points)).sum(-2)
        if self._serves_densely(points, edge_index, batch):
            y = self._attend_densely(q, k, v, points, batch, measure)
        else:
            y = self._attend_to(self._neighbours(coords, edge_index, batch), q, k, v, points, measure)
        if self.query_weight != 1:
            y = self.query_weight * y
        y = self.project_out(y.transpose(0, 1).unsqueeze(1)).squeeze(0)
        return y if self.transformation is None or element is None else self.transformation.outputs(y, element)

    def _neighbours(self, coords: Tensor, edge_index: Tensor | None, batch: Tensor | None) -> Neighbours:
        if edge_index is not None:
            return cached(Lists, edge_index, len(coords))
        # The rule of another layer may be equal.
        return cached(Neighbourhood.__call__, self.neighbourhood, coords, batch)

    def _log_measure(self, measure: Tensor | None) -> Tensor | None:
        """The logarithms of the measure of the keys, ``(N or 1, P or 1)``."""
        points = None if measure is None else measure.to(self.inverse_action.dtype).log().unsqueeze(-1)
        # Keys of one pose, or without poses, all have the same weight.
        alike = self.log_measure is None or self.keys == "own" or isinstance(self.project_in, Scalars)
        if alike or self.log_measure is None:
            return points
        return self.log_measure.unsqueeze(0) if points is None else points + self.log_measure

    def _terms(self, cloud: Cloud) -> PositionalBias:
        encoding = cast(Encoding, self.encoding)
        dtype = self.inverse_action.dtype
        if encoding.absolute:
            cloud = Cloud(cloud.coordinates.to(dtype))
        elif encoding.waves() is None:
            # Without a function of the offset there is no need of a table of all of them.
            cloud = Cloud(cloud.coordinates[: 1 if self._factorises() else None].to(dtype))
        return terms_of(encoding, cloud, self.inverse_action, self.quotient, self.relative)

    def _serves_densely(self, points: Tensor, edge_index: Tensor | None, batch: Tensor | None) -> bool:
        """Whether everyone sees everyone in a way that the backends of grids serve, one cloud after the other."""
        named = self.backend in ("dense", "reference")
        if self.backend in ("neighbours", "native"):
            return False
        reason = None
        if self.values is not None or isinstance(self.encoding, PairKernel) or self.normalization != "softmax":
            reason = "it is for softmax attention with an encoding"
        elif edge_index is not None or not self.neighbourhood.is_global or not isinstance(self.relation, Offset):
            reason = "it is for the offsets between all points of a cloud"
        if named and reason is not None:
            raise ValueError(f"backend: {self.backend!r} cannot serve this call: {reason}")
        if named or reason is not None or not len(points):
            return named and len(points) > 0
        device = points.device.type
        dropped = self.training and self.dropout > 0 and device == "cpu"
        double = device == "cuda" and self.inverse_action.dtype == torch.float64
        # A gradient by coordinates is a force, to be differentiated once more, which fused attention cannot be.
        forces = points.requires_grad and torch.is_grad_enabled()
        if dropped or double or forces:
            return False
        clouds = 1 if batch is None or not len(batch) else int(batch.max()) + 1
        return len(points) >= _MANY * clouds and self._factorises()

    def _factorises(self) -> bool:
        """Whether the scores are products of what queries and keys know by themselves."""
        encoding = cast(Encoding, self.encoding)
        if encoding.absolute or encoding.waves() is not None or encoding.rotations() is not None:
            return True
        return encoding.offsets(self.inverse_action.new_zeros(1, encoding.dim)) is None

    def _attend_densely(
        self, q: Tensor, k: Tensor, v: Tensor, points: Tensor, batch: Tensor | None, measure: Tensor | None
    ) -> Tensor:
        stretches, order = cloud_slices(batch, len(q)), None
        if stretches is None:
            assert batch is not None
            order = batch.argsort(stable=True)
            q, k, v, points = q[order], k[order], v[order], points[order]
            measure = None if measure is None else measure[order]
            stretches = cloud_slices(batch[order], len(q))
            assert stretches is not None
        log_measure = self._log_measure(measure)
        # A single query without a pose contributes to every output pose by itself.
        query: QueryMode = "all" if q.shape[2] == 1 else self.query
        out = []
        for stretch in stretches:
            x = points[stretch]
            cloud = Cloud(x if cast(Encoding, self.encoding).absolute else x - x.mean(0))
            mu = log_measure if log_measure is None or measure is None else log_measure[stretch]
            y = attention(
                _on_grid(q[stretch]),
                _on_grid(k[stretch]),
                _on_grid(v[stretch]),
                cloud,
                replace(self._terms(cloud), log_measure=None if mu is None else mu.T),
                query=query,
                keys=self.keys,
                dropout=self.dropout if self.training else 0.0,
                backend="dense" if self.backend == "auto" else self.backend,
            )
            # Without anything that turns, all output poses are alike.
            out.append(_at_points(y).expand(-1, -1, len(self.inverse_action), -1))
        y = torch.cat(out)
        return y if order is None else torch.empty_like(y).index_copy(0, order, y)

    def _attend_to(
        self, neighbours: Neighbours, q: Tensor, k: Tensor, v: Tensor, points: Tensor, measure: Tensor | None
    ) -> Tensor:
        """The output of the heads, ``(N, M, |H|, C)``."""
        num_poses = len(self.inverse_action)
        query, keys, scores = self.query, self.keys, self._scores()
        in_frames = isinstance(self.encoding, Encoding) and (
            self.encoding.absolute or self.encoding.rotations() is not None
        )
        unfolds = []
        if in_frames:
            # These treat every output pose differently before the scores are taken: a head for each of them.
            cloud = Cloud(points if cast(Encoding, self.encoding).absolute else points - points.mean(0))
            call = Call(_on_grid(q), _on_grid(k), _on_grid(v), cloud, self._terms(cloud), query, keys)
            if keys == "own" and k.shape[2] > 1:
                call, unfold = fold_keys(call)
                unfolds.append(unfold)
            call, unfold = fold_frames(call)
            unfolds.append(unfold)
            q, k, v = (_at_points(t) for t in (call.q, call.k, call.v))
            keys = "all"
        out = point_attention(
            q,
            k,
            v,
            points,
            neighbours,
            num_poses=1 if in_frames else num_poses,
            relate=self._relate,
            scores=scores,
            mix=mix_values if self.values is None else self.values.bind(self.quotient, self.relative),
            log_measure=self._log_measure(measure),
            width=self._width(isinstance(neighbours, WholeClouds)),
            query=query,
            keys=keys,
            normalization=self.normalization,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        if not in_frames:
            return out
        y = _on_grid(out)
        for unfold in reversed(unfolds):
            y = unfold(y)
        return _at_points(y)

    def _relate(self, query: Tensor, key: Tensor) -> Tensor:
        """What every output pose h sees of two points, ``(G, |H|, A, 1, K, D)``: in memory ``(|H|, D, G, A, K)``."""
        inverse = self.inverse_action.to(query.dtype)
        if isinstance(self.relation, Offset):
            offset = self.relation(query, key)
            seen = matmul(inverse.flatten(0, 1).unsqueeze(0), offset.flatten(0, 2).T.unsqueeze(0))
            seen = seen.view(*inverse.shape[:2], *offset.shape[:3]).permute(2, 0, 3, 4, 1)
        else:
            seen = self.relation(*(turned(x, inverse) for x in (query, key))).permute(0, 3, 1, 2, 4)
        return seen.unsqueeze(3).to(self.inverse_action.dtype)

    def _width(self, mutual: bool) -> int:
        """How many numbers there are for every score while it is made and used."""
        kernel = 1
        if isinstance(self.encoding, PairKernel):
            halved = mutual and self._halves() is not None and self.encoding.combine != "mlp"
            # Two layers.
            kernel = (1 if halved else 2) * self.encoding.hidden
        return kernel if self.values is None else max(kernel, self.values.features)

    def _halves(self) -> Halves | None:
        """The poses h and -h, from which an offset looks like the opposite offset."""
        if self.opposite is None or self.first_half is None or not isinstance(self.relation, Offset):
            return None
        return Halves(self.opposite, self.first_half, self.order)

    def _scores(self) -> Scores:
        if isinstance(self.encoding, PairKernel):
            kernel, poses = self.encoding, self._of_pairs(self.encoding.poses(self.quotient, self.relative))
            halves = self._halves()
            return lambda q, keys, seen, mutual: kernel.score(q, keys, seen, poses, halves if mutual else None)
        encoding = self.encoding
        if encoding.absolute or encoding.rotations() is not None:
            return lambda q, keys, seen, mutual: ScoreTerms(q / math.sqrt(q.shape[-1]))
        poses = encoding.poses(self.relative)
        if poses is not None and self.relative is None:
            poses = poses.index_select(1, self.quotient.flatten()).unflatten(1, self.quotient.shape)
        if poses is not None:
            poses = self._of_pairs(poses.movedim(-1, 1))
        return _RelativeScores(encoding, None if poses is None else poses.movedim(1, -1))

    def _of_pairs(self, poses: Tensor | None) -> Tensor | None:
        """From ``(..., H, P)`` to ``(..., H, J or 1, P or 1)``: with keys of the query's own pose, that is ĥ = h̃."""
        if poses is None or self.keys == "all" or poses.shape[-1] == 1:
            return None if poses is None else poses.unsqueeze(-2)
        return poses.unsqueeze(-1) if self.query == "all" else poses.diagonal(dim1=-2, dim2=-1)[..., None, None]


# With so many points a cloud, on average, fused attention is faster, one cloud after the other.
_MANY = 64


def _on_grid(x: Tensor) -> Tensor:
    """From ``(N, M, P, C)`` to ``(M, 1, N, P, C)``, as the backends of grids have it."""
    return x.transpose(0, 1).unsqueeze(1)


def _at_points(x: Tensor) -> Tensor:
    """And back."""
    return x.squeeze(1).transpose(0, 1)


def turned(x: Tensor, inverse: Tensor) -> Tensor:
    """Points ``(..., d)`` as every pose sees them, ``(..., H, d)``: row vectors, times the transposed matrix of h⁻¹."""
    return (x @ inverse.flatten(0, 1).T).unflatten(-1, inverse.shape[:2])


class _RelativeScores:
    r""":math:`\langle q, k + \rho(\delta, p) \rangle / \sqrt C`.

    Args:
        encoding: of the offset.
        poses: ``(M or 1, |H|, J or 1, P, C)``, :math:`E[h^{-1}\hat h]`, or None.
    """

    def __init__(self, encoding: Encoding, poses: Tensor | None):
        self._poses = poses
        self._encoding = encoding

    def __call__(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> ScoreTerms:
        q = q / math.sqrt(q.shape[-1])
        features, readout = _features(self._encoding, seen)
        reads = q
        if features is not None and readout is not None:
            # The function of the offset is linear in its features: the query reads them. All queries of a head at once.
            rows = q.permute(1, 0, 4, 2, 3, 5)  # M, G, A, H or 1, J, C
            reads = rows.flatten(1, 4) @ readout.expand(len(rows), -1, -1)
            reads = reads.unflatten(1, rows.shape[1:5]).permute(1, 0, 3, 4, 2, 5)
        return ScoreTerms(q, self._poses, None if features is None else reads, features)


def _features(encoding: Encoding, seen: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The function of the offset as features ``(1, H, F, G, A, P or 1, K)`` and what reads them, ``(M or 1, C, F)``.

    Without such a form, its values ``(M or 1, H, C, G, A, P or 1, K)`` and None.
    """
    # For every pose all pairs side by side, so that what a network makes of them has long rows.
    rows = seen.permute(1, 5, 0, 2, 3, 4)  # H, D, G, A, P, K
    rows, shape = rows.flatten(2), rows.shape[2:]
    offered = encoding.features(rows)
    if offered is not None:
        return offered[0].unflatten(2, shape).unsqueeze(0), offered[1]
    values = encoding.offsets(seen)  # M or 1, G, H, A, P, K, C
    return None if values is None else values.permute(0, 2, 6, 1, 3, 4, 5), None
