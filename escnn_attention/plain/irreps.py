r"""Equivariant maps to and from regular fields, computed in irreps.

By Schur's lemma an equivariant map mixes the copies of each irrep and nothing else. Let :math:`\rho` be an irrep of
size d that commutes with an algebra of dimension t (1, 2 or 4), and m = d/t its components over that algebra. A regular
field has d copies of it in this sense, so that a map from C to F regular fields costs
:math:`F C \sum_\rho m\,d^2` multiplications a position, where the weights of all poses cost :math:`F C |H|^2`: for
D4 3/16, for the octahedral group a ninth, for the icosahedral group a fifteenth. To and from irreps it takes one
product with a :math:`|H| \times |H|` matrix a field.

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
from torch.nn import Parameter

from escnn_attention.functional import launch
from escnn_attention.functional.autograd import PRECISE, needs_operators
from escnn_attention.functional.irreps import Copies, are_matrices, as_matrices, transform
from escnn_attention.functional.matmul import of_one_precision
from escnn_attention.plain.buffers import Derived, ExactBuffers

_PER_NUMBER = 24
_PER_PRODUCT = 2**20
"""What a number moved between layouts and a call of a product cost, in multiplications of a large product.

Measured on one core of a processor with AVX-512 in float32, forward and backward: the layouts and 10 µs a call. Weights
of all poses give positions side by side without moving them."""


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


class Irreps(ExactBuffers):
    """The irreps of features, and of the F regular fields, in groups, that they are mapped to or from.

    ``invariants`` ``(size, k)`` are vectors along which a map to the features has a bias.
    """

    poses: Tensor
    reads_0: Tensor
    order: Tensor | None
    back: Tensor | None
    places: Tensor | None
    invariants: Tensor | None

    def __init__(self, segments: Sequence[Segment], fields: int, groups: int = 1, invariants: np.ndarray | None = None):
        super().__init__()
        self.fields, self.groups = fields, groups
        self._kept: Derived[list[Tensor]] = Derived()
        irreps = [segment.irreps or () for segment in segments]
        self.components = tuple(len(irrep.reads) for irrep in irreps[0])
        self.register_exact("poses", np.concatenate([i.poses.reshape(-1, i.poses.shape[2]) for i in irreps[0]]))
        self._copies = [[irrep.weights.shape[:2] for irrep in of_segment] for of_segment in irreps]
        self._shapes = [segment.columns.shape for segment in segments]
        self._size = sum(segment.columns.size for segment in segments)
        for i, ((_, size), of_segment) in enumerate(zip(self._shapes, irreps, strict=True)):
            self.register_exact(f"reads_{i}", np.concatenate([irrep.reads.reshape(-1, size) for irrep in of_segment]))
            self.register_exact(
                f"weights_{i}", np.concatenate([irrep.weights.reshape(-1, size) for irrep in of_segment])
            )
            self.register_exact(f"columns_{i}", segments[i].columns)
        columns = np.concatenate([segment.columns.ravel() for segment in segments])
        # The fields of one representation, side by side, are an axis of the channels.
        one = len(segments) == 1
        self._ordered = one and bool((columns == np.arange(len(columns))).all())
        # By irrep and component; within them the segments follow each other.
        numbers = [
            np.repeat([r * len(columns) + a for r, i in enumerate(irrep) for a, _ in np.ndindex(i.reads.shape[:2])], n)
            for irrep, (n, _) in zip(irreps, self._shapes, strict=True)
        ]
        order = np.concatenate(numbers).argsort(kind="stable")
        tables = {"order": None if one else order, "back": None if one else order.argsort()}
        tables["places"] = None if self._ordered else columns.argsort()
        for name, table in tables.items():
            self.register_exact(name, table)
        self.register_exact("invariants", None)
        if invariants is not None:
            trivial = np.zeros(
                (len(columns), sum(n * c[0][0] for (n, _), c in zip(self._shapes, self._copies, strict=True)))
            )
            start = 0
            for segment, (irrep, *_) in zip(segments, irreps, strict=True):
                for read in irrep.reads[0]:
                    for of_field in segment.columns:
                        trivial[of_field, start] = read
                        start += 1
            self.register_exact("invariants", np.linalg.lstsq(trivial, invariants, rcond=None)[0])
        self._count()

    @classmethod
    def of(
        cls, segments: Sequence[Segment], fields: int, groups: int, invariants: np.ndarray | None = None
    ) -> Irreps | None:
        """The irreps where they save operations; None where they never pay."""
        if any(segment.irreps is None for segment in segments):
            return None
        irreps = cls(segments, fields, groups, invariants)
        return irreps if irreps._saved > 0 else None

    def _count(self) -> None:
        """What it saves at each position, and costs in each call, in multiplications of a large product."""
        order, size = self.poses.shape[0], self._size
        dense = self.fields * order * size
        moved = self.fields * order * (order + _PER_NUMBER) + sum(c * n * (n + _PER_NUMBER) for c, n in self._shapes)
        products, weights = 0, 0
        for (number, n), copies in zip(self._shapes, self._copies, strict=True):
            for m, (k, d) in zip(self.components, copies, strict=True):
                products += m * self.fields * d * number * k
                weights += self.fields * number * n * k * d
        calls = 8 + (order if self.groups > 1 else sum(self.components)) + len(self.components) * len(self._shapes)
        self._saved, self._overhead = dense - moved - products, weights + _PER_PRODUCT * calls

    def pays(self, x: Tensor, weight: Tensor, number: int) -> bool:
        """Whether irreps cost less at so many positions, on CPUs.

        A program holds no decision that depends on a size.
        """
        if x.device.type in launch.DEVICES or torch.compiler.is_compiling() or needs_operators(x, weight):
            return False
        return number * self._saved > self._overhead

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
            bias = F.pad(bias.flatten(), (0, self.fields - bias.numel())) * math.sqrt(len(self.poses))
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
        x, weight = of_one_precision(x, weight)
        bias = None if bias is None else bias.to(x.dtype)
        weights = self._kept.of(weight, self._weights, self.training)
        if torch.is_grad_enabled():
            found: tuple[Tensor, ...] = _Map.apply(self, parts, side_by_side, x, bias, *weights)
            return found
        return self.compute(x, bias, weights, parts, side_by_side)

    def compute(
        self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor], parts: int, side_by_side: bool
    ) -> tuple[Tensor, ...]:
        """Regular fields of features in so many parts; with none, features of regular fields."""
        of_parts, bias = _by_part(weights, parts), None if bias is None else bias.unsqueeze(1)
        if not parts:
            y = _readable_fields(x)
            found = self._room_of_features(y)
            lines = _lines([found], [y])
            copies, room = self._room(found, len(lines[0][0][0]), 1)
            for (features,), (fields,) in lines:
                copies.read(fields)
                copies.map_to(self._split(room), of_parts[0], True)
                if bias is not None:
                    self._split(room)[0].add_(bias)
                self._synthesise(room, features)
            return (found,)
        x = _readable(x)
        made = [self._room_of_fields(x, parts, side_by_side) for _ in range(parts)]
        lines = _lines([x], made)
        copies, room = self._room(x, len(lines[0][0][0]), parts)
        biases = [None] * parts if bias is None else bias.chunk(parts)
        for (features,), parts_of_line in lines:
            seen = self._analyse(features, room)
            for fields, of_part, of_bias in zip(parts_of_line, of_parts, biases, strict=True):
                copies.map_from(seen, of_part, of_bias)
                copies.write(fields)
        return tuple(made)

    def differentiate(
        self, grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], parts: int
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The gradients of the input, of the bias of the trivial irrep, and of the weights of each irrep."""
        features = _readable(x if parts else grads[0])
        fields = [_readable_fields(y) for y in (grads if parts else (x,))]
        out = torch.empty_like(features) if parts else _room_like(fields[0])
        lines = _lines([features, out], fields) if parts else _lines([features], [*fields, out])
        copies, room = self._room(features, len(lines[0][0][0]), max(1, parts))
        of_parts, found = _by_part(weights, parts), torch.empty_like(room)
        exact = PRECISE[room.dtype]
        sums = [
            [room.new_zeros(m, *w.shape, dtype=exact) for m, w in zip(self.components, ws, strict=True)]
            for ws in of_parts
        ]
        of_bias = room.new_zeros(len(sums), copies.room.shape[1] if parts else sums[0][0].shape[2], dtype=exact)
        for of_features, of_fields in lines:
            seen = self._analyse(of_features[0], room)
            for i, (of_part, of_sums) in enumerate(zip(of_parts, sums, strict=True)):
                copies.read(of_fields[i])
                copies.add_weight_gradients(seen, of_sums)
                of_bias[i] += (copies.room if parts else seen[0])[0].sum(1, dtype=exact)
                if parts:
                    copies.map_to(self._split(found), of_part, i == 0)
            if parts:
                self._synthesise(found, of_features[1])
            else:
                copies.map_from(seen, of_parts[0], None)
                copies.write(of_fields[1])
        of_irreps = zip(*sums, strict=True)
        of_weights = [
            torch.cat([part.sum(0).view(len(w), -1, w.shape[2]) for part in of_irrep], 1).to(w.dtype)
            for w, of_irrep in zip(weights, of_irreps, strict=True)
        ]
        return out, of_bias.flatten().to(room.dtype), of_weights

    def plainly(self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor], parts: int) -> Tensor:
        """:meth:`compute` by operations that autograd looks through, all parts in one."""
        with torch.no_grad():
            eye = torch.eye(self._size, dtype=x.dtype)
            matrix = torch.cat([part.flatten(0, 1) for part in self._analyse(eye, torch.empty_like(eye))])
        poses = self.poses.to(x.dtype)
        if parts:
            seen = self._split(matrix @ x.flatten(0, 1).T)
            y = torch.cat([torch.einsum("mkn,dfk->mdfn", *p).flatten(0, 1) for p in zip(seen, weights, strict=True)])
            y = y if bias is None else torch.cat([y[:1] + bias[:, None], y[1:]])
            fields = torch.einsum("ih,ifn->nhf", poses, y).unflatten(2, (self.groups, -1))
            return fields.unflatten(0, x.shape[:2]).movedim(3, 0)
        y = torch.einsum("ih,gbnhc->igcbn", poses, x).flatten(3).flatten(1, 2)
        split = y.split([m * len(w) for m, w in zip(self.components, weights, strict=True)])
        found = [
            torch.einsum("mdfn,dfk->mkn", part.unflatten(0, (-1, len(w))), w)
            for part, w in zip(split, weights, strict=True)
        ]
        found = found if bias is None else [found[0] + bias[:, None], *found[1:]]
        return (matrix.T @ torch.cat([part.flatten(0, 1) for part in found])).T.unflatten(0, x.shape[1:3])

    def _room(self, like: Tensor, number: int, parts: int) -> tuple[Copies, Tensor]:
        """Room for the regular fields of a part and for features in irreps, at so many positions."""
        sizes = [(m, d) for m, (_, d) in zip(self.components, self._copies[0], strict=True)]
        copies = Copies(self.poses.to(like.dtype), sizes, self.fields // parts, number)
        return copies, like.new_empty(self._size, number)

    def _room_of_fields(self, x: Tensor, parts: int, side_by_side: bool) -> Tensor:
        """Room for the regular fields of a part: heads by position, if not asked otherwise.

        A single group is a hidden layer. It has its positions side by side, which takes less time, and the map back
        follows position by position.
        """
        images, number, groups, order = *x.shape[:2], self.groups // parts, len(self.poses)
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

    def _analyse(self, x: Tensor, room: Tensor) -> list[Tensor]:
        """The irreps ``(m, K, N)`` of features ``(N, size)``, which are written to the room if these have one type."""
        start, x = 0, x.T if self._ordered else x.T.contiguous()  # Of two axes torch makes the transpose in tiles.
        for i, (number, size) in enumerate(self._shapes):
            of_segment = x if self._ordered else x.index_select(0, getattr(self, f"columns_{i}").flatten())
            found = room[start : start + number * size].view(size, number, -1).transpose(0, 1)
            transform(getattr(self, f"reads_{i}").to(x.dtype), of_segment.unflatten(0, (number, size)), found)
            start += number * size
        return self._split(room if self.order is None else room.index_select(0, self.order))

    def _synthesise(self, room: Tensor, out: Tensor) -> None:
        """Write features ``(N, size)`` of their irreps, the transpose of :meth:`_analyse`."""
        room = room if self.back is None else room.index_select(0, self.back)
        start, y = 0, out.T if self._ordered else torch.empty_like(room)
        for i, (number, size) in enumerate(self._shapes):
            part = slice(start, start + number * size)
            seen = room[part].view(size, number, -1).transpose(0, 1)
            transform(getattr(self, f"reads_{i}").to(y.dtype).T, seen, y[part].unflatten(0, (number, size)))
            start += number * size
        if self.places is not None:
            out.T.copy_(y.index_select(0, self.places))

    def _split(self, found: Tensor) -> list[Tensor]:
        """Components and copies ``(m, K, N)`` of each irrep, of ``(size, N)``."""
        copies = [
            sum(c[r][0] * n for (n, _), c in zip(self._shapes, self._copies, strict=True))
            for r in range(len(self.components))
        ]
        parts = found.split([m * k for m, k in zip(self.components, copies, strict=True)])
        return [part.unflatten(0, (m, k)) for part, m, k in zip(parts, self.components, copies, strict=True)]

    def _weights(self, weight: Tensor) -> list[Tensor]:
        """The weights of each irrep, ``(d, F, K)``, of those of a pose ``(F, size)``."""
        parts: list[list[Tensor]] = [[] for _ in self.components]
        for i, ((number, size), copies) in enumerate(zip(self._shapes, self._copies, strict=True)):
            part = weight if self._ordered else weight.index_select(1, getattr(self, f"columns_{i}").flatten())
            found = part.view(-1, size) @ getattr(self, f"weights_{i}").to(weight.dtype).T
            split = found.view(self.fields, number, -1).split([k * d for k, d in copies], 2)
            for of_irrep, one, (k, d) in zip(parts, split, copies, strict=True):
                of_irrep.append(one.unflatten(2, (k, d)).permute(3, 0, 2, 1).flatten(2))
        return [of_irrep[0] if len(of_irrep) == 1 else torch.cat(of_irrep, 2) for of_irrep in parts]


# Of fewer positions side by side images are copied to rows.
_MANY_POSITIONS = 64


def _lines(x: Sequence[Tensor], y: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Features ``(B, N, size)`` and regular fields ``(G, B, N, H, C)`` of all positions, or of each image.

    There are features ``(N, size)``, and fields as :func:`as_matrices` has them.
    """
    if all(_is_one_line(t, 0) for t in x) and all(_is_one_line(t, 1) for t in y):
        lines = [([t.flatten(0, 1) for t in x], [t.flatten(1, 2) for t in y])]
    else:
        lines = [([t[i] for t in x], [t[:, i] for t in y]) for i in range(len(x[0]))]
    return [(of_x, [as_matrices(t) for t in of_y]) for of_x, of_y in lines]


def _is_one_line(x: Tensor, axis: int) -> bool:
    """Whether the positions of all images, the axis and the next, are an axis of a view."""
    images, number = x.shape[axis : axis + 2]
    return images <= 1 or number == 1 or x.stride(axis) == number * x.stride(axis + 1)


def _readable(x: Tensor) -> Tensor:
    """Features ``(B, N, size)``, copied if products cannot read them."""
    apart = not _is_one_line(x, 0) and x.shape[1] < _MANY_POSITIONS
    return x.contiguous() if apart or 1 not in x.stride()[1:] else x


def _readable_fields(y: Tensor) -> Tensor:
    """Regular fields ``(G, B, N, H, C)``, copied if products cannot read them."""
    apart = not _is_one_line(y, 1) and y.shape[2] < _MANY_POSITIONS
    return _new_rows(y).copy_(y) if apart or not are_matrices(_a_line(y)) else y


def _room_like(y: Tensor) -> Tensor:
    """Room for regular fields, in the layout of ``y`` if that is without gaps."""
    room = torch.empty_like(y)
    return room if are_matrices(_a_line(room)) else _new_rows(y)


def _a_line(y: Tensor) -> Tensor:
    """Regular fields of all positions, or of an image."""
    return y.flatten(1, 2) if _is_one_line(y, 1) else y[:, 0]


def _new_rows(y: Tensor) -> Tensor:
    """Room for regular fields ``(G, B, N, H, C)`` of one position after the other, field by field."""
    return y.new_empty([y.shape[i] for i in (1, 2, 0, 4, 3)]).permute(2, 0, 1, 4, 3)


def _by_part(weights: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """The weights ``(d F, K)`` of each irrep, of so many parts of the fields."""
    of_parts = zip(*(w.chunk(max(1, parts), 1) for w in weights), strict=True)
    return [[w.flatten(0, 1) for w in of_part] for of_part in of_parts]


class _Map(torch.autograd.Function):
    """The map and its transpose, with gradients in the layout of their input: of views autograd would copy them."""

    @staticmethod
    def forward(ctx: Any, irreps: Irreps, parts: int, side_by_side: bool, x: Tensor, *arguments: Tensor) -> Any:
        ctx.irreps, ctx.parts = irreps, parts
        ctx.save_for_backward(x, *arguments)
        bias, *weights = arguments
        return irreps.compute(x, bias, weights, parts, side_by_side)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        irreps, parts, needed = ctx.irreps, ctx.parts, ctx.needs_input_grad[3:]
        x, bias, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [t for t, need in zip((x, bias, *weights), needed, strict=True) if need]
            y = irreps.plainly(x, bias, weights, parts)
            found = iter(torch.autograd.grad(y, wanted, torch.cat(grads), create_graph=True))
            return (None, None, None, *(next(found) if need else None for need in needed))
        of_x, of_bias, of_weights = irreps.differentiate(grads, x, weights, parts)
        return None, None, None, of_x, of_bias if needed[1] else None, *of_weights


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
