"""Self-attention on the sphere."""

from __future__ import annotations

import copy
import math
from typing import cast

import numpy as np
import torch
from escnn.group import O3, SO3, GroupElement
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_length, check_option, check_probability
from escnn_attention.encodings import Encoding, RotaryEncoding, as_encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import QueryMode
from escnn_attention.functional.points.attention import Normalization
from escnn_attention.geometry.clouds import Neighbourhood
from escnn_attention.geometry.relations import Offset
from escnn_attention.groups.fibers import FrameSegment, columns_of, invariant_vectors
from escnn_attention.groups.lie_algebra import represented
from escnn_attention.nn.arguments import check_points, check_same_gspace, check_type
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.point_attention import PointLayer, PointModule
from escnn_attention.nn.point_transformer import PointBlock
from escnn_attention.nn.self_attention import project_scalars
from escnn_attention.nn.transformer import dropout_of, shortcut_of
from escnn_attention.plain.local_frames import Generators, LocalFrames
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses
from escnn_attention.plain.sphere_attention import SphereAttention, SphereFeedForward
from escnn_attention.plain.sphere_attention import SphereTransformerBlock as PlainBlock

__all__ = ["SphereSelfAttention", "SphereTransformerBlock"]


class SphereSelfAttention(PointLayer):
    r"""Self-attention between points of the sphere S², equivariant to the rotations SO(3) or to O(3).

    The sphere has no translations; it is the homogeneous space SO(3)/SO(2). A field on it becomes a function on the
    group, whose elements are the frames :math:`g = R(x) h` of its points x, with h a rotation about the north pole (and
    reflections, for O(3)). One frame sees of another the quotient :math:`g^{-1} g'`, which does not change when the
    sphere is turned:

    .. math::
        s(g, g') &= \langle q(g),\; k(g') + \rho(g^{-1} g') \rangle / \sqrt C + \log\mu(x') \\
        \mathrm{out}(g) &= \sum_{x' \in N(x)} \sum_{h'} \mathrm{softmax}_{g'}(s) \; v(g')

    The rotations h are sampled: :math:`q(R(x) h_s) = w\,\rho(R(x) h_s)^{-1} f(x)`, and the output is
    :math:`\frac 1S \sum_s \rho(R(x) h_s)\, W \mathrm{out}(R(x) h_s)`. Which of the frames of a point is the first one
    is arbitrary, and so the error under a rotation is that of the sampling, which falls quickly with ``samples``.

    The encoding is a function of the offset of the key in the frame of the query, :math:`g^{-1} x' - e_z`, in units of
    the ``length_scale``, and of the axes of the key's frame.

    Args:
        in_type: the type of the input: any fields over ``gspaces.rot3dOnR3()`` or ``gspaces.flipRot3dOnR3()``: scalars
            (temperature), vectors in space (wind, as three components), irreps.
        out_type: the type of the output, likewise. A layer that is followed by another keeps directions only in fields
            that have some: scalars alone are isotropic.
        num_heads: the number of heads.
        samples: the number of frames of a point; with reflections an even number, of which half are mirror images: give
            O(3) twice as many as SO(3), 16 or more.
        head_fields: the number C of functions of a head; by default the fields of ``out_type`` divided by
            ``num_heads``, rounded up.
        radius: points attend to those within this angle, in radians; None for any.
        num_neighbours: points attend to the nearest so many, themselves included; None for all. Where neither is given
            a point attends to the whole sphere, or to the edges given on application.
        query: ``"own"`` or ``"all"``, as in :class:`GroupSelfAttention`, for the frames of the query.
        encoding: the positional encoding, by name or as an object, or a :class:`PairKernel`; neither rotary nor
            absolute.
        length_scale: the distance that is 1 to the encoding; by default that of ``radius``, or 1.
        normalization, dropout, bias: as in :class:`PointSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, 3)``, unit vectors, to ``(N, out_type.size)`` with the same
        coordinates. :class:`~escnn_attention.SphereGrid` turns images into that form and back; its weights are the
        ``measure``.

    Raises:
        TypeError: a type or number is none.
        ValueError: another gspace, a representation that is not orthogonal, an unknown option; on application, points
            that are not on the unit sphere.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import SphereGrid, SphereSelfAttention
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
        bias: bool = True,
    ):
        check_type("in_type", in_type)
        check_type("out_type", out_type)
        check_same_gspace(in_type, out_type)
        check_option("query", query, ("own", "all"))
        check_option("normalization", normalization, ("softmax", "count"))
        num_heads = check_int("num_heads", num_heads)
        stabiliser = _Stabiliser(in_type, samples)
        if head_fields is None:
            head_fields = -(-len(out_type) // num_heads)
        fields = num_heads * check_int("head_fields", head_fields)
        if num_neighbours is not None:
            check_int("num_neighbours", num_neighbours)
        chord = None
        if radius is not None:
            chord = 2 * math.sin(min(check_length("radius", radius), math.pi) / 2)
        # No point is further than the antipode, whatever rounding makes of its distance.
        neighbourhood = Neighbourhood(None if chord == 2.0 else chord, num_neighbours)
        scale = check_length("length_scale", (chord or 1.0) if length_scale is None else length_scale)
        kernel = encoding if isinstance(encoding, PairKernel) else as_encoding(encoding)
        if isinstance(kernel, Encoding) and (kernel.absolute or isinstance(kernel, RotaryEncoding)):
            raise ValueError(
                f"encoding: SphereSelfAttention got {type(kernel).__name__}, needed a function of the quotient of two "
                "frames: mlp, separable, fourier, none or a PairKernel"
            )
        lifts = all(r.is_trivial() for r in in_type.representations)
        project_in: ToPoses | Scalars
        if lifts:
            project_in = project_scalars(in_type, num_heads, head_fields, bool(bias), "SphereSelfAttention")
        else:
            project_in = ToPoses(
                stabiliser.segments(in_type),
                in_type.size,
                3 * fields,
                len(stabiliser.elements),
                groups=3 * num_heads,
                bias=2 * fields if bias else 0,
            )
        axes = 0 if lifts else 2 if stabiliser.reflects else 1
        plain = SphereAttention(
            LocalFrames(stabiliser.generators(in_type)),
            LocalFrames(stabiliser.generators(out_type)),
            axes,
            project_in=project_in,
            project_out=stabiliser.mean(out_type, fields, num_heads, bool(bias)),
            encoding=kernel.bind(3 + 3 * axes, num_heads, head_fields, 1),
            relation=Offset(),
            neighbourhood=neighbourhood,
            values=None,
            inverse_action=np.swapaxes(stabiliser.matrices, 1, 2),
            quotient=np.zeros((len(stabiliser.elements), 1), dtype=np.int64),
            relative=None,
            log_measure=None,
            num_heads=num_heads,
            query=query,
            keys="all",
            normalization=normalization,
            dropout=check_probability("dropout", dropout),
            length_scale=scale,
            backend="neighbours",
        )
        super().__init__(in_type, out_type, plain, head_fields)
        self.samples = samples

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the layer; the arguments are those of :meth:`PointSelfAttention.forward`, with points of length 1."""
        check_sphere(check_points(x, self.in_type, self), mask)
        return super().forward(x, edge_index, batch, mask=mask, measure=measure)

    def check_equivariance(self, atol: float = 1e-2, rtol: float = 1e-2) -> list[tuple[GroupElement, float]]:
        """Check on random points that the layer nearly commutes with random rotations.

        Args:
            atol: the largest absolute error, in float64.
            rtol: the largest error relative to the output.

        Returns:
            each element with the mean of its absolute errors.

        Raises:
            AssertionError: an error is too large: more ``samples`` make it smaller.
        """
        return _check_on_sphere(self, atol, rtol)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, samples={self.samples}"


