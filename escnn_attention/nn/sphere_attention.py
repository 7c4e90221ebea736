"""Self-attention on the sphere."""

from __future__ import annotations

import math

import numpy as np
import torch
from escnn.group import GroupElement
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_length, check_probability
from escnn_attention.encodings import Encoding, RotaryEncoding, as_encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import QueryMode
from escnn_attention.functional.grid.call import Normalization
from escnn_attention.geometry.neighbours import Neighbourhood, numbers_of
from escnn_attention.geometry.relations import Offset
from escnn_attention.nn.arguments import check_points, check_types
from escnn_attention.nn.clouds import check_edge_dim, check_points_mode
from escnn_attention.nn.heads import finished, is_scalar, made_for, normalised_needs
from escnn_attention.nn.point_attention import bind_kernel
from escnn_attention.nn.point_module import PointLayer, PointModule, check_at_points
from escnn_attention.nn.stabiliser import Stabiliser
from escnn_attention.plain.local_frames import LocalFrames
from escnn_attention.plain.sphere_attention import SphereAttention

__all__ = ["SphereSelfAttention", "check_on_sphere", "check_sphere"]


class SphereSelfAttention(PointLayer):
    r"""Self-attention between points of the sphere S², equivariant to the rotations SO(3) or to O(3).

    The sphere has no translations; it is the homogeneous space SO(3)/SO(2). A field on it becomes a function on the
    group, whose elements are the frames :math:`g = R(x) h` of its points x, with h a rotation about the north pole (and
    reflections, for O(3)). One frame sees of another the quotient :math:`g^{-1} g'`, which does not change when the
    sphere is rotated:

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
        normalization, dropout, qk_norm, edge_dim, bias: as in :class:`PointSelfAttention`.

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
        check_points_mode(query, normalization)
        num_heads = check_int("num_heads", num_heads)
        stabiliser = Stabiliser(in_type, samples)
        if head_fields is None:
            head_fields = -(-len(out_type) // num_heads)
        fields = num_heads * check_int("head_fields", head_fields)
        neighbourhood = _choose_neighbourhood(radius, num_neighbours)
        if length_scale is None:
            length_scale = _chord(radius) if radius else 1.0
        kernel, lifts = _choose_encoding(encoding), is_scalar(in_type)
        needs = normalised_needs(qk_norm, kernel, head_fields, 3, normalization)
        number, made = made_for(needs, num_heads, head_fields, bool(bias))
        project_in = (stabiliser.read_scalars if lifts else stabiliser.read)(in_type, number, **made)
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
            inverse_action=np.swapaxes(stabiliser.matrices, 1, 2),
            quotient=np.zeros((len(stabiliser.elements), 1), dtype=np.int64),
            relative=None,
            log_measure=None,
            needs=needs,
            query=query,
            keys="all",
            normalization=normalization,
            dropout=check_probability("dropout", dropout),
            length_scale=check_length("length_scale", length_scale),
            backend="neighbours",
            edge_dim=check_edge_dim(edge_dim),
        )
        super().__init__(in_type, out_type, finished(plain, qk_norm), head_fields)
        self.samples = samples

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the layer; the arguments are those of :meth:`PointSelfAttention.forward`, with points of length 1."""
        check_sphere(check_points(x, self.in_type, self), mask)
        return super().forward(x, edge_index, batch, mask=mask, measure=measure, edge_attr=edge_attr)

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
        return check_on_sphere(self, atol, rtol)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, samples={self.samples}"


def check_sphere(x: GeometricTensor, mask: Tensor | None = None) -> None:
    """The points of ``x`` lie on the unit sphere."""
    lengths = numbers_of("coords", x.coords).norm(dim=-1)
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


def _chord(radius: float) -> float:
    """The distance between points that see each other under this angle."""
    return 2 * math.sin(min(check_length("radius", radius), math.pi) / 2)


def _choose_neighbourhood(radius: float | None, num_neighbours: int | None) -> Neighbourhood:
    """The rule by which points are neighbours."""
    if num_neighbours is not None:
        check_int("num_neighbours", num_neighbours)
    # No point is further than the antipode, whatever rounding makes of its distance.
    chord = None if radius is None or _chord(radius) == 2.0 else _chord(radius)
    return Neighbourhood(chord, num_neighbours)


def _choose_encoding(encoding: Encoding | PairKernel | str | None) -> Encoding | PairKernel:
    """The encoding or kernel, if it is a function of the quotient of two frames."""
    kernel = encoding if isinstance(encoding, PairKernel) else as_encoding(encoding)
    if isinstance(kernel, Encoding) and (kernel.absolute or isinstance(kernel, RotaryEncoding)):
        raise ValueError(
            f"encoding: SphereSelfAttention got {type(kernel).__name__}, needed a function of the quotient of two "
            "frames: mlp, separable, fourier, none or a PairKernel"
        )
    return kernel
