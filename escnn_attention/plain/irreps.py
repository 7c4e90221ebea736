r"""Equivariant maps to and from regular fields, computed in irreps.

By Schur's lemma an equivariant map mixes the copies of each irrep and nothing else. Let :math:`\rho` be an irrep of
size d that commutes with an algebra of dimension t (1, 2 or 4), and m = d/t its components over that algebra. A regular
field has d copies of it in this sense, so that a map from C to F regular fields costs
:math:`F C \sum_\rho m\,d^2` multiplications a position, where the weights of all poses cost :math:`F C |H|^2`: for
D4 3/16, for the octahedral group a ninth, for the icosahedral group a fifteenth. To and from irreps each field takes
a Fourier transform on the group.

Source: Nordström et al., "Octic Vision Transformers", 2025, for D4; Serre, "Linear Representations of Finite Groups",
Section 6.2, for the Fourier transform on a finite group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import Parameter

from escnn_attention.functional.autograd import PRECISE, exactly, is_followed
from escnn_attention.functional.irreps import Maps, run, tables, why_not_built
from escnn_attention.functional.matmul import of_one_precision
from escnn_attention.plain.buffers import Derived, ExactBuffers

_PER_NUMBER = 8
_PER_CALL = 9 * 2**20
"""What a number that is read or written and a call cost, in multiplications of a large product.

