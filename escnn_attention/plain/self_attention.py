"""Group self-attention on plain tensors: what the equivariant layers wrap and what their ``export()`` returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from escnn_attention.encodings import Encoding
from escnn_attention.functional import KeyMode, PositionalBias, QueryMode, Waves, compute, probabilities
from escnn_attention.functional.call import Call
from escnn_attention.geometry.grid import Grid, Positions, Window
from escnn_attention.groups.random_transformation import LieElement, RandomTransformation
from escnn_attention.plain.buffers import ExactBuffers
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses

__all__ = ["SelfAttention", "project_to_heads", "terms_of"]


class SelfAttention(ExactBuffers):
    """Projections to heads, attention between poses on a grid, projection to the output.

    Maps ``(B, in, *space)`` to ``(B, out, *space)``. It knows the group by tables only and needs no escnn.

    Args:
        project_in: from the features to 3 · ``num_heads`` · C fields: the queries, the values and the keys.
        project_out: from ``num_heads`` · C regular fields to the output.
        encoding: a bound encoding.
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        quotient: ``(|H|, |H|)``; the index of h⁻¹ĥ. None with ``relative``.
        relative: ``(S, S, F)``; features of h⁻¹ĥ, for samples of a continuous group.
        log_measure: ``(S,)``; the logarithm of the measure of every sample; None where all are alike.
        query_weight: the measure of a query pose, with ``query="all"``.
        transformation: by what the samples are transformed in training; None where they are fixed.
        num_heads, window, query, keys, dropout, backend: as in :class:`escnn_attention.GroupSelfAttention`.
    """

    inverse_action: Tensor
    quotient: Tensor
    relative: Tensor | None
    log_measure: Tensor | None

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding,
        *,
        inverse_action: np.ndarray,
        quotient: np.ndarray | None,
        num_heads: int,
        window: Window,
        query: QueryMode,
        keys: KeyMode,
        dropout: float,
        backend: str,
        relative: np.ndarray | None = None,
        log_measure: np.ndarray | None = None,
        query_weight: float = 1.0,
        transformation: RandomTransformation | None = None,
    ):
        super().__init__()
        self.project_in = project_in
        self.project_out = project_out
        self.encoding = encoding
        self.num_heads = num_heads
        self.window = window
        self.query: QueryMode = query
        self.keys: KeyMode = keys
        self.dropout = dropout
        self.backend = backend
        self.register_exact("inverse_action", inverse_action)
        self.register_buffer("quotient", None if quotient is None else torch.as_tensor(quotient), persistent=False)
        self.register_exact("relative", relative)
        self.register_exact("log_measure", log_measure)
        self.query_weight = query_weight
        self.transformation = transformation

    def forward(self, x: Tensor) -> Tensor:
        # Drawn in training only: what a trained layer gives is no matter of chance.
        element = self.transformation.draw() if self.transformation is not None and self.training else None
        return self.attend(x, self.positions(x), element)

    def positions(self, x: Tensor) -> Positions:
        """The grid of a tensor of features."""
        return Grid(tuple(x.shape[2:]), self.window, dtype=self.inverse_action.dtype, device=x.device)

    def attend(self, x: Tensor, positions: Positions, element: LieElement | None = None) -> Tensor:
        """The layer on features ``(B, in, *space)`` at the given positions, its samples turned by an element."""
        if element is not None:
            assert self.transformation is not None
            x = self.transformation.inputs(x, element, inverse=True)
        y = compute(self.call(x, positions, element), self.backend)
        if self.query_weight != 1:
            y = self.query_weight * y
        y = self.project_out(y)
        y = y.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 2 else y.squeeze(1)
        if element is not None:
            assert self.transformation is not None
            y = self.transformation.outputs(y, element)
        return y

    def attention_maps(self, x: Tensor, queries: Tensor, poses: Sequence[int] | None) -> Tensor:
        """``(B, M, poses, queries, query poses, key poses, *space)``: see ``GroupSelfAttention.attention_maps``."""
        chosen = None if poses is None else torch.tensor(poses, device=x.device)
        p = probabilities(self.call(x, self.positions(x)), queries.to(x.device), chosen)
        p = p.permute(1, 0, 3, 2, 4, 6, 5)  # From heads, images, queries, output and query poses, keys, key poses.
        return p.reshape(*p.shape[:6], *x.shape[2:])

    def call(self, x: Tensor, positions: Positions, element: LieElement | None = None) -> Call:
        """The attention to compute, of features ``(B, in, *space)`` at the given positions."""
        q, k, v = project_to_heads(self.project_in, x, self.num_heads)
        dropout = self.dropout if self.training else 0.0
        return Call(q, k, v, positions, self.bias(positions, element), self.query, self.keys, dropout)

    def bias(self, positions: Positions, element: LieElement | None = None) -> PositionalBias:
        """What the positional encoding adds to the scores at the given positions."""
        inverse = self.inverse_action
        if element is not None:
            assert self.transformation is not None
            inverse = inverse @ self.transformation.space(element, inverse=True).to(inverse)
        return terms_of(self.encoding, positions, inverse, self.quotient, self.relative, self.log_measure)


def project_to_heads(project_in: ToPoses | Scalars, x: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of features ``(B, in, *space)``, each ``(M, B, N, P, C)``."""
    fields = project_in(x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1))
    q, v, k = fields.unflatten(0, (3, num_heads)).unbind()
    return q, k, v


def terms_of(
    encoding: Encoding,
    positions: Positions,
    inverse: Tensor,
    quotient: Tensor | None,
    relative: Tensor | None = None,
    log_measure: Tensor | None = None,
) -> PositionalBias:
    """What an encoding and a measure add to the scores.

    Args:
        encoding: a bound encoding.
        positions: where the features lie.
        inverse: ``(|H|, d, d)``; the matrices by which every output pose sees points.
        quotient: ``(|H|, P)``; as what every output pose sees the poses of the keys. None with ``relative``.
        relative: ``(|H|, P, F)``; the same as features, for an encoding that was bound with some.
        log_measure: ``(P,)``; the logarithm of the measure of the poses of the keys. None where all are alike.
    """
    poses = encoding.poses(relative)
    if poses is not None and relative is None:
        assert quotient is not None
        # Of this selection the gradient is one operation; of an index in brackets it is a sort.
        poses = poses.index_select(1, quotient.flatten()).unflatten(1, quotient.shape)
    spatial, waves, rotary = None, encoding.waves(), encoding.rotations()
    if waves is None:
        points = positions.coordinates if encoding.absolute else positions.offsets
        # Row vectors, so that the product with the transposed matrix is h⁻¹ applied to every point.
        spatial = encoding.offsets(points @ inverse.transpose(-1, -2))
    return PositionalBias(
        num_poses=len(inverse),
        spatial=spatial,
        pose=poses,
        absolute=encoding.absolute,
        waves=None if waves is None else Waves((waves[0] @ inverse).unsqueeze(0), waves[1]),
        rotary=None if rotary is None else rotary.unsqueeze(1) @ inverse,
        log_measure=None if log_measure is None else log_measure.unsqueeze(1),
    )
