"""What an encoding adds to the scores: as tables over a grid or a cloud, and for pairs of points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from escnn_attention.functional.grid.call import PositionalBias, Waves
from escnn_attention.functional.points.bias import PairBias, PairScores, PairTables, in_rows
from escnn_attention.geometry.grid import Grid

__all__ = ["EncodingBias", "Offers", "positional_bias"]


class Offers(Protocol):
    r"""What an encoding offers of itself; see :class:`~escnn_attention.encodings.Encoding`.

    Attributes:
        absolute: whether it is a function of positions, and not of offsets.
        rotates_values: whether its rotations are for values, too.
        dim: the dimension of the offsets.
    """

    absolute: bool
    rotates_values: bool
    dim: int

    def offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset, ``(heads or 1, ..., C)`` at ``(..., d)``."""

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features ``(B, F, n)`` at offsets ``(B, d, n)``, and what reads them, ``(heads or 1, C, F)``."""

    def waves(self) -> tuple[Tensor, Tensor] | None:
        """Frequencies ``(F, d)`` and what reads cosines and sines, ``(heads or 1, C, 2F)``."""

    def rotations(self) -> Tensor | None:
        """Frequencies ``(heads or 1, F, d)`` of rotations of pairs of channels."""

    def poses(self, relative: Tensor | None = None) -> Tensor | None:
        """The function of the pose, as a table or at features of relative poses."""


def positional_bias(
    encoding: Offers,
    positions: Grid | None,
    inverse: Tensor,
    quotient: Tensor | None,
    relative: Tensor | None = None,
    log_measure: Tensor | None = None,
) -> PositionalBias:
    """What an encoding and a measure add to the scores at the positions of a grid.

    Args:
        encoding: a bound encoding.
        positions: where the features lie; None for an encoding without a function of the offset.
        inverse: ``(|H|, d, d)``; the matrices by which every output pose sees points.
        quotient: ``(|H|, P)``; as what every output pose sees the poses of the keys. None with ``relative``, and where
            keys have no poses.
        relative: ``(|H|, P, F)``; the same as features, for an encoding that was bound with some.
        log_measure: ``(P,)``; the logarithm of the measure of the poses of the keys. None where all are alike.
    """
    spatial, waves, rotary = None, encoding.waves(), encoding.rotations()
    if waves is None and positions is not None:
        points = positions.coordinates if encoding.absolute else positions.offsets
        # Row vectors, so that the product with the transposed matrix is h⁻¹ applied to every point.
        spatial = encoding.offsets(points @ inverse.transpose(-1, -2))
    return PositionalBias(
        num_poses=len(inverse),
        spatial=spatial,
        pose=_of_pairs_of_poses(encoding, quotient, relative),
        absolute=encoding.absolute,
        waves=None if waves is None else Waves((waves[0] @ inverse).unsqueeze(0), waves[1]),
        rotary=None if rotary is None else rotary.unsqueeze(1) @ inverse,
        log_measure=None if log_measure is None else log_measure.unsqueeze(1),
        rotates_values=encoding.rotates_values,
    )


def _of_pairs_of_poses(encoding: Offers, quotient: Tensor | None, relative: Tensor | None) -> Tensor | None:
    """The function of the pose at h⁻¹ĥ, ``(M or 1, |H|, P, C)``."""
    poses = None if quotient is None and relative is None else encoding.poses(relative)
    if poses is not None and quotient is not None and relative is None:
        # Of this selection the gradient is one operation; of an index in brackets it is a sort.
        poses = poses.index_select(1, quotient.flatten()).unflatten(1, quotient.shape)
    return poses


class EncodingBias(PairBias):
    r"""The bias of an encoding between points, :math:`\langle q, k + \rho(\delta, p) \rangle / \sqrt C`.

    Args:
        encoding: a bound encoding.
        tables: of the group and of the layer.
    """

    def __init__(self, encoding: Offers, tables: PairTables):
        super().__init__(tables)
        self._encoding = encoding
        self.in_frames = encoding.absolute or encoding.rotations() is not None
        self._poses = None if self.in_frames else self._pose_term()

    @property
    def factorises(self) -> bool:  # type: ignore[override]
        """Whether the encoding is a product of what queries and keys know by themselves."""
        if self.in_frames or self._encoding.waves() is not None:
            return True
        with torch.no_grad():
            return self._encoding.offsets(self.tables.inverse_action.new_zeros(1, self._encoding.dim)) is None

    def why_no_table(self) -> str | None:
        return None if self.tables.offsets else "it is for the offsets between all points of a cloud"

    def table(self, points: Tensor) -> PositionalBias:
        encoding, tables = self._encoding, self.tables
        inverse = tables.inverse_action
        bias = positional_bias(encoding, None, inverse, tables.quotient, tables.relative)
        if not encoding.absolute:
            return bias
        return replace(bias, spatial=encoding.offsets(points.to(inverse.dtype) @ inverse.transpose(-1, -2)))

    def _pose_term(self) -> Tensor | None:
        """What poses add to the keys, ``(M or 1, |H|, J or 1, P, C)``."""
        poses = _of_pairs_of_poses(self._encoding, self.tables.quotient, self.tables.relative)
        poses = self.tables.of_pairs(None if poses is None else poses.movedim(-1, 1))
        return None if poses is None else poses.movedim(1, -1)

    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        q = q / math.sqrt(q.shape[-1])
        features, readout = self._features(seen)
        reads = q
        if features is not None and readout is not None:
            # The function of the offset is linear in its features: the query reads them. All queries of a head at once.
            rows = q.permute(1, 0, 4, 2, 3, 5)  # M, G, A, H or 1, J, C
            reads = rows.flatten(1, 4) @ readout.expand(len(rows), -1, -1)
            reads = reads.unflatten(1, rows.shape[1:5]).permute(1, 0, 3, 4, 2, 5)
        return PairScores(q, self._poses, None if features is None else reads, features)

    def _features(self, seen: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The function of the offset as features ``(1, H, F, G, A, P or 1, K)`` and their readout ``(M or 1, C, F)``.

        Without such a form, its values ``(M or 1, H, C, G, A, P or 1, K)`` and None.
        """
        # For every pose all pairs side by side, so that what a network makes of them has long rows.
        rows = in_rows(seen.permute(1, 5, 0, 2, 3, 4))  # H, D, G, A, P, K
        rows, shape = rows.flatten(2), rows.shape[2:]
        offered = self._encoding.features(rows)
        if offered is not None:
            return offered[0].unflatten(2, shape).unsqueeze(0), offered[1]
        values = self._encoding.offsets(seen)  # M or 1, G, H, A, P, K, C
        return None if values is None else values.permute(0, 2, 6, 1, 3, 4, 5), None