Measured on one core and on two in float32, forward and backward."""


class IrrepCopies(Protocol):
    """The copies of an irrep in a representation: see ``escnn_attention.groups.fibers.IrrepCopies``."""

    @property
    def reads(self) -> np.ndarray: ...
    @property
    def weights(self) -> np.ndarray: ...
    @property
    def poses(self) -> np.ndarray: ...


class Segment(Protocol):
    """How the channels of a representation look from every pose: ``escnn_attention.groups.fibers.FrameSegment``."""

    @property
    def columns(self) -> np.ndarray: ...
    @property
    def matrices(self) -> np.ndarray: ...
    @property
    def permutation(self) -> np.ndarray | None: ...
    @property
    def irreps(self) -> Sequence[IrrepCopies] | None: ...
    @property
    def factors(self) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None: ...


class Irreps(ExactBuffers):
    """The irreps of features, and of the F regular fields, in groups, that they are mapped to or from.

    ``invariants`` ``(size, k)`` are vectors along which a map to the features has a bias.

    Attributes:
        least: the number of positions from which irreps cost less.
        multiplications, expanded: what the map costs at a position, in irreps and by the weights of all poses.
    """

    least: float
    whole: Tensor
    numbers: Tensor
    invariants: Tensor | None

    def __init__(self, segments: Sequence[Segment], fields: int, groups: int = 1, invariants: np.ndarray | None = None):
        super().__init__()
        self.fields, self.groups = fields, groups
        self._kept: Derived[Tensor] = Derived()
        irreps = [segment.irreps or () for segment in segments]
        self.components = tuple(len(irrep.reads) for irrep in irreps[0])
        self.order = irreps[0][0].poses.shape[2]
        self._copies = [[irrep.weights.shape[:2] for irrep in of_segment] for of_segment in irreps]
        self._shapes = [segment.columns.shape for segment in segments]
        columns = np.concatenate([segment.columns.ravel() for segment in segments])
        self._size = len(columns)
        # The fields of one representation, side by side, are an axis of the channels.
        self._ordered = len(segments) == 1 and bool((columns == np.arange(len(columns))).all())
        # By irrep and component; within them the segments follow each other.
        numbers = [
            np.repeat([r * len(columns) + a for r, i in enumerate(irrep) for a, _ in np.ndindex(i.reads.shape[:2])], n)
            for irrep, (n, _) in zip(irreps, self._shapes, strict=True)
        ]
        rows = np.concatenate(numbers).argsort(kind="stable").argsort()
        start, transforms = 0, []
        for i, (segment, of_segment) in enumerate(zip(segments, irreps, strict=True)):
            number, size = segment.columns.shape
            self.register_exact(
                f"weights_{i}", np.concatenate([irrep.weights.reshape(-1, size) for irrep in of_segment])
            )
            self.register_exact(f"columns_{i}", segment.columns)
            assert segment.factors is not None
            transforms.append((segment.columns, rows[start : start + number * size], segment.factors[0]))
            start += number * size
        assert segments[0].factors is not None
        poses = segments[0].factors[1]
        copies = [d for _, d in self._copies[0]]
        sizes = list(zip(self.components, copies, self._numbers(), strict=True))
        whole, values = tables(self.order, fields, sizes, poses, transforms)
        self.register_exact("whole", whole)
        self.register_exact("numbers", values)
        self.register_exact("invariants", None)
        if invariants is not None:
            trivial = np.zeros((len(columns), self._numbers()[0]))
            start = 0
            for segment, (irrep, *_) in zip(segments, irreps, strict=True):
                for read in irrep.reads[0]:
                    for of_field in segment.columns:
                        trivial[of_field, start] = read
                        start += 1
            self.register_exact("invariants", np.linalg.lstsq(trivial, invariants, rcond=None)[0])
        self._count(poses, [factors for *_, factors in transforms])

    @classmethod
    def of(
        cls, segments: Sequence[Segment], fields: int, groups: int, invariants: np.ndarray | None = None
    ) -> Irreps | None:
        """The irreps where they save operations; None where they never pay."""
        if any(segment.irreps is None for segment in segments):
            return None
        irreps = cls(segments, fields, groups, invariants)
        return None if irreps.least == math.inf else irreps

    def _count(self, poses: Sequence[np.ndarray], reads: Sequence[Sequence[np.ndarray]]) -> None:
        """Count what it saves at each position, and costs in each call, in multiplications of a large product."""
        order, size = self.order, self._size

        def entries(factors: Sequence[np.ndarray]) -> int:
            return sum(np.count_nonzero(matrix) for matrix in factors)

        moved, weights = self.fields * order + size, 0
        self.multiplications = self.fields * entries(poses)
        self.expanded = self.fields * order * size
        for (number, n), copies, read in zip(self._shapes, self._copies, reads, strict=True):
            self.multiplications += number * entries(read)
            for m, (k, d) in zip(self.components, copies, strict=True):
                self.multiplications += m * self.fields * d * number * k
                weights += self.fields * number * n * k * d
        saved = self.expanded - self.multiplications - _PER_NUMBER * moved
        self.least = (weights + _PER_CALL) / saved if saved > 0 else math.inf

    def serve(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the loop can compute the map: on CPUs, and not in programs."""
        if x.device.type != "cpu" or x.dtype not in PRECISE or is_followed(x, weight):
            return False
        return not why_not_built(PRECISE[x.dtype])

    def to_poses(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int = 1, side_by_side: bool = False
    ) -> Sequence[Tensor]:
        """Regular fields ``(groups, B, N, H, F // groups)`` of ``(B, N, size)``, in so many parts of the groups.

        Args:
            x: ``(B, N, size)``.
            weight: that of a pose, ``(F, size)``.
            bias: that of the first groups, ``(groups', 1, F // groups)``.
            parts: their number.
            side_by_side: whether the positions of an image are to lie side by side in memory.
        """
        if bias is not None:
            bias = F.pad(bias.flatten(), (0, self.fields - bias.numel())) * math.sqrt(self.order)
        return self._map(x, weight, bias, parts, side_by_side)

    def from_poses(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Features of regular fields, with a bias ``(k,)`` of the invariants: the transpose of :meth:`to_poses`."""
        if bias is not None:
            assert self.invariants is not None
            bias = self.invariants.to(bias.dtype) @ bias
        return self._map(y, weight, bias, 0, False)[0]

    def _map(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, side_by_side: bool
    ) -> tuple[Tensor, ...]:
        # The loop would read memory that is not there.
        groups, size = self.groups, (self.order, self.fields // self.groups)
        if parts and (x.dim() != 3 or x.shape[2] != self._size):
            raise ValueError(f"x: got features {tuple(x.shape)}, needed (B, N, {self._size})")
        if not parts and (x.dim() != 5 or x.shape[0] != groups or x.shape[3:] != size):
            raise ValueError(f"y: got regular fields {tuple(x.shape)}, needed ({groups}, B, N, {size[0]}, {size[1]})")
        x, weight = of_one_precision(x, weight)
        bias = None if bias is None else bias.to(x.dtype)
        if torch.is_grad_enabled():
            found: tuple[Tensor, ...] = _Map.apply(self, parts, side_by_side, bias, weight, x)
            return found
        return self.compute([x], bias, self._kept.of(weight, self.weights, self.training), parts, side_by_side)

    def _maps(self, weights: Tensor) -> Maps:
        dtype = weights.dtype
        return Maps(self.whole, self._precise("numbers", dtype), weights, self.groups)

    def _precise(self, name: str, dtype: torch.dtype) -> Tensor:
        """A constant in the precision of sums."""
        rounded: Tensor = getattr(self, name)
        return rounded if rounded.dtype == dtype else self._exact[name].to(dtype)

    def compute(
        self, given: Sequence[Tensor], bias: Tensor | None, weights: Tensor, parts: int, side_by_side: bool
    ) -> tuple[Tensor, ...]:
        """Regular fields of features in so many parts; with none, features of the parts of regular fields."""
        maps, read = self._maps(weights), [_readable(t, 0 if parts else 1) for t in given]
        bias = None if bias is None else bias.to(maps.weights.dtype)
        if parts:
            made = [self._room_of_fields(read[0], parts, side_by_side) for _ in range(parts)]
            run(maps, features=read[0], bias=bias, made_fields=made)
        else:
            made = [self._room_of_features(read[0])]
            run(maps, fields=read, bias=bias, made_features=made[0])
        return tuple(y.to(given[0].dtype) for y in made)

    def differentiate(
        self, grads: Sequence[Tensor], given: Sequence[Tensor], weights: Tensor, to_fields: bool, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The needed gradients: of the bias of the trivial irrep, of a pose's weights, and of what was given."""
        maps = self._maps(weights)
        features = _readable((given if to_fields else grads)[0], 0)
        fields = [_readable(y, 1) for y in (grads if to_fields else given)]
        of_bias = features.new_empty(self.fields if to_fields else self._numbers()[0]) if needed[0] else None
        of_weights = torch.empty_like(maps.weights) if needed[1] else None
        wanted = any(needed[2:])
        of_features = torch.empty_like(features) if wanted and to_fields else None
        of_fields = [torch.empty_like(y) for y in fields] if wanted and not to_fields else []
        of_parameters = of_weights, of_bias
        run(maps, features, fields, None, of_features, of_fields, of_parameters, bias_of_fields=to_fields)
        with exactly(features.device.type):
            of_weight = None if of_weights is None else self._of_pose(of_weights)
        of_given: list[Tensor | None] = [*of_fields] or [of_features] * len(given)
        found = [of_bias, of_weight, *of_given]
        return [None if t is None else t.to(given[0].dtype) for t in found]

    def _room_of_fields(self, x: Tensor, parts: int, side_by_side: bool) -> Tensor:
        """Room for the regular fields of a part: heads by position, if not asked otherwise.

        A single group is a hidden layer. It has its positions side by side, which takes less time, and the map back
        follows position by position.
        """
        images, number, groups, order = *x.shape[:2], self.groups // parts, self.order
        channels = self.fields // self.groups
        if side_by_side and number > 1:
            return x.new_empty(images, groups, order, channels, number).permute(1, 0, 4, 2, 3)
        if self.groups > 1 or (images > 1 and x.stride(2) != 1 and _is_one_line(x, 0)):
            return x.new_empty(images, number, groups, channels, order).permute(2, 0, 1, 4, 3)
        if x.stride(2) == 1:
            return x.new_empty(1, channels, order, images, number).permute(0, 3, 4, 2, 1)
        return x.new_empty(images, 1, channels, order, number).permute(1, 0, 4, 3, 2)

    def _room_of_features(self, y: Tensor) -> Tensor:
        """Room for features, by channel where the positions of each image of ``y`` lie side by side."""
        _, images, number, *_ = y.shape
        if y.stride(2) == 1 and (images == 1 or y.stride(1) != number):
            return y.new_empty(images, self._size, number).transpose(1, 2)
        return y.new_empty(images, number, self._size)

    def _numbers(self) -> list[int]:
        """How often each irrep stands in the features."""
        copies = [[n * k for k, _ in c] for (n, _), c in zip(self._shapes, self._copies, strict=True)]
        return [sum(of_irrep) for of_irrep in zip(*copies, strict=True)]

    def _by_irrep(self, weights: Tensor) -> list[Tensor]:
        """The weights ``(d, F, K)`` of each irrep."""
        sizes = [(c[1], self.fields, k) for c, k in zip(self._copies[0], self._numbers(), strict=True)]
        return [w.view(size) for w, size in zip(weights.split([math.prod(s) for s in sizes]), sizes, strict=True)]

    def weights(self, weight: Tensor) -> Tensor:
        """The weights of each irrep, ``(d, F, K)``, one after the other, of those of a pose ``(F, size)``.

        They are in the precision of sums.
        """
        weight = weight.to(PRECISE[weight.dtype])
        parts: list[list[Tensor]] = [[] for _ in self.components]
        for i, ((number, size), copies) in enumerate(zip(self._shapes, self._copies, strict=True)):
            part = weight if self._ordered else weight.index_select(1, getattr(self, f"columns_{i}").flatten())
            with exactly(weight.device.type):
                found = part.reshape(-1, size) @ self._precise(f"weights_{i}", weight.dtype).T
            split = found.view(self.fields, number, -1).split([k * d for k, d in copies], 2)
            for of_irrep, one, (k, d) in zip(parts, split, copies, strict=True):
                of_irrep.append(one.unflatten(2, (k, d)).permute(3, 0, 2, 1).flatten(2))
        together = [of_irrep[0] if len(of_irrep) == 1 else torch.cat(of_irrep, 2) for of_irrep in parts]
        return torch.cat([of_irrep.flatten() for of_irrep in together])

    def _of_pose(self, gradients: Tensor) -> Tensor:
        """The gradients of a pose's weights ``(F, size)``: the transpose of :meth:`weights`."""
        of_irreps = self._by_irrep(gradients)
        out = None if self._ordered else gradients.new_empty(self.fields, self._size)
        firsts = [0] * len(of_irreps)
        for i, ((number, _), copies) in enumerate(zip(self._shapes, self._copies, strict=True)):
            found = []
            for r, (k, _) in enumerate(copies):
                of_segment = of_irreps[r][:, :, firsts[r] : firsts[r] + k * number]
                firsts[r] += k * number
                found.append(of_segment.unflatten(2, (k, number)).permute(1, 3, 2, 0).flatten(2))
            part = torch.cat(found, 2).flatten(0, 1) @ self._precise(f"weights_{i}", gradients.dtype)
            if out is None:
                return part.view(self.fields, self._size)
            out[:, getattr(self, f"columns_{i}").flatten()] = part.view(self.fields, -1)
        assert out is not None
        return out


# Of fewer positions side by side images are copied to rows.
_MANY_POSITIONS = 64


def _readable(x: Tensor, axis: int) -> Tensor:
    """Features ``(B, N, size)`` or regular fields ``(G, B, N, H, C)`` in the precision of sums, as the loop reads them.

    They are copied, position by position, if no axis is side by side in memory, or few positions of each image are.
    """
    x = x.to(PRECISE[x.dtype])
    number = x.shape[axis + 1]
    apart = not _is_one_line(x, axis) and number < _MANY_POSITIONS
    if not apart and 1 in x.stride()[axis + 1 :]:
        return x
    if not axis:
        return x.contiguous()
    return x.new_empty([x.shape[i] for i in (1, 2, 0, 4, 3)]).permute(2, 0, 1, 4, 3).copy_(x)


def _is_one_line(x: Tensor, axis: int) -> bool:
    """Whether the positions of all images, the axis and the next, are an axis of a view."""
    images, number = x.shape[axis : axis + 2]
    return images <= 1 or number == 1 or x.stride(axis) == number * x.stride(axis + 1)


class _Map(torch.autograd.Function):
    """The map of features or its transpose.

    Its gradients have the layout of what was given; autograd would copy gradients of views.
    """

    @staticmethod
    def forward(
        ctx: Any, irreps: Irreps, parts: int, side_by_side: bool, bias: Tensor | None, weight: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.irreps, ctx.parts = irreps, parts
        weights = irreps.weights(weight)
        ctx.save_for_backward(weight, weights, *given)
        found = irreps.compute(given, bias, weights, parts, side_by_side)
        return tuple(t if is_legacy_batchedtensor(t) else t.data for t in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        irreps, parts, needed = ctx.irreps, ctx.parts, ctx.needs_input_grad[3:]
        weight, weights, *given = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, None, None, *irreps.differentiate(grads, given, weights, bool(parts), needed))
        found: list[Tensor | None] = [None] * len(needed)
        if any(needed[:2]):
            features, fields = (given, grads) if parts else (grads, given)
            both = _Gradients.apply(irreps, bool(parts), weights, *features, *fields)
            found[:2] = [t if need else None for t, need in zip(both, needed[:2], strict=True)]
        if any(needed[2:]):
            found[2:] = _Map.apply(irreps, 0 if parts else len(given), given[0].stride(2) == 1, None, weight, *grads)
        return (None, None, None, *found)


class _Gradients(torch.autograd.Function):
    """The gradients of the bias and of a pose's weights, which are linear in the features and in the fields.

    The gradients of the features and fields are maps: the incoming gradients are their bias and weights.
    """

    @staticmethod
    def forward(
        ctx: Any, irreps: Irreps, to_fields: bool, weights: Tensor, features: Tensor, *fields: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.irreps, ctx.to_fields = irreps, to_fields
        ctx.save_for_backward(features, *fields)
        grads, given = (fields, [features]) if to_fields else ([features], fields)
        return tuple(irreps.differentiate(grads, given, weights, to_fields, [True, True])[:2])

    @staticmethod
    def backward(ctx: Any, bias: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        irreps, (features, *fields) = ctx.irreps, ctx.saved_tensors
        of_fields, of_features = (bias, None) if ctx.to_fields else (None, bias)
        (back,) = _Map.apply(irreps, 0, False, of_features, weight, *fields)
        there = _Map.apply(irreps, len(fields), fields[0].stride(2) == 1, of_fields, weight, features)
        return (None, None, None, back, *there)


class Isotypic(NamedTuple):
    """Where an irrep of size d occurs: ``(m, d, in)`` and ``(out, n, d)``, and its endomorphisms ``(k, d, d)``."""

    source: np.ndarray
    target: np.ndarray
    endomorphisms: np.ndarray


class FieldLinear(ExactBuffers):
    """A linear map of ``(B, in, *space)`` that mixes the copies of each irrep, with a bias along the invariants."""

    invariants: Tensor

    def __init__(self, parts: Sequence[Isotypic], out: int, invariants: np.ndarray | None):
        super().__init__()
        self.out = out
        self.weights = torch.nn.ParameterList()
        for i, (source, target, endomorphisms) in enumerate(parts):
            for name, value in (("source", source), ("target", target), ("endomorphisms", endomorphisms)):
                self.register_exact(f"{name}_{i}", value)
            shape = (target.shape[1], source.shape[0], len(endomorphisms))
            self.weights.append(Parameter(torch.randn(shape) / math.sqrt(shape[1] * shape[2])))
        self.bias: Parameter | None = None
        if invariants is not None and invariants.shape[1]:
            self.register_exact("invariants", invariants)
            self.bias = Parameter(torch.zeros(invariants.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self.out, *x.shape[2:])
        for i, weight in enumerate(self.weights):
            source, target = getattr(self, f"source_{i}"), getattr(self, f"target_{i}")
            mixed = torch.einsum("nmk,kde,mei->ndi", weight, getattr(self, f"endomorphisms_{i}"), source)
            y = y + torch.einsum("ond,ndi,bi...->bo...", target, mixed, x)
        if self.bias is not None:
            y = y + (self.invariants @ self.bias).to(y.dtype).view(-1, *[1] * (x.dim() - 2))
        return y
