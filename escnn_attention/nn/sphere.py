"""Self-attention and a transformer block on the sphere."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import numpy as np
import torch
from escnn.group import O3, SO3, GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_length, check_probability
from escnn_attention.encodings import Encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import QueryMode
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.cache import checked
from escnn_attention.geometry.neighbours import numbers_of
from escnn_attention.geometry.relations import Offset
from escnn_attention.groups.fibers import FrameSegment, columns_of, invariant_vectors
from escnn_attention.groups.lie_algebra import represented
from escnn_attention.nn.arguments import (
    AttentionLike,
    check_options,
    check_type,
    check_types,
    choose_attention,
    option_names,
)
from escnn_attention.nn.heads import is_scalar, made_for, normalised_needs
from escnn_attention.nn.module import PointLayer, PointModule, check_at_points, check_edge_dim, check_points
from escnn_attention.nn.norms import BlockNorm, check_norm_kind, norm_of
from escnn_attention.nn.point_attention import bind_kernel, choose_neighbourhood, relative_kernel
from escnn_attention.nn.pointwise import DropPath, dropout_of, ends_of, shortcut_of
from escnn_attention.nn.transformer import PointBlock
from escnn_attention.plain.projections import AttentionMode, FromPoses, GroupTables, QueryKeyNorm, Scalars, ToPoses
from escnn_attention.plain.sphere_attention import Generators, LocalFrames, SphereAttention, SphereFeedForward
from escnn_attention.plain.sphere_attention import SphereTransformerBlock as PlainBlock


class Stabiliser:
    """Samples of the rotations about the north pole, and of the reflections that fix it."""

    def __init__(self, field_type: FieldType, samples: int):
        group = field_type.fibergroup
        if not isinstance(group, (SO3, O3)) or field_type.gspace.dimensionality != 3:
            raise ValueError(
                f"in_type: the sphere needs a gspace on R³ with the fiber group SO(3) or O(3), "
                f"gspaces.rot3dOnR3() or gspaces.flipRot3dOnR3(), got {field_type.gspace.name}"
            )
        self.reflects = isinstance(group, O3)
        if check_int("samples", samples) % 2 and self.reflects:
            raise ValueError(f"samples: got {samples} for {group.name}, needed an even number: half are reflections")
        number = samples // 2 if self.reflects else samples
        about_z = [_about("z", 2 * math.pi * s / number) for s in range(number)]
        if self.reflects:
            mirror = group.element((1, _about("y", math.pi)), "Q")  # y to -y
            rotations = [group.element((0, q), "Q") for q in about_z]
            self.elements = [*rotations, *(r @ mirror for r in rotations)]
        else:
            self.elements = [group.element(q, "Q") for q in about_z]
        self.group = group
        action = field_type.gspace.basespace_action
        self.matrices = np.stack([np.asarray(action(h), dtype=np.float64) for h in self.elements])

    def segments(self, field_type: FieldType, *, dual: bool = False) -> list[FrameSegment]:
        r"""The matrices :math:`\rho(h_s)^{-1}`, or :math:`\rho(h_s)^T / S`, of a type."""
        out = []
        for representation, columns in columns_of(field_type):
            matrices = np.stack([np.asarray(representation(h), dtype=np.float64) for h in self.elements])
            transposed = np.swapaxes(matrices, 1, 2)
            if not np.allclose(matrices @ transposed, np.eye(representation.size), atol=1e-8):
                raise ValueError(f"{representation.name}: a representation on the sphere must be orthogonal")
            out.append(FrameSegment(columns, transposed / len(matrices) if dual else transposed, None))
        return out

    def read(self, in_type: FieldType, fields: int, **options: Any) -> ToPoses:
        """The map from fields to functions on frames, with the options of :class:`ToPoses`."""
        return ToPoses(self.segments(in_type), in_type.size, fields, len(self.elements), **options)

    def mean(self, out_type: FieldType, fields: int, groups: int, bias: bool) -> FromPoses:
        """The map from functions on frames to the fields whose mean they are."""
        segments = self.segments(out_type, dual=True)
        invariants = invariant_vectors(out_type) if bias else None
        return FromPoses(segments, out_type.size, fields, 1, groups=groups, invariants=invariants)

    def generators(self, field_type: FieldType) -> list[Generators]:
        """The generators of rotations about z and about y on a type."""
        out = []
        for representation, columns in columns_of(field_type):
            _, about_y, about_z = represented(representation).generators.numpy()
            out.append(Generators(columns, about_z, about_y))
        return out


def _about(axis: str, angle: float) -> np.ndarray:
    """The unit quaternion of a rotation, the real part last."""
    quaternion = np.zeros(4)
    quaternion["xyz".index(axis)] = math.sin(angle / 2)
    quaternion[3] = math.cos(angle / 2)
    return quaternion


class SphereSelfAttention(PointLayer):
    r"""Self-attention between points of the sphere S², equivariant to the rotations SO(3) or to O(3).

    The sphere has no translations; it is the homogeneous space SO(3)/SO(2). A field on it becomes a function on the
    group, whose elements are the frames :math:`g = R(x) h` of its points x, with h a rotation about the north pole (and
    reflections, for O(3)). The quotient of two frames, :math:`g^{-1} g'`, does not change when the sphere is rotated:

    .. math::
        s(g, g') &= \langle q(g),\; k(g') + \rho(g^{-1} g') \rangle / \sqrt C + \log\mu(x') \\
        \mathrm{out}(g) &= \sum_{x' \in N(x)} \sum_{h'} \mathrm{softmax}_{g'}(s) \; v(g')

    The rotations h are sampled: :math:`q(R(x) h_s) = w\,\rho(R(x) h_s)^{-1} f(x)`, and the output is :math:`\frac 1S
    \sum_s \rho(R(x) h_s)\, W \mathrm{out}(R(x) h_s)`. The first frame of a point is arbitrary, so the error under a
    rotation is that of the sampling, which falls quickly with ``samples``.

    The encoding is a function of the offset of the key in the frame of the query, :math:`g^{-1} x' - e_z`, in units of
    the ``length_scale``, and of the axes of the key's frame.

    Args:
        in_type: the type of the input: any fields over ``gspaces.rot3dOnR3()`` or ``gspaces.flipRot3dOnR3()``: scalars
            (temperature), vectors in space (wind, as three components), irreps.
        out_type: the type of the output, likewise. Fields between layers need types with directions: scalars alone are
            isotropic.
        num_heads: the number of heads.
        samples: the number of frames of a point; with reflections an even number, half of which are mirror images: use
            twice as many for O(3) as for SO(3), 16 or more.
        head_fields: the number C of functions of a head; by default the fields of ``out_type`` divided by
            ``num_heads``, rounded up.
        radius: points attend to those within this angle, in radians; None for any.
        num_neighbours: points attend to this number of nearest points, themselves included; None for all. Without both
            a point attends to the whole sphere, or to the edges given on application.
        query: ``"own"`` or ``"all"``, as in :class:`GroupSelfAttention`, for the frames of the query.
        encoding: the positional encoding, by name or as an object, or a :class:`PairKernel`; neither rotary nor
            absolute.
        length_scale: the unit of length of the encoding; by default the distance of ``radius``, or 1.
        normalization, dropout, qk_norm, edge_dim, bias: as in :class:`PointSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, 3)``, unit vectors, to ``(N, out_type.size)`` with the same
        coordinates. :class:`~escnn_attention.SphereGrid` turns images into that form and back; its weights are the
        ``measure``.

    Raises:
        ValueError: another gspace, a representation that is not orthogonal, an unknown option; on application, points
            that are not on the unit sphere.

    Example:
        >>> import torch
        >>> from escnn_attention import SphereGrid, SphereSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot3dOnR3()
        >>> scalars = nn.FieldType(g, 2 * [g.trivial_repr])
        >>> vectors = nn.FieldType(g, [g.fibergroup.irrep(1)])
        >>> grid = SphereGrid(6)
        >>> x, batch, measure = grid.points(torch.randn(1, 2, 6, 12), scalars)
        >>> layer = SphereSelfAttention(scalars, vectors, samples=6, radius=1.0)
        >>> grid.image(layer(x, batch=batch, measure=measure)).shape
        torch.Size([1, 3, 6, 12])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3 (lifting to homogeneous spaces); "Equivariant
    Attention on Homogeneous Spaces" (slides).
    """

    plain: SphereAttention

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        samples: int = 8,
        head_fields: int | None = None,
        radius: float | None = None,
        num_neighbours: int | None = None,
        query: QueryMode = "own",
        encoding: Encoding | PairKernel | str | None = None,
        length_scale: float | None = None,
        normalization: Normalization = "softmax",
        dropout: float = 0.0,
        qk_norm: bool = False,
        edge_dim: int | None = None,
        bias: bool = True,
    ):
        check_types(in_type, out_type)
        mode = AttentionMode(query, "all", dropout, normalization=normalization)
        num_heads = check_int("num_heads", num_heads)
        stabiliser = Stabiliser(in_type, samples)
        if head_fields is None:
            head_fields = -(-len(out_type) // num_heads)
        fields = num_heads * check_int("head_fields", head_fields)
        # The distance between points that see each other under this angle.
        chord = None if radius is None else 2 * math.sin(min(check_length("radius", radius), math.pi) / 2)
        if length_scale is None:
            length_scale = chord or 1.0
        # No point is further than the antipode, whatever rounding makes of its distance.
        neighbourhood = choose_neighbourhood(None if chord == 2.0 else chord, num_neighbours, Offset(), 3)
        kernel = relative_kernel(encoding, "SphereSelfAttention", "the quotient of two frames")
        lifts = is_scalar(in_type)
        needs = normalised_needs(qk_norm, kernel, head_fields, 3, normalization)
        number, made = made_for(needs, num_heads, head_fields, bool(bias))
        project_in = Scalars(in_type.size, number, **made) if lifts else stabiliser.read(in_type, number, **made)
        axes = 0 if lifts else 2 if stabiliser.reflects else 1
        plain = SphereAttention(
            LocalFrames(stabiliser.generators(in_type)),
            LocalFrames(stabiliser.generators(out_type)),
            axes,
            project_in=project_in,
            project_out=stabiliser.mean(out_type, fields, num_heads, bool(bias)),
            encoding=bind_kernel(kernel, normalization, 3 + 3 * axes, num_heads, head_fields, 1),
            relation=Offset(),
            neighbourhood=neighbourhood,
            values=None,
            tables=GroupTables(
                np.swapaxes(stabiliser.matrices, 1, 2), np.zeros((len(stabiliser.elements), 1), dtype=np.int64)
            ),
            mode=mode,
            needs=needs,
            length_scale=check_length("length_scale", length_scale),
            edge_dim=check_edge_dim(edge_dim),
        )
        if qk_norm:
            plain.qk_norm = QueryKeyNorm(num_heads, head_fields)
        super().__init__(in_type, out_type, plain, head_fields)
        self.samples = samples

    def _check(self, x: Any, edge_index: Any, batch: Any, mask: Any, measure: Any, edge_attr: Any) -> GeometricTensor:
        checked(check_sphere, check_points(x, self.in_type, self).coords, mask)
        return super()._check(x, edge_index, batch, mask, measure, edge_attr)

    def check_equivariance(self, atol: float = 1e-2, rtol: float = 1e-2) -> list[tuple[GroupElement, float]]:
        """Check on random points that the layer nearly commutes with random rotations.

        The arguments, the result and the error are those of :meth:`GroupSelfAttention.check_equivariance`; more
        ``samples`` make errors smaller.
        """
        return check_on_sphere(self, atol, rtol)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, samples={self.samples}"


def check_sphere(coords: Tensor, mask: Tensor | None = None) -> None:
    """The points lie on the unit sphere."""
    lengths = numbers_of("coords", coords).norm(dim=-1)
    off = (lengths - 1).abs() > 1e-3
    if bool((off if mask is None else off & mask).any()):
        raise ValueError(
            f"coords: got points of length {float(lengths.min()):.4g} to {float(lengths.max()):.4g}, needed unit "
            "vectors: points on the sphere"
        )


def check_on_sphere(module: PointModule, atol: float, rtol: float) -> list[tuple[GroupElement, float]]:
    """The errors of random rotations of random points, each of them below its limit."""
    points = torch.nn.functional.normalize(torch.randn(24, 3, dtype=torch.float64), dim=-1)
    return check_at_points(module, points, (module.space.fibergroup.sample() for _ in range(8)), atol, rtol)


class SphereOptions(TypedDict, total=False):
    """Options of :class:`SphereSelfAttention` that :class:`SphereTransformerBlock` passes on."""

    head_fields: int | None
    radius: float | None
    num_neighbours: int | None
    query: QueryMode
    encoding: Encoding | PairKernel | str | None
    length_scale: float | None
    normalization: Normalization
    qk_norm: bool
    edge_dim: int | None


class SphereTransformerBlock(PointBlock):
    r"""Attention on the sphere and a network at every point, each with a residual connection.

    It is the :class:`PointTransformerBlock` with another network N, which makes functions on its frames of the fields
    at a point, applies a SiLU there, and makes fields of them again.

    Args:
        in_type, out_type, num_heads: as in :class:`SphereSelfAttention`.
        attention: another attention, as in :class:`TransformerBlock`, called as :class:`SphereSelfAttention` is.
        samples, bias: of the attention and of the network N, as in :class:`SphereSelfAttention`.
        hidden_fields: the number of functions in the network; by default twice the fields of ``out_type``.
        attention_dropout: the dropout of the attention probabilities.
        dropout, norm_kind, norm_eps, layer_scale, drop_path: as in :class:`PointTransformerBlock`.
        options: the others of :class:`SphereSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, 3)``, unit vectors, to ``(N, out_type.size)`` with the same
        coordinates.

    Raises:
        TypeError, ValueError: as :class:`TransformerBlock` and :class:`SphereSelfAttention`.

    Example:
        >>> import torch
        >>> from escnn_attention import SphereTransformerBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot3dOnR3()
        >>> fields = nn.FieldType(g, 4 * [g.trivial_repr] + 2 * [g.fibergroup.irrep(1)])
        >>> block = SphereTransformerBlock(fields, fields, num_heads=2, num_neighbours=6)
        >>> coords = torch.nn.functional.normalize(torch.randn(20, 3), dim=-1)
        >>> block(nn.GeometricTensor(torch.randn(20, 10), fields, coords)).shape
        torch.Size([20, 10])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3; de Haan et al., "Gauge Equivariant Mesh CNNs",
    ICLR 2021, for nonlinearities on sampled frames.
    """

    plain_type = PlainBlock

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        attention: AttentionLike | None = None,
        samples: int = 8,
        hidden_fields: int | None = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        norm_kind: BlockNorm | None = None,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        bias: bool = True,
        **options: Unpack[SphereOptions],
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        dropout = check_probability("dropout", dropout)
        check_probability("attention_dropout", attention_dropout)
        shared: dict[str, Any] = {"samples": samples, "bias": bias}
        check_options(type(self).__name__, options, option_names(SphereTransformerBlock))
        if attention is None:
            layer: EquivariantModule = SphereSelfAttention(
                in_type, out_type, num_heads, dropout=attention_dropout, **shared, **options
            )
        else:
            own = {"num_heads": (num_heads, 1), "attention_dropout": (attention_dropout, 0.0)}
            layer = choose_attention(attention, in_type, out_type, options, **own)
        stabiliser = Stabiliser(in_type, samples)
        hidden = 2 * len(out_type) if hidden_fields is None else check_int("hidden_fields", hidden_fields)
        self.attention = layer
        kind = check_norm_kind(norm_kind)
        self.norms = torch.nn.ModuleList(norm_of(fields, kind, eps=norm_eps) for fields in (in_type, out_type))
        self.gains = torch.nn.ModuleList(g for _ in range(2) for g in ends_of(out_type, layer_scale))
        self.drop_path = DropPath(out_type, check_probability("drop_path", drop_path))
        self.shortcut = shortcut_of(in_type, out_type, "group")
        self.dropout = dropout_of(out_type, dropout)
        self.network = SphereFeedForward(
            frames=LocalFrames(stabiliser.generators(out_type)),
            expand=stabiliser.read(out_type, hidden, bias=hidden if bias else 0),
            contract=stabiliser.mean(out_type, hidden, 1, bool(bias)),
        )

    def check_equivariance(self, atol: float = 1e-2, rtol: float = 1e-2) -> list[tuple[GroupElement, float]]:
        """Check on random points that the block nearly commutes: see :meth:`SphereSelfAttention.check_equivariance`."""
        return check_on_sphere(self, atol, rtol)
