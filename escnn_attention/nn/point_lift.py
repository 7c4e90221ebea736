"""The lift of points to motions."""

from __future__ import annotations

import torch
from escnn.group import SO2, SO3
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_bool, check_int, check_unused
from escnn_attention.geometry.cache import checked
from escnn_attention.geometry.neighbours import numbers_of
from escnn_attention.groups.fibers import columns_of
from escnn_attention.groups.lie_algebra import represented
from escnn_attention.groups.spaces import MotionSpace
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.module import check_cloud, check_points
from escnn_attention.plain.point_lift import Frames
from escnn_attention.plain.point_lift import PointLift as PlainPointLift


class PointLift(torch.nn.Module):
    r"""Lifts points to motions: every point gets S rotations.

    A point x becomes the motions :math:`g_s = (x, R_s)` of SE(2) or SE(3), and a cloud of N points a cloud of N · S
    points in the group, with features :math:`\rho(R_s)^{-1} f`: copies of scalars, and components of vectors in the
    frame of each lift. The quotient of two motions, :math:`g^{-1} g'` (:class:`~escnn_attention.LiftedMotion`), is
    invariant under motions, so a layer on lifted points is exactly invariant if the rotations are transformed with the
    points. Its features are functions on the group; their mean over the lifts of a point is a scalar, and
    :class:`LiftAverage` computes fields of any type from them.

    The rotations are part of the coordinates, so all following layers share them. In training they are random: in the
    plane one angle for each point, from which the S lifts are equally spaced, in space uniform and independent. The
    outputs are invariant in expectation, for any S. In evaluation mode they are the first members of a sequence that
    fills the rotations evenly, so that the output of a cloud depends on the order of its points. ``lifts`` sets them.

    Args:
        in_type: any fields over ``gspaces.rot2dOnR2(-1)`` or ``gspaces.rot3dOnR3()``.
        num_samples: the number S of lifts of a point.
        positive_quaternions: draw the quaternion with a positive real part of the two that represent a rotation,
            instead of either. For layers with :class:`~escnn_attention.LiftedMotion` ``("quaternion")``, which
            distinguish them: rotations do not preserve this half, so the mean over the lifts is invariant only as far
            as the layers learn it. Given ``lifts`` are not changed.

    Attributes:
        out_type: as many scalars as the type has channels, over the
            :class:`~escnn_attention.groups.spaces.MotionSpace`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N · S, in_type.size)`` with ``coords`` ``(N · S, 3)`` in
        the plane, position and angle, and ``(N · S, 7)`` in space, position and quaternion.

    Raises:
        ValueError: another gspace, a number below 1, or ``positive_quaternions`` in the plane.

    Example:
        >>> import torch
        >>> from escnn_attention import LiftedMotion, PointSelfAttention
        >>> from escnn_attention import PointLift
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(-1)
        >>> lift = PointLift(nn.FieldType(g, 3 * [g.trivial_repr]), num_samples=2)
        >>> layer = PointSelfAttention(lift.out_type, lift.out_type, relation=LiftedMotion())
        >>> x, edge_index, batch, mask, measure = lift(lift.in_type(torch.randn(5, 3), torch.randn(5, 2)))
        >>> layer(x, edge_index, batch, mask=mask, measure=measure).shape
        torch.Size([10, 3])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.2; Finzi et al., "Generalizing Convolutional
    Neural Networks for Equivariance to Lie Groups", ICML 2020; Roberts, "The Unreasonable Effectiveness of Quasirandom
    Sequences", 2018, for the sequence, and Shoemake, "Uniform Random Rotations", 1992, for the map to quaternions.
    """

    def __init__(self, in_type: FieldType, num_samples: int = 1, positive_quaternions: bool = False):
        super().__init__()
        gspace = _check_rotations("in_type", in_type, self).gspace
        self.in_type = in_type
        self.out_type = _lifted_type(in_type)
        self.num_samples = check_int("num_samples", num_samples)
        if check_bool("positive_quaternions", positive_quaternions) and gspace.dimensionality == 2:
            check_unused("positive_quaternions", True, False, "rotations of the plane are angles")
        self.plain = PlainPointLift(gspace.dimensionality, num_samples, positive_quaternions, _frames(in_type))

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        lifts: Tensor | None = None,
    ) -> tuple[GeometricTensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Lift features at points.

        Args:
            x, edge_index, batch, mask, measure: as in :meth:`PointSelfAttention.forward`.
            lifts: the rotations of each point: angles ``(N, S)`` in the plane, quaternions ``(N, S, 4)``, real part
                first and of any length but 0, in space. None to draw them.

        Returns:
            the lifted points, and edges, batch, mask and measure of them: None where there were none.
        """
        x = check_points(x, self.in_type, self)
        checked(check_cloud, x.coords, edge_index, batch, mask, measure)
        if lifts is not None and not isinstance(lifts, Tensor):
            raise TypeError(f"lifts: got {type(lifts).__name__}, needed a tensor or None")
        y, coords, *others = self.plain(x.tensor, x.coords, edge_index, batch, mask, measure, lifts)
        if lifts is not None:
            _check_lifts(lifts, mask)
        return GeometricTensor(y, self.out_type, coords), *others  # type: ignore[return-value]

    def extra_repr(self) -> str:
        positive = ", positive_quaternions=True" if self.plain.positive_quaternions else ""
        return f"{self.in_type}, num_samples={self.num_samples}{positive}"


class LiftAverage(torch.nn.Module):
    r"""The inverse of lifting: fields at the points from the features of their lifts.

    .. math:: y_i = \frac{1}{S} \sum_{s=1}^S \rho(R_{is})\, f_i(s)

    It inverts the action of :class:`PointLift` on features of the same type, and after layers on lifted points its
    output is as equivariant as they are invariant.

    Args:
        out_type: any fields over ``gspaces.rot2dOnR2(-1)`` or ``gspaces.rot3dOnR3()``.
        num_samples: the number S of lifts of a point.

    Attributes:
        in_type: as many scalars as the type has channels, over the :class:`~escnn_attention.groups.spaces.MotionSpace`.

    Shape:
        ``(N · S, out_type.size)`` with the ``coords`` that :class:`PointLift` makes to ``(N, out_type.size)`` with
        ``coords`` ``(N, d)``.

    Raises:
        ValueError: another gspace, a number below 1, or on application so many points that they are not S for each.

    Example:
        >>> import torch
        >>> from escnn_attention import LiftAverage, LiftedMotion, PointLift, PointSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(-1)
        >>> vectors = nn.FieldType(g, 2 * [g.irrep(1)])
        >>> lift, average = PointLift(vectors, 3), LiftAverage(vectors, 3)
        >>> layer = PointSelfAttention(lift.out_type, average.in_type, relation=LiftedMotion())
        >>> x, edge_index, batch, mask, measure = lift(vectors(torch.randn(5, 4), torch.randn(5, 2)))
        >>> average(layer(x, edge_index, batch, mask=mask, measure=measure)).shape
        torch.Size([5, 4])

    Source: Puny et al., "Frame Averaging for Invariant and Equivariant Network Design", ICLR 2022, with frames that are
    drawn for each point.
    """

    def __init__(self, out_type: FieldType, num_samples: int = 1):
        super().__init__()
        _check_rotations("out_type", out_type, self)
        self.in_type, self.out_type = _lifted_type(out_type), out_type
        self.num_samples = check_int("num_samples", num_samples)
        self.frames = _frames(out_type)

    def forward(self, x: GeometricTensor) -> GeometricTensor:
        """The mean over the lifts of each point, which lie side by side."""
        x = check_points(x, self.in_type, self)
        if len(x.coords) % self.num_samples:
            raise ValueError(f"input: got {len(x.coords)} lifted points, needed {self.num_samples} for each point")
        dim = self.out_type.gspace.dimensionality
        y = x.tensor if self.frames is None else self.frames(x.tensor, x.coords[:, dim:])
        places = x.coords[:: self.num_samples, :dim]
        return GeometricTensor(y.unflatten(0, (-1, self.num_samples)).mean(1), self.out_type, places)

    def extra_repr(self) -> str:
        return f"{self.out_type}, num_samples={self.num_samples}"


def _check_rotations(name: str, field_type: FieldType, layer: torch.nn.Module) -> FieldType:
    """The type, if it is over a gspace with all rotations of the plane or of space."""
    gspace = check_type(name, field_type).gspace
    if not isinstance(gspace.fibergroup, {2: SO2, 3: SO3}.get(gspace.dimensionality, ())):
        raise ValueError(
            f"{name}: {type(layer).__name__} needs a gspace with all rotations of the plane or of space, "
            f"gspaces.rot2dOnR2(-1) or gspaces.rot3dOnR3(), got {gspace.name}"
        )
    return field_type


def _lifted_type(field_type: FieldType) -> FieldType:
    """As many scalars on motions as a type has channels."""
    space = MotionSpace(field_type.gspace.dimensionality)
    return FieldType(space, field_type.size * [space.trivial_repr])


def _frames(field_type: FieldType) -> Frames | None:
    """The map of fields to the frames of rotations; None for scalars only."""
    segments = [(r, columns) for r, columns in columns_of(field_type) if not r.is_trivial()]
    if not segments:
        return None
    return Frames([columns for _, columns in segments], [represented(r).generators.numpy() for r, _ in segments])


def _check_lifts(lifts: Tensor, mask: Tensor | None) -> None:
    """Lifts are finite, and quaternions are not zero, but for points that a mask hides."""
    good = numbers_of("lifts", lifts).isfinite().flatten(1).all(1)
    if lifts.dim() == 3:
        good = good & (lifts != 0).any(-1).all(-1)
    if not bool((good if mask is None else good | ~mask).all()):
        raise ValueError("lifts: got numbers that are not finite, or quaternions of length 0")