class SphereTransformerBlock(PointBlock):
    r"""Attention on the sphere and a network at every point, each with a residual connection.

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))) \\
        z &= y + \mathrm{Dropout}(N(\mathrm{LN}(y)))

    with LN a :class:`FieldLayerNorm`. The network N turns the fields at a point into functions on its frames, applies a
    SiLU there, and turns them back. The shortcut is the identity where the types agree, and an equivariant map
    elsewhere.

    Args:
        in_type, out_type, num_heads, samples, head_fields, radius: as in :class:`SphereSelfAttention`.
        num_neighbours, query, encoding, length_scale: as in :class:`SphereSelfAttention`.
        normalization, bias: as in :class:`SphereSelfAttention`.
        hidden_fields: the number of functions in the network; by default twice the fields of ``out_type``.
        attention_dropout: the dropout of the attention probabilities.
        dropout: the dropout of the branches, of whole fields where a field is not a scalar.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, 3)``, unit vectors, to ``(N, out_type.size)`` with the same
        coordinates.

    Raises:
        TypeError, ValueError: as :class:`SphereSelfAttention`.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import SphereTransformerBlock
        >>> g = gspaces.rot3dOnR3()
        >>> fields = nn.FieldType(g, 4 * [g.trivial_repr] + 2 * [g.fibergroup.irrep(1)])
        >>> block = SphereTransformerBlock(fields, fields, num_heads=2, num_neighbours=6)
        >>> coords = torch.nn.functional.normalize(torch.randn(20, 3), dim=-1)
        >>> block(nn.GeometricTensor(torch.randn(20, 10), fields, coords)).shape
        torch.Size([20, 10])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3; de Haan et al., "Gauge Equivariant Mesh CNNs",
    ICLR 2021, for nonlinearities on sampled frames.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        samples: int = 8,
        hidden_fields: int | None = None,
        head_fields: int | None = None,
        radius: float | None = None,
        num_neighbours: int | None = None,
        query: QueryMode = "own",
        encoding: Encoding | PairKernel | str | None = None,
        length_scale: float | None = None,
        normalization: Normalization = "softmax",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        dropout = check_probability("dropout", dropout)
        check_probability("attention_dropout", attention_dropout)
        self.attention = SphereSelfAttention(
            in_type,
            out_type,
            num_heads,
            samples=samples,
            head_fields=head_fields,
            radius=radius,
            num_neighbours=num_neighbours,
            query=query,
            encoding=encoding,
            length_scale=length_scale,
            normalization=normalization,
            dropout=attention_dropout,
            bias=bias,
        )
        stabiliser = _Stabiliser(in_type, samples)
        hidden = 2 * len(out_type) if hidden_fields is None else check_int("hidden_fields", hidden_fields)
        self.norms = torch.nn.ModuleList([FieldLayerNorm(in_type), FieldLayerNorm(out_type)])
        self.shortcut = shortcut_of(in_type, out_type, "group")
        self.dropout = dropout_of(out_type, dropout)
        self.network = SphereFeedForward(
            LocalFrames(stabiliser.generators(out_type)),
            ToPoses(
                stabiliser.segments(out_type),
                out_type.size,
                hidden,
                len(stabiliser.elements),
                bias=hidden if bias else 0,
            ),
            stabiliser.mean(out_type, hidden, 1, bool(bias)),
        )

    def _of_all(
        self, x: GeometricTensor, edge_index: Tensor | None, batch: Tensor | None, measure: Tensor | None
    ) -> GeometricTensor:
        y = self.dropout(self.attention(self.norms[0](x), edge_index, batch, measure=measure))
        y = self.shortcut(x) + y
        z = GeometricTensor(self.network(self.norms[1](y).tensor, y.coords), self.out_type, y.coords)
        return y + self.dropout(z)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`PointSelfAttention.export`."""
        self.eval()
        shortcut = torch.nn.Identity() if self.in_type == self.out_type else self.shortcut.export()
        norms = torch.nn.ModuleList(cast(FieldLayerNorm, norm).export() for norm in self.norms)
        return PlainBlock(norms, self.attention.export(), shortcut, copy.deepcopy(self.network)).eval()

    def check_equivariance(self, atol: float = 1e-2, rtol: float = 1e-2) -> list[tuple[GroupElement, float]]:
        """As :meth:`SphereSelfAttention.check_equivariance`."""
        return _check_on_sphere(self, atol, rtol)


