r"""Equivariant linear maps between the features at a position and the poses of regular fields.

By Frobenius reciprocity every equivariant map from a representation :math:`\rho` to a regular field is
:math:`q(h) = w\,\rho(h)^{-1} f` for one vector w: it reads the same combination of f in the frame of every pose. Every
map from a regular field is :math:`\sum_h f(h)\,\rho(h)\,w`. Both are complete, exact in any precision, and for
permutation representations (regular, quotient, trivial) a gather of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_option, check_probability
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.encodings.base import Needs
from escnn_attention.encodings.bias import OverStabilizer
from escnn_attention.functional import KeyMode, QueryMode, launch
from escnn_attention.functional.autograd import needs_operators
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.layout import Versioned
from escnn_attention.functional.matmul import (
    SMALL,
    Columns,
    gather_columns,
    grouped_linear,
    grouped_linear_transpose,
    grouped_linears,
    in_groups,
)
from escnn_attention.groups.random_transformation import RandomTransformation
from escnn_attention.plain.buffers import Derived, ExactBuffers
from escnn_attention.plain.irreps import Irreps, Segment


class Registers(torch.nn.Module):
    """R more keys and values of each head, the same at all positions, behind the poses of the keys."""

    def __init__(self, num_heads: int, channels: int, number: int):
        super().__init__()
        self.keys = Parameter(torch.randn(num_heads, number, channels))
        self.values = Parameter(torch.zeros(num_heads, number, channels))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``(M, B, N, P + R, C)`` of those ``(M, B, N, P, C)`` of the features."""
        return self._behind(keys, self.keys), self._behind(values, self.values)

    def _behind(self, x: Tensor, more: Tensor) -> Tensor:
        shape = (*x.shape[:3], more.shape[1], x.shape[4])
        return torch.cat([x, more.to(x.dtype)[:, None, None].expand(shape)], dim=3)

    def extra_repr(self) -> str:
        return str(self.keys.shape[1])


def with_registers(quotient: np.ndarray | None, number: int) -> np.ndarray | None:
    """The table ``(|H|, P)`` of the poses of keys, with registers behind, which all output poses see alike.

    >>> with_registers(np.array([[0, 1], [1, 0]]), 1).tolist()
    [[0, 1, 2], [1, 0, 2]]
    """
    if quotient is None or not quotient.size or not number:  # poses of samples have features instead
        return quotient
    more = np.broadcast_to(quotient.max() + 1 + np.arange(number), (len(quotient), number))
    return np.concatenate([quotient, more], axis=1)


def padded(table: np.ndarray | None, num_poses: int) -> np.ndarray | None:
    """A table of the poses of keys ``(|H|, P, F)``, or ``(P,)``, with zeros for registers behind them."""
    if table is None:
        return None
    axis = 1 if table.ndim > 1 else 0
    widths = [(0, num_poses - table.shape[axis] if i == axis else 0) for i in range(table.ndim)]
    return np.pad(table, widths)


ProjectionKind = Literal["group", "pointwise"]


