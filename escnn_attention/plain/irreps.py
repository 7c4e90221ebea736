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
from escnn_attention.functional.autograd import needs_operators
from escnn_attention.functional.irreps import (
    Images,
    by_image,
    from_copies,
    from_copies_plainly,
    to_copies,
    to_copies_plainly,
    weight_gradients,
)
from escnn_attention.functional.matmul import of_one_precision
from escnn_attention.plain.buffers import Derived, ExactBuffers

_PER_NUMBER = 24
_PER_NUMBER_ACROSS = 240
_PER_PRODUCT = 2**20
"""What a number moved between layouts, one of poses whose positions lie side by side, and a call of a product cost, in
multiplications of a large product.

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
        # Whether the channels of a pose of a head fill a cache line, and may be far from those of the next pose.
        self._wide = groups > 1 and fields // groups >= 16
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
        columns = np.concatenate([segment.columns.T.ravel() for segment in segments])
        # The fields of one representation, side by side, are an axis of the channels.
        one = len(segments) == 1
        self._ordered = one and bool((segments[0].columns.ravel() == np.arange(len(columns))).all())
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

    def pays(self, x: Tensor, weight: Tensor, number: int, across: bool = False) -> bool:
        """Whether irreps cost less at so many positions, on CPUs; ``across``: the heads of a position lie side by side.

        A program holds no decision that depends on a size.
        """
        if x.device.type in launch.DEVICES or torch.compiler.is_compiling() or needs_operators(x, weight):
            return False
        moved = (_PER_NUMBER_ACROSS - _PER_NUMBER) * self.fields * len(self.poses) if across else 0
        return number * (self._saved - moved) > self._overhead

    def to_poses(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Regular fields ``(groups, ..., H, F // groups)`` of ``(..., size)``, by weights ``(F, size)`` of a pose."""
        return self._map(x, weight, bias, False)

    def to_images(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Sequence[Tensor]:
        """:meth:`to_poses` of ``(B, N, size)`` in so many parts, with the positions of an image side by side."""
        found: Sequence[Tensor] = self._map(x, weight, bias, False, of_images=parts)
        return found

    def from_poses(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Features of regular fields, with a bias ``(k,)`` of the invariants: :meth:`to_poses` backwards."""
        return self._map(y, weight, bias, True)

    def from_images(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """:meth:`from_poses` of ``(groups, B, N, H, F // groups)`` with the positions of an image side by side."""
        return self._map(y, weight, bias, True, of_images=1)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, of_images: int = 0) -> Any:
        x, weight = of_one_precision(x, weight)
        if bias is not None and transposed:
            assert self.invariants is not None
            bias = self.invariants.to(x.dtype) @ bias.to(x.dtype)
        elif bias is not None:
            bias = F.pad(bias.flatten(), (0, self.fields - bias.numel())).to(x.dtype) * math.sqrt(len(self.poses))
        weights = self._kept.of(weight, self._weights, self.training)
        if torch.is_grad_enabled():
            return _Map.apply(self, transposed, of_images, x, bias, *weights)
        if of_images:
            return self.compute_images(x, bias, weights, transposed, of_images)
        return self.compute(x, bias, weights, transposed)[0]

    def compute(
        self,
        x: Tensor,
        bias: Tensor | None,
        weights: Sequence[Tensor],
        transposed: bool,
        like: Tensor | None = None,
        plainly: bool = False,
    ) -> tuple[Tensor, Any]:
        """The map or its transpose; and its input in irreps.

        The output lies in memory as ``like``, or the input; ``plainly`` takes operations that autograd follows.
        """
        rows = self._by_position(x, transposed) if like is None else self._by_position(like, not transposed)
        if not transposed:
            by_position, seen = rows or self.groups > 1, self._analyse(x)
            y = (to_copies_plainly if plainly else to_copies)(seen, weights, by_position)
            if bias is not None:
                of_trivial = bias if by_position else bias[:, None]
                y = torch.cat([y[:1] + of_trivial, y[1:]]) if plainly else y
                if not plainly:
                    y[0] += of_trivial
            return self._synthesise_poses(y, x.shape[:-1], rows), seen
        by_position, poses, lead = self._poses_by_position(x), self._analyse_poses(x), x.shape[1:-2]
        room, out = self._room(poses, math.prod(lead), rows)
        if plainly:
            found = from_copies_plainly(poses, weights, by_position, out)
            found = found if bias is None else [found[0] + bias[:, None], *found[1:]]
            return self._synthesise(found, None, lead, rows), poses
        found = from_copies(poses, weights, by_position, out)
        if bias is not None:
            found[0].add_(bias[:, None])
        return self._synthesise(found, room, lead, rows), poses

    def differentiate(
        self, grad: Tensor, x: Tensor, weights: Sequence[Tensor], transposed: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The gradients of the input, of the bias of the trivial irrep, and of the weights of each irrep."""
        of_x, of_y = self.compute(grad, None, weights, not transposed, like=x)
        if transposed:
            poses = self._analyse_poses(x)
            return of_x, of_y[0][0].sum(1), weight_gradients(of_y, poses, weights, self._poses_by_position(x))
        by_position = self._poses_by_position(grad)
        return (
            of_x,
            of_y[0].sum(0 if by_position else 1),
            weight_gradients(self._analyse(x), of_y, weights, by_position),
        )

    def compute_images(
        self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor], transposed: bool, parts: int
    ) -> Any:
        """The map in so many parts, or its transpose, image by image."""
        poses = self.poses.to(x.dtype)
        if not transposed:
            y = self._parts(x, x.shape[:2], parts)
            Images(poses, self._analyse(x), weights, y).write(bias)
            return tuple(part.permute(1, 0, 4, 2, 3) for part in y)
        room, found = self._room(x, math.prod(x.shape[1:3]), False)
        Images(poses, found, weights, [by_image(x)]).read()
        if bias is not None:
            found[0].add_(bias[:, None])
        return self._synthesise(found, room, x.shape[1:3], False)

    def differentiate_images(
        self, grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], transposed: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """:meth:`differentiate` for :meth:`compute_images`."""
        poses = self.poses.to(x.dtype)
        if not transposed:
            room, found = self._room(x, math.prod(x.shape[:2]), False)
            images = Images(poses, self._analyse(x), weights, [by_image(grad) for grad in grads])
            of_weights, of_bias = images.weight_gradients(found)
            return self._synthesise(found, room, x.shape[:2], False), of_bias, of_weights
        seen, (y,) = self._analyse(grads[0]), self._parts(x, x.shape[1:3], 1)
        of_weights, _ = Images(poses, seen, weights, [by_image(x)]).weight_gradients(None)
        Images(poses, seen, weights, [y]).write(None)
        return y.permute(1, 0, 4, 2, 3), seen[0][0].sum(1), of_weights

    def _parts(self, like: Tensor, lead: Sequence[int], parts: int) -> list[Tensor]:
        """Room for regular fields in so many parts, each as :func:`by_image` has it, of B images of N positions."""
        shape = (lead[0], self.groups // parts, len(self.poses), self.fields // self.groups, lead[1])
        return [like.new_empty(shape) for _ in range(parts)]

    def _by_position(self, x: Tensor, of_poses: bool) -> bool:
        """Whether positions follow each other in memory, each with its channels; heads of several images vary."""
        if of_poses and self.groups > 1:
            return x.shape[1] == 1
        return x.stride(-2 if of_poses else -1) == 1

    def _poses_by_position(self, y: Tensor) -> bool:
        return self.groups > 1 or self._by_position(y, True)

    def _analyse_poses(self, y: Tensor) -> Tensor:
        """The irreps of regular fields ``(groups, ..., H, F // groups)``."""
        poses = self.poses.to(y.dtype)
        if self._wide:
            found = poses @ y.movedim(-2, 0).movedim(1, -2).reshape(len(poses), -1)
        elif self._poses_by_position(y):
            found = poses @ y.movedim(0, -3).transpose(-1, -2).reshape(-1, len(poses)).T
        else:
            found = poses @ y[0].movedim((-2, -1), (0, 1)).reshape(len(poses), -1)
        return found.unflatten(1, (-1, self.fields) if self._poses_by_position(y) else (self.fields, -1))

    def _synthesise_poses(self, y: Tensor, lead: Sequence[int], rows: bool) -> Tensor:
        """The regular fields ``(groups, ..., H, F // groups)`` of their irreps."""
        poses, y = self.poses.to(y.dtype), y.flatten(1)
        if self._wide:
            return (poses.T @ y).view(len(poses), *lead, self.groups, -1).movedim(-2, 0).movedim(1, -2)
        if rows or self.groups > 1:
            return (y.T @ poses).view(*lead, self.groups, -1, len(poses)).movedim(-3, 0).transpose(-1, -2)
        of_fields = (poses.T @ y).view(len(poses), self.fields, lead[0], -1)
        of_fields = of_fields.permute(2, 1, 0, 3).contiguous()  # B, F, H, N
        return of_fields.permute(0, 3, 2, 1).unflatten(1, lead[1:]).unsqueeze(0)

    def _analyse(self, x: Tensor) -> list[Tensor]:
        """The irreps ``(m, K, N)`` of features ``(..., size)``."""
        rows = self._by_position(x, False)
        if rows and self._ordered:
            number, size = self._shapes[0]
            found = (self.reads_0.to(x.dtype) @ x.reshape(-1, size).T).view(size, -1, number)
            return [part.transpose(1, 2).flatten(2).mT for part in self._split(found, fields=True)]
        # Of two axes torch makes the transpose in tiles.
        x = x.flatten(0, -2).T.contiguous() if rows else x.movedim(-1, 0)
        parts = []
        for i, (number, size) in enumerate(self._shapes):
            if self._ordered:
                part = x.unflatten(0, (number, size)).transpose(0, 1)
            else:
                part = x.index_select(0, getattr(self, f"columns_{i}").T.flatten())
            found = getattr(self, f"reads_{i}").to(x.dtype) @ part.reshape(size, -1)
            parts.append(found.view(len(found) * number, -1))
        return self._split(parts[0] if self.order is None else torch.cat(parts).index_select(0, self.order))

    def _split(self, found: Tensor, fields: bool = False) -> list[Tensor]:
        """Components and copies ``(m, K, ...)`` of each irrep, of ``(size, ...)``; K with or without the fields."""
        copies = [
            sum(c[r][0] * (1 if fields else n) for (n, _), c in zip(self._shapes, self._copies, strict=True))
            for r in range(len(self.components))
        ]
        parts = found.split([m * k for m, k in zip(self.components, copies, strict=True)])
        return [part.unflatten(0, (m, k)) for part, m, k in zip(parts, self.components, copies, strict=True)]

    def _room(self, like: Tensor, number: int, rows: bool) -> tuple[Tensor, list[Tensor]]:
        """Room for irreps as :meth:`_synthesise` takes them: all of it, and ``(m, K, N)`` of each irrep."""
        fields, size = self._shapes[0]
        if not (rows and self._ordered):
            room = like.new_empty(self._size, number)
            return room, self._split(room)
        room = like.new_empty(size, number, fields)
        parts = self._split(room, fields=True)
        return room, [
            (p[:, 0] if p.shape[1] == 1 else like.new_empty(len(p), number, p.shape[1] * fields)).mT for p in parts
        ]

    def _synthesise(self, x: Sequence[Tensor], room: Tensor | None, lead: Sequence[int], rows: bool) -> Tensor:
        """The features ``(..., size)`` of their irreps ``(m, K, N)``, and the room where these are, if they are."""
        fields, size = self._shapes[0]
        if rows and self._ordered:
            parts = [part.mT.unflatten(2, (-1, fields)).transpose(1, 2) for part in x]
            if room is None:
                room = torch.cat([part.flatten(0, 1) for part in parts])
            else:
                for part, place in zip(parts, self._split(room, fields=True), strict=True):
                    if place.shape[1] > 1:
                        place.copy_(part)
            return (room.view(size, -1).T @ self.reads_0.to(room.dtype)).view(*lead, -1)
        y = torch.cat([part.flatten(0, 1) for part in x]) if room is None else room
        y = y if self.back is None else y.index_select(0, self.back)
        found, start = [], 0
        for i, (number, size) in enumerate(self._shapes):
            reads = getattr(self, f"reads_{i}").to(y.dtype)
            part = y[start : start + len(reads) * number].view(len(reads), -1)
            found.append((reads.T @ part).view(size * number, lead[0], -1))
            start += len(reads) * number
        if self._ordered:
            y = found[0].unflatten(0, (size, fields)).transpose(0, 1).flatten(0, 1)
        else:
            assert self.places is not None
            y = (found[0] if len(found) == 1 else torch.cat(found)).index_select(0, self.places)
        if rows:
            return y.flatten(1).T.contiguous().view(*lead, -1)
        return y.transpose(0, 1).contiguous().transpose(1, 2).unflatten(1, lead[1:])

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


class _Map(torch.autograd.Function):
    """The map and its transpose, with gradients in the layout of their input: of views autograd would copy them.

    ``of_images`` is the number of parts of regular fields with the positions of an image side by side; 0 for others.
    """

    @staticmethod
    def forward(ctx: Any, irreps: Irreps, transposed: bool, of_images: int, x: Tensor, *arguments: Tensor) -> Any:
        ctx.irreps, ctx.transposed, ctx.of_images = irreps, transposed, of_images
        ctx.save_for_backward(x, *arguments)
        bias, *weights = arguments
        if of_images:
            return irreps.compute_images(x, bias, weights, transposed, of_images)
        return irreps.compute(x, bias, weights, transposed)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        irreps, transposed, needed = ctx.irreps, ctx.transposed, ctx.needs_input_grad[3:]
        x, bias, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [t for t, need in zip((x, bias, *weights), needed, strict=True) if need]
            y, *_ = irreps.compute(x, bias, weights, transposed, plainly=True)
            found = iter(torch.autograd.grad(y, wanted, torch.cat(grads), create_graph=True))
            return (None, None, None, *(next(found) if need else None for need in needed))
        if ctx.of_images:
            of_x, of_bias, of_weights = irreps.differentiate_images(grads, x, weights, transposed)
        else:
            of_x, of_bias, of_weights = irreps.differentiate(grads[0], x, weights, transposed)
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