def check_sphere(x: GeometricTensor, mask: Tensor | None = None) -> None:
    """The points of ``x`` lie on the unit sphere."""
    lengths = x.coords.detach().norm(dim=-1)
    off = (lengths - 1).abs() > 1e-3
    if bool((off if mask is None else off & mask).any()):
        raise ValueError(
            f"coords: got points of length {float(lengths.min()):.4g} to {float(lengths.max()):.4g}, needed unit "
            "vectors: points on the sphere"
        )


def _check_on_sphere(module: PointModule, atol: float, rtol: float) -> list[tuple[GroupElement, float]]:
    module = copy.deepcopy(module).double().eval()
    points = torch.nn.functional.normalize(torch.randn(24, 3, dtype=torch.float64), dim=-1)
    x = GeometricTensor(torch.randn(24, module.in_type.size, dtype=torch.float64), module.in_type, points)
    errors = []
    with torch.no_grad():
        y = module(x)
        for _ in range(8):
            element = module.space.fibergroup.sample()
            error = (module(x.transform(element)).tensor - y.transform_fibers(element).tensor).abs()
            limit = atol + rtol * float(y.tensor.abs().max())
            assert error.max() <= limit, f"{element}: the error is {error.max():.2e}, more than {limit:.2e}"
            errors.append((element, float(error.mean())))
    return errors


class _Stabiliser:
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
        turns = [_about("z", 2 * math.pi * s / number) for s in range(number)]
        if self.reflects:
            mirror = group.element((1, _about("y", math.pi)), "Q")  # y to -y
            rotations = [group.element((0, q), "Q") for q in turns]
            self.elements = [*rotations, *(r @ mirror for r in rotations)]
        else:
            self.elements = [group.element(q, "Q") for q in turns]
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

    def mean(self, out_type: FieldType, fields: int, groups: int, bias: bool) -> FromPoses:
        """From functions on frames to the fields whose mean they are."""
        segments = self.segments(out_type, dual=True)
        invariants = invariant_vectors(out_type) if bias else None
        return FromPoses(segments, out_type.size, fields, 1, groups=groups, invariants=invariants)

    def generators(self, field_type: FieldType) -> list[Generators]:
        """What rotations about z and about y do to a type."""
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