class QueryKeyNorm(torch.nn.Module):
    r"""Queries and keys, each divided by its root mean square over the channels of a head, at each pose by itself.

    .. math:: \hat q(x, h) = \gamma_q \, q(x, h) \big/ \sqrt{\operatorname{mean}_c q_c(x, h)^2 + \epsilon}

    The gains :math:`\gamma`, C numbers of each head, are the same for all poses.
    """

    def __init__(self, num_heads: int, channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.queries = Parameter(torch.ones(num_heads, channels))
        self.keys = Parameter(torch.ones(num_heads, channels))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised queries and keys ``(M, B, N, P, C)``."""
        return self._normalise(q, self.queries), self._normalise(k, self.keys)

    def _normalise(self, x: Tensor, gain: Tensor) -> Tensor:
        # The sum of squares of half precision numbers is taken in single precision.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = F.rms_norm(wide, wide.shape[-1:], None, self.eps) * gain.to(wide.dtype)[:, None, None, None]
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.queries.shape[0]}, {self.queries.shape[1]}, eps={self.eps:g}"


class Frames(ExactBuffers):
    r"""Writes weight vectors w in the frame of every pose, :math:`w\,\rho(h)^{-1}`.

    Maps ``(F, width)`` to ``(groups, |H|, F // groups, size)``. A single group has the poses inside, as the channels of
    regular fields do: ``(1, F, |H|, size)``. The width is the size, or less where poses are cosets.
    """

    index: Tensor | None
    back: Tensor | None
    order: Tensor | None

    def __init__(self, segments: Sequence[Segment]):
        super().__init__()
        self._kept: Derived[Tensor] = Derived()
        gathered = [s.columns[:, s.permutation].swapaxes(0, 1) for s in segments if s.permutation is not None]
        multiplied = [s for s in segments if s.permutation is None]
        # All permutations are one gather, along one axis: its gradient is fast.
        index = np.concatenate([i.reshape(len(i), -1) for i in gathered], axis=1) if gathered else None
        self.register_exact("index", index)
        self.register_exact("back", None if index is None else index.argsort(1))
        self._stretches: list[slice | None] = []
        self._shapes = [(len(s.columns), s.matrices.shape[1]) for s in multiplied]
        # Weights of fewer numbers than channels lie side by side by segments.
        fewer = any(s.matrices.shape[1] < s.columns.shape[1] for s in multiplied)
        self.width = sum(len(s.columns) * s.matrices.shape[1] for s in segments)
        start = 0
        for i, segment in enumerate(multiplied):
            columns = segment.columns.ravel()
            # Channels that lie side by side are a view, whose gradient is one too.
            together = fewer or bool((columns == columns[0] + np.arange(len(columns))).all())
            number = math.prod(self._shapes[i])
            first = start if fewer else int(columns[0])
            self._stretches.append(slice(first, first + number) if together else None)
            start += number
            self.register_exact(f"columns_{i}", segment.columns)
            self.register_exact(f"matrices_{i}", segment.matrices)
        made = [s for s in segments if s.permutation is not None] + multiplied
        order = np.concatenate([s.columns.ravel() for s in made]).argsort()
        in_order = bool((order == np.arange(len(order))).all())
        self.register_exact("order", None if in_order else order)

    def forward(self, weight: Tensor, groups: int) -> Tensor:
        return in_groups(self._in_frames(weight), groups)

    def map(self, weight: Tensor, groups: int) -> tuple[Tensor, Columns | None]:
        """The vectors in all frames; or as they are, and the columns that the frames see of them, if that is all."""
        columns = None
        if self.index is not None and self.back is not None and not self._stretches and self.order is None:
            columns = Columns(self.index, self.back, groups)
            if self.training or torch.is_grad_enabled() or needs_operators(weight):
                return weight, columns
        return self._kept.of(weight, lambda w: self._expanded(w, groups, columns), self.training), None

    def matrix(self, weight: Tensor, groups: int) -> Tensor:
        """The vectors in all frames, one below the other."""
        vectors, columns = self.map(weight, groups)
        return (vectors if columns is None else gather_columns(vectors, columns)).flatten(0, 2)

    def _expanded(self, weight: Tensor, groups: int, columns: Columns | None) -> Tensor:
        return self(weight, groups) if columns is None else gather_columns(weight, columns)

    def _in_frames(self, weight: Tensor) -> Tensor:
        """The vectors as ``(F, |H|, size)``."""
        parts = []
        if self.index is not None:
            parts.append(weight.index_select(1, self.index.flatten()).unflatten(1, self.index.shape))
        for i, stretch in enumerate(self._stretches):
            columns = getattr(self, f"columns_{i}")
            of_fields = weight.index_select(1, columns.flatten()) if stretch is None else weight[:, stretch]
            fields = of_fields.unflatten(1, self._shapes[i])
            parts.append(torch.einsum("fmi,hij->fhmj", fields, getattr(self, f"matrices_{i}")).flatten(2))
        frames = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return frames if self.order is None else frames.index_select(2, self.order)


def _by_group(bias: Tensor | None, fields: int, last: tuple[int, int] = (0, 0)) -> Tensor | None:
    """The biases ``(groups, 1, fields)``, with zeros: of the first fields, and of the first ones of the last groups.

    ``last`` is the number of the last groups, and of the fields in each of them that have a bias.
    """
    if bias is None:
        return None
    groups, some = last
    if groups and 0 < some < fields:
        first, of_last = bias.split([len(bias) - groups * some, groups * some])
        filled = F.pad(of_last.view(groups, some), (0, fields - some))
        return torch.cat([first.view(-1, fields), filled]).unsqueeze(1)
    return (F.pad(bias, (0, -len(bias) % fields)) if len(bias) % fields else bias).view(-1, 1, fields)


def _biases(bias: int, last: tuple[int, int]) -> Parameter | None:
    """Biases of so many first fields, and of so many fields of each of the last groups; None where there are none."""
    number = bias + last[0] * last[1]
    return Parameter(torch.zeros(number)) if number else None


def _pose_by_pose(x: Tensor, order: int, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A map of the fields of ``(N, fields · |H|)`` at each pose."""
    rows = x.unflatten(1, (-1, order)).mT.reshape(-1, weight.shape[1])
    return F.linear(rows, weight, bias).view(len(x), order, len(weight)).mT.flatten(1)


def in_irreps(irreps: Irreps, x: Tensor, weight: Tensor, number: int) -> bool:
    """Whether a map of so many positions, in programs any number of them, takes less time in irreps."""
    return not (isinstance(number, int) and number < irreps.least) and irreps.serve(x, weight)


class ToPoses(Versioned):
    """The projection of features ``(B, N, size)`` to regular fields, ``(groups, B, N, |H|, fields // groups)``.

    Args:
        segments: the representation of the features (``escnn_attention.groups.fibers.frames``).
        size, fields, order, groups: the channels, the regular fields, :math:`|H|`, and the groups of the fields.
        kind: ``"group"`` for every equivariant map; ``"pointwise"`` mixes regular fields, not their poses.
        bias, last_bias: how many of the first fields have a bias; how many groups follow, and in each how many fields.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        size: int,
        fields: int,
        order: int,
        *,
        groups: int = 1,
        kind: ProjectionKind = "group",
        bias: int = 0,
        last_bias: tuple[int, int] = (0, 0),
    ):
        super().__init__()
        self.kind = kind
        self.order = order
        self.groups = groups
        self.last_bias = last_bias
        self.frames = Frames(segments) if kind == "group" else None
        fan_in = size // order if self.frames is None else self.frames.width
        self.irreps = Irreps.of(segments, fields, groups) if kind == "group" else None
        self.weight = Parameter(torch.randn(fields, fan_in) / math.sqrt(fan_in))
        self.bias = _biases(bias, last_bias)
        self._kept: Derived[Tensor] = Derived()

    def forward(self, x: Tensor) -> Tensor:
        return self.in_parts(x, 1)[0]

    def of_rows(self, x: Tensor) -> Tensor:
        """The output of rows ``(..., size)`` by one product, ``(..., groups · |H| · fields // groups)``.

        A single group has the poses inside.
        """
        if self.frames is None:
            return _pose_by_pose(x, self.order, self.weight, self.bias)
        weight = self.frames.matrix(self.weight, self.groups)
        return F.linear(x, weight, None if self.bias is None else self._kept.of(self.bias, self._shifts, self.training))

    def _shifts(self, bias: Tensor) -> Tensor:
        """The biases of all groups, poses and fields."""
        some = _by_group(bias, len(self.weight) // self.groups, self.last_bias)
        assert some is not None
        if self.groups == 1:
            return some.mT.expand(-1, -1, self.order).flatten()
        return F.pad(some.expand(-1, self.order, -1), (0, 0, 0, 0, 0, self.groups - len(some))).flatten()

    def in_parts(self, x: Tensor, parts: int, side_by_side: bool | None = None) -> Sequence[Tensor]:
        """The output in so many parts of groups; with positions side by side in memory if asked."""
        fields = len(self.weight) // self.groups
        bias = _by_group(self.bias, fields, self.last_bias)  # every pose has that of its field
        if self.frames is None:
            of_poses = x.unflatten(-1, (-1, self.order)).transpose(-1, -2)
            of_poses = of_poses if parts == 1 else of_poses.contiguous()  # one copy for all parts
            weight = self.weight.unflatten(0, (self.groups, fields))
            return grouped_linears(parts, of_poses, weight, None if bias is None else bias.squeeze(1))
        if self.irreps is not None and in_irreps(self.irreps, x, self.weight, math.prod(x.shape[:-1])):
            return self.irreps.to_poses(x, self.weight, bias, parts, bool(side_by_side))
        weight, columns = self.frames.map(self.weight, self.groups)
        if self.groups > 1:
            return grouped_linears(parts, x, weight, bias, columns, side_by_side)
        bias = None if bias is None else bias.transpose(1, 2)
        return [grouped_linear(x, weight, bias, columns, side_by_side).transpose(-1, -2)]


class FromPoses(ExactBuffers):
    """The projection of regular fields ``(groups, B, N, |H|, fields // groups)`` to features, ``(B, N, size)``.

    Args:
        segments, size, fields, order, groups, kind: as in :class:`ToPoses`, with frames of ``dual=True``.
        invariants: ``(size, k)``, a basis of the invariant vectors, along which a bias is learned; None for no bias.
        mass: the weight of the sum over the poses, by which weights are scaled at initialisation; by default ``order``.
    """

    invariants: Tensor

    def __init__(
        self,
        segments: Sequence[Segment],
        size: int,
        fields: int,
        order: int,
        *,
        groups: int = 1,
        kind: ProjectionKind = "group",
        invariants: np.ndarray | None = None,
        mass: int | None = None,
    ):
        super().__init__()
        self.kind = kind
        self.order = order
        self.groups = groups
        self.frames = Frames(segments) if kind == "group" else None
        width = size if self.frames is None else self.frames.width
        fan_in = fields * (order if mass is None else mass) * width / size if kind == "group" else fields
        self.irreps = Irreps.of(segments, fields, groups, invariants) if kind == "group" else None
        shape = (fields, width) if kind == "group" else (size // order, fields)
        self.weight = Parameter(torch.randn(shape) / math.sqrt(fan_in))
        self.bias: Parameter | None = None
        self._kept: Derived[Tensor] = Derived()
        self.by_field = False  # whether each of several fields of one size has a number for all its channels
        if invariants is not None and (number := invariants.shape[1]):
            self.register_exact("invariants", invariants)
            self.bias = Parameter(torch.zeros(number))
            self.by_field = np.array_equal(invariants, np.eye(number).repeat(size // number, axis=0))

    def of_rows(self, y: Tensor) -> Tensor:
        """The output ``(..., size)`` of rows ``(..., groups · |H| · fields // groups)``, by one product."""
        bias = None if self.bias is None else self._kept.of(self.bias, self.invariants.matmul, self.training)
        if self.frames is None:
            x = _pose_by_pose(y, self.order, self.weight)
            return x if bias is None else x + bias.to(x.dtype)
        return F.linear(y, self.frames.matrix(self.weight, self.groups).mT, bias)

    def forward(self, y: Tensor) -> Tensor:
        if self.irreps is not None and in_irreps(self.irreps, y, self.weight, math.prod(y.shape[1:-2])):
            return self.irreps.from_poses(y, self.weight, self.bias)
        if self.frames is None:
            weight = self.weight.T.unflatten(0, (self.groups, -1))
            x = grouped_linear_transpose(y, weight, self.bias if self.by_field else None).transpose(-1, -2).flatten(-2)
            return x if self.bias is None or self.by_field else x + (self.invariants @ self.bias).to(x.dtype)
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = bias.unsqueeze(1) if self.by_field else self.invariants @ bias
        of_poses = y.transpose(-1, -2) if self.groups == 1 else y
        weight, columns = self.frames.map(self.weight, self.groups)
        return grouped_linear_transpose(of_poses, weight, bias, columns)


class Scalars(Versioned):
    """The projection of scalars ``(B, N, size)`` to ``(groups, B, N, 1, fields // groups)``; see :class:`ToPoses`."""

    def __init__(self, size: int, fields: int, *, groups: int = 1, bias: int = 0, last_bias: tuple[int, int] = (0, 0)):
        super().__init__()
        self.groups = groups
        self.last_bias = last_bias
        self.weight = Parameter(torch.randn(fields, size) / math.sqrt(size))
        self.bias = _biases(bias, last_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.in_parts(x, 1)[0]

    def in_parts(self, x: Tensor, parts: int, side_by_side: bool | None = None) -> Sequence[Tensor]:
        """The output in so many parts, each of as many groups."""
        fields = len(self.weight) // self.groups
        weight = self.weight.view(self.groups, 1, fields, -1)
        bias = _by_group(self.bias, fields, self.last_bias)
        return grouped_linears(parts, x, weight, bias, None, side_by_side)


@dataclass(frozen=True, eq=False)
class GroupTables:
    """The tables of the group H that a layer needs.

    Attributes:
        inverse_action: ``(|H|, d, d)``; the matrix of the inverse of each element.
        quotient: ``(|H|, |H|)``; the index of h⁻¹ĥ.
        relative: ``(S, S, F)``; features of h⁻¹ĥ, for samples of a continuous group.
        log_measure: ``(S,)``; the logarithm of the measure of every pose of the keys; None where all are alike.
        opposite: ``(|H|,)``; the index of -h, where H has the inversion of space, between points.
        stabilizer: ``(|K|, d, d)``; the inverses of a subgroup whose cosets are the poses.
    """

    inverse_action: np.ndarray
    quotient: np.ndarray | None = None
    relative: np.ndarray | None = None
    log_measure: np.ndarray | None = None
    opposite: np.ndarray | None = None
    stabilizer: np.ndarray | None = None


@dataclass(frozen=True)
class AttentionMode:
    """Which poses attend to which, and how; a ValueError for an option or a dropout that is none."""

    query: QueryMode = "own"
    keys: KeyMode = "all"
    dropout: float = 0.0
    backend: str = "auto"
    shared_scores: bool = False
    normalization: Normalization = "softmax"

    def __post_init__(self) -> None:
        check_option("query", self.query, get_args(QueryMode))
        check_option("keys", self.keys, get_args(KeyMode))
        check_option("normalization", self.normalization, get_args(Normalization))
        check_probability("dropout", self.dropout)


class ScoredHeads(ExactBuffers):
    """M heads of C channels, with ``qk_norm`` and ``registers`` where there are some.

    Their output is multiplied by ``query_weight``, the measure of a query pose with ``query="all"``.
    """

    project_out: FromPoses
    num_heads: int
    qk_norm: QueryKeyNorm | None
    registers: Registers | None
    query_weight: float
    shared_scores: bool = False
    action_columns: Tensor
    relative: Tensor | None
    log_measure: Tensor | None
    stabilizer: Tensor | None

    @property
    def channels(self) -> int:
        """C, the channels of a head."""
        raise NotImplementedError

    @property
    def inverse_action(self) -> Tensor:
        """``(|H|, d, d)``; the matrix of the inverse of each element."""
        return self.action_columns.permute(1, 2, 0)

    def complete(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(M, B, N, P, C)``, normalised and with registers where there are some."""
        if self.qk_norm is not None:
            queries, keys = self.qk_norm(queries, keys)
        if self.registers is not None:
            keys, values = self.registers(keys, values)
        return queries, keys, values

    def project(self, y: Tensor) -> Tensor:
        """Rows of channels ``(B, N, out)`` of what heads give, ``(M, B, N, |H|, C)``."""
        if self.shared_scores:
            y = y.unflatten(-1, (len(self.inverse_action), -1)).squeeze(3)
        out: Tensor = self.project_out(y if self.query_weight == 1 else self.query_weight * y)
        return out

    def register_tables(self, tables: GroupTables) -> None:
        """Make the tables constants of the module, by their names."""
        # As frequencies of encodings are multiplied with it.
        self.register_exact("action_columns", tables.inverse_action.transpose(2, 0, 1))
        self.register_exact("quotient", tables.quotient)
        self.register_exact("relative", tables.relative)
        self.register_exact("log_measure", tables.log_measure)
        self.register_exact("stabilizer", tables.stabilizer)


class HeadModule(ScoredHeads):
    """Heads: the projection of features to queries, values and keys, and the encoding that reads them.

    Args:
        project_in: to C fields for each head and for each of queries, values and keys that is needed, in this order.
        project_out: from M · C regular fields to the output.
        encoding: a bound encoding or kernel, whose scores have these ``needs``.
        tables, mode: of the group; which poses attend to which, and how.
        query_weight: as in :class:`ScoredHeads`.
        transformation: by what the samples are transformed in training; None where they are fixed.
    """

    quotient: Tensor | None

    def __init__(
        self,
        project_in: ToPoses | Scalars,
        project_out: FromPoses,
        encoding: Encoding | PairKernel,
        needs: Needs,
        tables: GroupTables,
        mode: AttentionMode,
        *,
        query_weight: float = 1.0,
        transformation: RandomTransformation | None = None,
    ):
        super().__init__()
        # In this order: optimizers in checkpoints know parameters by their numbers.
        self.project_in = project_in
        self.project_out = project_out
        self.encoding: Any = encoding
        self.needs = needs
        self.num_heads = project_in.groups // len(needs.fields)
        self.qk_norm = self.registers = None
        self.query, self.keys, self.normalization = mode.query, mode.keys, mode.normalization
        self.dropout, self.backend, self.shared_scores = mode.dropout, mode.backend, mode.shared_scores
        self.query_weight, self.transformation = query_weight, transformation
        self.register_tables(tables)

    @property
    def channels(self) -> int:
        return len(self.project_in.weight) // self.project_in.groups

    @property
    def seen_encoding(self) -> Any:
        """The encoding, or its mean over the elements of a coset, where these are the poses."""
        return self.encoding if self.stabilizer is None else OverStabilizer(self.encoding, self.stabilizer)

    def to_heads(self, x: Tensor, side_by_side: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(M, B, N, P, C)`` of ``(B, *space, in)``; with registers, if there are any."""
        x = x.flatten(1, -2)
        made = self.project_in.in_parts(x, len(self.needs.fields), side_by_side)  # M, B, N, P, C of each
        fields = dict(zip(self.needs.fields, made, strict=True))
        values = fields["values"]
        # Queries that nobody reads only say how many there are.
        queries = fields["queries"] if self.needs.queries else values.detach()
        keys = fields["keys"] if self.needs.keys else values.new_ones(1).expand_as(values)
        if self.qk_norm is None and self.registers is None:
            return queries, keys, values
        return self.complete(queries, keys, values)


def in_one_pose(*vectors: Tensor) -> list[Tensor]:
    """The channels of all poses as those of a single one, whose score is the sum of theirs."""
    return [v.reshape(*v.shape[:3], 1, math.prod(v.shape[3:])) for v in vectors]


class PoseLinear(torch.nn.Module):
    """A projection to or from poses as a map of features ``(B, size, *space)``."""

    def __init__(self, projection: ToPoses | FromPoses, order: int):
        super().__init__()
        self.projection = projection
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        irreps, weight = self.projection.irreps, self.projection.weight
        in_rows = x.dim() == 2 and x.device.type not in launch.DEVICES and not needs_operators(x, weight)
        in_rows = in_rows and x.numel() <= SMALL
        if in_rows and (irreps is None or not in_irreps(irreps, x, weight, len(x))):
            return self.projection.of_rows(x)
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
        transformation = self.transformation if self.training else None
        if transformation is not None:
            element = transformation.draw()
            x = transformation.inputs(x, element, inverse=True)
        y = self.expand(x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1))
        y = self.contract(self.activation(y))
        y = y.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 2 else y.squeeze(1)
        return y if transformation is None else transformation.outputs(y, element)
