"""The terms that an encoding adds to the scores: tables over a grid or a cloud, and terms of pairs of points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from escnn_attention.exporting.mode import in_rows
from escnn_attention.functional import launch
from escnn_attention.functional.grid.call import PositionalBias, Waves
from escnn_attention.functional.points.call import PairBias, PairScores, PairTables
from escnn_attention.functional.tables import network_tables, select_rows
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair


class Offers(Protocol):
    """What biases are made of: the part of :class:`~escnn_attention.encodings.Encoding` with the same names."""

    form: Literal["offsets", "features", "waves"] | None
    absolute: bool
    rotates: bool
    rotates_values: bool
    dim: int

    @property
    def num_features(self) -> int: ...
    def offsets(self, delta: Tensor) -> Tensor | None: ...
    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None: ...
    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None: ...
    def waves(self) -> tuple[Tensor, Tensor] | None: ...
    def rotations(self) -> Tensor | None: ...
    def poses(self, relative: Tensor | None = None) -> Tensor | None: ...


def positional_bias(
    encoding: Offers,
    positions: Grid | GridPair | None,
    inverse: Tensor,
    quotient: Tensor | None,
    relative: Tensor | None = None,
    log_measure: Tensor | None = None,
) -> PositionalBias:
    """The terms that an encoding and a measure add to the scores at the positions of a grid, or of a pair of grids.

    Args:
        encoding: a bound encoding; without a function of the offset it needs no ``positions``.
        inverse: ``(|H|, d, d)``; the matrix of the inverse of every output pose.
        quotient, relative: ``(|H|, P)``, key poses relative to output poses; or ``(|H|, P, F)``, as features. None
            where keys have no poses.
        log_measure: ``(P,)``; the logarithm of the measure of the poses of the keys. None where all are alike.
    """
    spatial, query_spatial, chosen, on_gpu = None, None, None, inverse.device.type in launch.DEVICES
    rotary = encoding.rotations() if encoding.rotates else None
    waves = encoding.waves() if encoding.form == "waves" else None
    if encoding.form in ("offsets", "features") and positions is not None:
        # Row vectors, so that the product with the transposed matrix is h⁻¹ applied to every point.
        of_keys, points = positions.key_coordinates, positions.coordinates if encoding.absolute else positions.offsets
        network = encoding.first_layer() if on_gpu and encoding.form == "features" else None
        if of_keys is not None and encoding.absolute:
            back = inverse.transpose(-1, -2)
            spatial, query_spatial = encoding.offsets(of_keys @ back), encoding.offsets(points @ back)
        elif network is not None:
            table = encoding.poses() if relative is None and quotient is not None else None
            spatial, chosen = network_tables(points, inverse, network, table, quotient)
        else:
            spatial = encoding.offsets(points @ inverse.transpose(-1, -2))
        if spatial is not None and not encoding.absolute:
            spatial = positions.averaged(spatial)
    if rotary is not None:
        rotary = _seen_by_all(rotary, inverse)
    return PositionalBias(
        num_poses=len(inverse),
        spatial=spatial,
        pose=_pose_values(encoding, quotient, relative) if chosen is None else chosen,
        absolute=encoding.absolute,
        waves=None if waves is None else Waves(_seen_by_all(waves[0].unsqueeze(0), inverse), waves[1]),
        rotary=rotary,
        log_measure=None if log_measure is None else log_measure.unsqueeze(1),
        rotates_values=encoding.rotates_values,
        query_spatial=query_spatial,
    )


def _seen_by_all(frequencies: Tensor, inverse: Tensor) -> Tensor:
    """Frequencies ``(M, F, d)`` as all poses see them, ``(M, |H|, F, d)``, in the order that their angles need."""
    seen = inverse.permute(2, 0, 1).flatten(0, 1) @ frequencies.flatten(0, 1).T
    return seen.unflatten(1, frequencies.shape[:2]).unflatten(0, (-1, len(inverse))).permute(2, 1, 3, 0)


def _pose_values(encoding: Offers, quotient: Tensor | None, relative: Tensor | None) -> Tensor | None:
    """The function of the pose at h⁻¹ĥ, ``(M or 1, |H|, P, C)``."""
    poses = None if quotient is None and relative is None else encoding.poses(relative)
    if poses is not None and quotient is not None and relative is None:
        # Of this selection the gradient is one operation; of an index in brackets it is a sort.
        index, on_gpu = quotient.flatten(), poses.device.type in launch.DEVICES
        poses = select_rows(poses, index) if on_gpu else poses.index_select(1, index)
        poses = poses.unflatten(1, quotient.shape)
    return poses


class EncodingBias(PairBias):
    r"""The bias of an encoding between points, :math:`\langle q, k + \rho(\delta, p) \rangle / \sqrt C`."""

    def __init__(self, encoding: Offers, tables: PairTables):
        super().__init__(tables)
        self._encoding = encoding
        self.in_frames = encoding.absolute or (encoding.rotates and encoding.dim > 0)
        poses = None if self.in_frames else _pose_values(encoding, tables.quotient, tables.relative)
        poses = tables.of_pairs(None if poses is None else poses.movedim(-1, 1))
        self._poses = None if poses is None else poses.movedim(1, -1)  # added to the keys: M or 1, |H|, J or 1, P, C
        self.adds_nothing = encoding.form is None and not self.in_frames and self._poses is None
        self.num_features = 0 if encoding.form is None or self.in_frames else encoding.num_features

    @property
    def factorises(self) -> bool:  # type: ignore[override]
        """Whether the scores are products of functions of the query and functions of the key."""
        return self.in_frames or not self._encoding.dim or self._encoding.form in (None, "waves")

    def why_no_table(self) -> str | None:
        if self.tables.offsets or self.adds_nothing:
            return None
        return "it is for the offsets between all points of a cloud"

    def table(self, points: Tensor) -> PositionalBias:
        encoding, tables = self._encoding, self.tables
        inverse = tables.inverse_action
        bias = positional_bias(encoding, None, inverse, tables.quotient, tables.relative)
        if not encoding.absolute:
            return bias
        return replace(bias, spatial=encoding.offsets(points.to(inverse.dtype) @ inverse.transpose(-1, -2)))

    def scores(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        values = None
        if self._encoding.form is not None:
            # For every pose all pairs side by side, so that a network gives long rows.
            rows = in_rows(seen.permute(1, 5, 0, 2, 3, 4))  # H, D, G, A, P, K
            offered = self._encoding.features(rows.flatten(2)) if self._encoding.form != "offsets" else None
            if offered is not None:
                features, readout = offered
                return self.read(q, readout)._replace(features=features.unflatten(2, rows.shape[2:]).unsqueeze(0))
            values = self._encoding.offsets(seen)  # M or 1, G, H, A, P, K, C
            values = None if values is None else values.permute(0, 2, 6, 1, 3, 4, 5)
        q = q / math.sqrt(q.shape[-1])
        return PairScores(q, self._poses, None if values is None else q, values)

    def first_layer(self) -> tuple[Tensor, Tensor, Tensor] | None:
        whole = self._encoding.form == "features" and not self.in_frames and self.tables.offsets
        return self._encoding.first_layer() if whole else None

    def read(self, q: Tensor, readout: Tensor) -> PairScores:
        q = q / math.sqrt(q.shape[-1])
        # The function of the offset is linear in its features: the readout acts on all queries of a head together.
        rows = q.permute(1, 0, 4, 2, 3, 5)  # M, G, A, H or 1, J, C
        reads = rows.flatten(1, 4) @ readout.expand(len(rows), -1, -1)
        return PairScores(q, self._poses, reads.unflatten(1, rows.shape[1:5]).permute(1, 0, 3, 4, 2, 5))


class _SeenBy:
    """The encoding of offsets as several elements see them, by the matrices ``(K, d, d)`` of their inverses."""

    def __init__(self, encoding: Offers, inverse: Tensor):
        self.dim, self.form = encoding.dim, encoding.form
        self.num_features = len(inverse) * encoding.num_features
        self._encoding, self._inverse = encoding, inverse

    def _offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset, ``(M or 1, ..., K, C)`` at ``(..., d)``."""
        return self._encoding.offsets(torch.einsum("kij,...j->...ki", self._inverse.to(delta.dtype), delta))

    def _features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features ``(K, B, F, n)`` at offsets ``(B, d, n)``, and their readout, ``(M or 1, C, F)``."""
        seen = torch.einsum("kij,bjn->kbin", self._inverse.to(columns.dtype), columns)
        offered = self._encoding.features(seen.flatten(0, 1))
        return None if offered is None else (offered[0].unflatten(0, seen.shape[:2]), offered[1])

    def first_layer(self) -> None:
        """None: features are of several elements."""

    def waves(self) -> tuple[Tensor, Tensor] | None:
        """Frequencies of all elements, ``(K · F, d)``, and the readout of cosines and sines."""
        offered = self._encoding.waves()
        if offered is None:
            return None
        frequencies, readout = offered
        parts = [self._of_all(part) for part in readout.chunk(2, dim=-1)]
        return (frequencies @ self._inverse.to(frequencies.dtype)).flatten(0, 1), torch.cat(parts, dim=-1)

    def _of_all(self, readout: Tensor) -> Tensor:
        """The readout ``(M or 1, ..., K · F)`` of the features of all elements, from that of one."""
        raise NotImplementedError


class OverStabilizer(_SeenBy):
    r"""The encoding of cosets hK, the mean :math:`\frac{1}{|K|} \sum_{k \in K} \rho(k^{-1}\delta, k^{-1}p)`.

    It is the same for all elements of a coset. Rotations are by the mean frequencies, along directions that K keeps.
    """

    def __init__(self, encoding: Offers, inverse: Tensor):
        super().__init__(encoding, inverse)
        self.absolute, self.rotates = encoding.absolute, encoding.rotates
        self.rotates_values = encoding.rotates_values

    def offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset, ``(M or 1, ..., C)`` at ``(..., d)``."""
        values = self._offsets(delta)
        return None if values is None else values.mean(-2)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features ``(B, F, n)`` at offsets ``(B, d, n)``, and their readout, ``(M or 1, C, F)``."""
        offered = self._features(columns)
        return None if offered is None else (offered[0].mean(0), offered[1])

    def rotations(self) -> Tensor | None:
        """Frequencies ``(M or 1, F, d)`` of rotations of pairs of channels."""
        frequencies = self._encoding.rotations()
        return None if frequencies is None else frequencies @ self._inverse.mean(0).to(frequencies.dtype)

    def poses(self, relative: Tensor | None = None) -> Tensor | None:
        """The table over the double cosets."""
        return self._encoding.poses(relative)

    def _of_all(self, readout: Tensor) -> Tensor:
        number = len(self._inverse)
        return readout.repeat(1, 1, number) / number


class FromAllPoses(_SeenBy):
    r"""The encoding :math:`\rho(h^{-1}\delta)` for every pose h, side by side, as that of a single pose.

    With queries and keys of all poses side by side, the score of that pose is the sum of the scores of all.
    """

    absolute = rotates = rotates_values = False

    @property
    def identity(self) -> Tensor:
        """``(1, d, d)``, the inverse matrix of the single pose."""
        return torch.eye(self._inverse.shape[-1], dtype=self._inverse.dtype, device=self._inverse.device).unsqueeze(0)

    def offsets(self, delta: Tensor) -> Tensor | None:
        """The function of the offset, ``(M or 1, ..., |H| · C)`` at ``(..., d)``."""
        values = self._offsets(delta)
        return None if values is None else values.flatten(-2)

    def features(self, columns: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features ``(B, |H| · F, n)`` at offsets ``(B, d, n)``, and their readout, ``(M or 1, |H| · C, |H| · F)``."""
        offered = self._features(columns)
        return None if offered is None else (offered[0].transpose(0, 1).flatten(1, 2), self._of_all(offered[1]))

    def rotations(self) -> None:
        """None: the encoding is added to the keys."""

    def poses(self, relative: Tensor | None = None) -> None:
        """None: a pose sees keys of its own pose only, for which there is one number."""

    def _of_all(self, readout: Tensor) -> Tensor:
        """A matrix ``(M or 1, C, F)`` for each pose, ``(M or 1, |H| · C, |H| · F)``."""
        each = torch.eye(len(self._inverse), dtype=readout.dtype, device=readout.device)
        return torch.einsum("mcf,hg->mhcgf", readout, each).flatten(3, 4).flatten(1, 2)
