"""Self-attention and attentive convolution on point clouds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_length, check_option, check_probability
from escnn_attention.encodings import Encoding, RotaryEncoding, as_encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import KeyMode, QueryMode
from escnn_attention.functional.points.attention import Normalization
from escnn_attention.geometry.clouds import Neighbourhood, once
from escnn_attention.geometry.relations import Offset, Relation
from escnn_attention.groups.fibers import Fibers, fibers, mass
from escnn_attention.groups.lie_algebra import random_transformation
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import (
    check_points,
    check_regular,
    check_same_gspace,
    check_type,
    choose_head_fields,
)
from escnn_attention.nn.self_attention import check_weights, project_heads, project_poses, project_scalars
from escnn_attention.plain.convolved_values import ConvolvedValues
from escnn_attention.plain.point_attention import PointAttention
from escnn_attention.plain.projections import ProjectionKind, Scalars, ToPoses

__all__ = ["PointAttentiveConv", "PointLayer", "PointModule", "PointSelfAttention", "check_cloud"]


class PointModule(EquivariantModule):
    """An equivariant module on feature fields at scattered points, which leaves the points where they are.

    Attributes:
        in_type: the type of the input.
        out_type: the type of the output.
        space: the gspace of both.
    """

    in_type: FieldType
    out_type: FieldType

    def __init__(self, in_type: FieldType, out_type: FieldType):
        super().__init__()
        self.in_type = in_type
        self.out_type = out_type
        self.space = in_type.gspace

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output for an input of this shape, ``(N, in_type.size)``."""
        shape = tuple(input_shape)
        if len(shape) != 2 or shape[1] != self.in_type.size:
            raise ValueError(f"input_shape: {type(self).__name__} got {shape}, needed (points, {self.in_type.size})")
        return (shape[0], self.out_type.size)

    def check_equivariance(self, atol: float = 1e-7, rtol: float = 1e-5) -> list[tuple[Any, float]]:
        """Check on a random cloud that the module commutes with the elements of the fiber group.

        Points are turned and not resampled, so that every element is exact.

        Args:
            atol: the largest absolute error, in float64.
            rtol: the largest error relative to the output.

        Returns:
            each element with the mean of its absolute errors.

        Raises:
            AssertionError: an error is too large.
        """
        module = copy.deepcopy(self).double().eval()
        group = self.space.fibergroup
        dimension = self.space.dimensionality
        x = GeometricTensor(
            torch.randn(12, self.in_type.size, dtype=torch.float64),
            self.in_type,
            torch.randn(12, dimension, dtype=torch.float64),
        )
        errors: list[tuple[GroupElement, float]] = []
        with torch.no_grad():
            y = module(x)
            for element in group.testing_elements():
                error = (module(x.transform(element)).tensor - y.transform_fibers(element).tensor).abs()
                limit = atol + rtol * float(y.tensor.abs().max())
                assert error.max() <= limit, f"{element}: the error is {error.max():.2e}, more than {limit:.2e}" + (
                    "; samples are exact for the elements that permute them only" if group.continuous else ""
                )
                errors.append((element, float(error.mean())))
        return errors


class PointLayer(PointModule):
    """What the layers on points share: the call and its checks.

    Attributes:
        plain: the torch module that does the work on tensors.
        num_heads: the number of heads.
        head_fields: the regular fields of a head.
    """

    plain: PointAttention

    def __init__(self, in_type: FieldType, out_type: FieldType, plain: PointAttention, head_fields: int):
        super().__init__(in_type, out_type)
        self.plain = plain
        self.num_heads = plain.num_heads
        self.head_fields = head_fields

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the layer.

        Args:
            x: features ``(N, in_type.size)`` of type ``in_type`` with ``coords`` ``(N, d)``. The output can be
                differentiated by both.
            edge_index: ``(2, E)``, the edges from keys (first row) to queries (second row), as in PyTorch Geometric and
                escnn's point convolutions. A point attends to itself only if there is such an edge; to every point that
                is there leads one. Without edges the layer searches neighbours by ``radius`` and ``num_neighbours``, or
                takes all points of the cloud.
            batch: ``(N,)``, the number of the cloud of each point; None for a single cloud. Edges need none, and with
                one stay within clouds.
            mask: ``(N,)``, False for points that are not there: they are not attended to, and their output is zero.
            measure: ``(N,)``, the positive measure of each point: one of measure 2 counts as two points. Quadrature
                weights make attention that of the continuous field that the points sample.

        Returns:
            features ``(N, out_type.size)`` of type ``out_type`` at the same coordinates.

        Raises:
            TypeError: ``x`` is not a GeometricTensor, what comes with it no tensor, or an index not of integers.
            ValueError: another gspace or type, no points, no coordinates or such that are not finite, a shape that does
                not fit, a point that does not exist or to which no edge leads, edges between clouds, edges for a layer
                that has a ``radius`` or ``num_neighbours`` of its own.
        """
        name = type(self).__name__
        x = check_points(x, self.in_type, self)
        rule = self.plain.neighbourhood
        if edge_index is not None and not rule.is_global:
            raise ValueError(
                f"edge_index: {name} got edges and searches neighbours itself ({rule}); leave out one of the two"
            )
        once(check_cloud, x.coords, edge_index, batch, mask, measure)
        y = self.plain(x.tensor, x.coords, edge_index, batch, mask, measure)
        return GeometricTensor(y, self.out_type, x.coords)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode.

        It maps ``(x, coords, edge_index=None, batch=None, mask=None, measure=None)`` to features, gives the same values
        and needs no escnn, neither to run nor to be loaded.
        """
        self.eval()
        return copy.deepcopy(self.plain).eval()

    def extra_repr(self) -> str:
        core = self.plain
        rule = core.neighbourhood
        parts = [f"{self.in_type} -> {self.out_type}", f"num_heads={self.num_heads}", f"head_fields={self.head_fields}"]
        parts += [
            f"{name}={value}"
            for name, value in (("radius", rule.radius), ("num_neighbours", rule.num_neighbours))
            if value is not None
        ]
        parts.append(f"query={core.query!r}")
        if core.keys != "all":
            parts.append(f"keys={core.keys!r}")
        parts.append(f"encoding={type(core.encoding).__name__}({core.encoding.extra_repr()})")
        if not isinstance(core.relation, Offset):
            parts.append(f"relation={core.relation}")
        if core.normalization != "softmax":
            parts.append(f"normalization={core.normalization!r}")
        if core.length_scale != (rule.radius or 1.0):
            parts.append(f"length_scale={core.length_scale}")
        if core.dropout:
            parts.append(f"dropout={core.dropout}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class _PointAttention(PointLayer):
    """What both layers on flat space share: the arguments and their checks."""

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int,
        *,
        head_fields: int | None,
        radius: float | None,
        num_neighbours: int | None,
        query: QueryMode,
        keys: KeyMode,
        encoding: Encoding | PairKernel | str | None,
        relation: Relation | None,
        length_scale: float | None,
        normalization: Normalization,
        projection: ProjectionKind,
        dropout: float,
        bias: bool,
        backend: str,
        kernel_features: int | None,
        samples: Samples | int | None,
    ):
        check_type("in_type", in_type)
        check_type("out_type", out_type)
        check_same_gspace(in_type, out_type)
        check_option("query", query, ("own", "all"))
        check_option("keys", keys, ("all", "own"))
        check_option("normalization", normalization, ("softmax", "count"))
        check_option("projection", projection, ("group", "pointwise"))
        check_option("backend", backend, ("auto", "native", "neighbours", "dense", "reference"))
        name = type(self).__name__
        if in_type.gspace.dimensionality == 0:
            raise ValueError(f"in_type: {name} needs a gspace over R^d, got {in_type.gspace.name} without a base space")
        if relation is not None and not isinstance(relation, Relation):
            raise TypeError(f"relation: got {type(relation).__name__}, needed a Relation or None")
        relation = relation or Offset()
        if num_neighbours is not None:
            check_int("num_neighbours", num_neighbours)
        neighbourhood = Neighbourhood(None if radius is None else check_length("radius", radius), num_neighbours)
        if length_scale is None:
            length_scale = neighbourhood.radius or 1.0
        group = fibers(in_type.gspace, as_samples(samples))
        num_heads = check_int("num_heads", num_heads)
        fields = choose_head_fields(out_type, num_heads, head_fields, mass(out_type))
        if projection == "pointwise":
            check_regular("out_type", out_type, 'projection="pointwise"')
        # Scalars look the same from every pose: they need none.
        lifts = projection == "group" and all(r.is_trivial() for r in in_type.representations) and group.order > 1
        project_in: ToPoses | Scalars
        if lifts:
            project_in = project_scalars(in_type, num_heads, fields, bool(bias), name)
        else:
            project_in = project_poses(in_type, num_heads, fields, group, projection, bool(bias))
        num_poses = 1 if lifts else group.order
        if query == "all" and not lifts:
            check_weights(group)
        kernel = encoding if isinstance(encoding, PairKernel) else as_encoding(encoding)
        itself = isinstance(kernel, Encoding) and (kernel.absolute or isinstance(kernel, RotaryEncoding))
        if itself and not isinstance(relation, Offset):
            raise ValueError(
                f"relation: got {relation}, but a {type(kernel).__name__} is a function of the positions themselves; "
                "leave it at None"
            )
        size = relation.size(group.dimension)
        relative = None if lifts or group.relative is None else torch.as_tensor(group.relative)
        pose_features = 0 if relative is None else relative.shape[-1]
        # With keys="own" the pose term is the same for all keys, and drops out of a softmax; as on grids, the rotary
        # encoding goes without it, too. A kernel is no sum with it, but has another constant where the query's pose is
        # that of the output.
        if isinstance(kernel, PairKernel):
            constant = keys == "own" and query == "own"
        else:
            constant = keys == "own" and normalization == "softmax" and not kernel.absolute
        seen = 1 if constant else num_poses
        values = None
        if kernel_features is not None:
            check_int("kernel_features", kernel_features)
            values = ConvolvedValues(
                size, num_heads, fields, num_poses, features=kernel_features, pose_features=pose_features
            )
        plain = PointAttention(
            project_in,
            project_heads(out_type, num_heads, fields, group, projection, bool(bias)),
            kernel.bind(size, num_heads, fields, seen, pose_features=pose_features if relative is None else relative),
            relation,
            neighbourhood,
            values,
            inverse_action=group.inverse_action,
            quotient=np.zeros((group.order, 1), dtype=np.int64) if lifts else group.quotient,
            relative=None if lifts else group.relative,
            log_measure=group.log_measure,
            num_heads=num_heads,
            # A single query without a pose contributes to every output pose by itself.
            query="own" if lifts and query == "own" else query,
            keys=keys,
            normalization=normalization,
            dropout=check_probability("dropout", dropout),
            length_scale=check_length("length_scale", length_scale),
            backend=backend,
            query_weight=mass(out_type) / group.order if query == "all" and not lifts else 1.0,
            transformation=random_transformation(in_type, out_type, group),
            opposite=opposite_poses(group),
        )
        super().__init__(in_type, out_type, plain, fields)


def opposite_poses(group: Fibers) -> np.ndarray | None:
    """The index of -h for every element h of a finite group that has the inversion of space, else None."""
    if group.samples is not None:
        return None
    for opposite in group.quotient:  # h to g⁻¹h
        inverts = np.allclose(group.inverse_action[opposite], -group.inverse_action, atol=1e-12)
        # g is its own inverse: -h sees ĥ as h sees -ĥ.
        if inverts and (group.quotient[opposite] == group.quotient[:, opposite]).all():
            return opposite
    return None


def check_cloud(
    coords: Tensor, edge_index: Any = None, batch: Any = None, mask: Any = None, measure: Any = None
) -> None:
    """What comes with the features of a cloud fits together; what a mask hides may be anything."""
    number = len(coords)
    if number == 0:
        raise ValueError("input: got a cloud without points, needed at least one")
    for name, value in (("edge_index", edge_index), ("batch", batch), ("mask", mask), ("measure", measure)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, needed a tensor or None")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (number,)):
        raise ValueError(f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, needed bool of shape ({number},)")
    if mask is not None and not bool(mask.any()):
        raise ValueError("mask: hides all points, needed at least one that is there")
    finite = coords.detach().isfinite().all(-1)
    if not bool((finite if mask is None else finite | ~mask).all()):
        raise ValueError("coords: got numbers that are not finite; leave points out by mask")
    if edge_index is not None:
        _check_index("edge_index", edge_index, (2, edge_index.shape[-1] if edge_index.dim() else 0), number)
    if batch is not None:
        _check_index("batch", batch, (number,), None)
        if edge_index is not None and bool((batch[edge_index[0]] != batch[edge_index[1]]).any()):
            raise ValueError("edge_index: got edges between points that belong to different clouds of batch")
    if edge_index is not None:
        _check_keys(edge_index, number, mask)
    if measure is not None:
        if measure.shape != (number,):
            raise ValueError(f"measure: got shape {tuple(measure.shape)}, needed ({number},)")
        good = (measure > 0) & measure.isfinite()
        if not bool((good if mask is None else good | ~mask).all()):
            raise ValueError("measure: got numbers that are not positive and finite; leave points out by mask")


def _check_keys(edge_index: Tensor, number: int, mask: Tensor | None) -> None:
    """Every point that is there has a key."""
    queries = edge_index[1] if mask is None else edge_index[1, mask[edge_index[0]]]
    without = torch.ones(number, dtype=torch.bool, device=edge_index.device) if mask is None else mask.clone()
    without[queries] = False
    if bool(without.any()):
        example, several = int(without.nonzero()[0]), int(without.sum())
        raise ValueError(
            f"edge_index: no edge leads to point {example} ({several} such of {number} points), which then has nothing "
            "to attend to; give isolated points an edge to themselves, or leave them out by mask"
        )


def _check_index(name: str, index: Tensor, shape: tuple[int, ...], number: int | None) -> None:
    """``index`` is of integers, of this shape, from 0 to ``number`` - 1."""
    if index.dtype != torch.long:
        raise TypeError(f"{name}: got {index.dtype}, needed a tensor of torch.long")
    if tuple(index.shape) != shape:
        needed = "(2, edges)" if name == "edge_index" else shape
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, needed {needed}")
    if index.numel() and (int(index.min()) < 0 or (number is not None and int(index.max()) >= number)):
        most = "" if number is None else f" to {number - 1}"
        raise ValueError(f"{name}: got {int(index.min())} to {int(index.max())}, needed numbers from 0{most}")


class PointSelfAttention(_PointAttention):
    r"""Self-attention between the points of a cloud: from any fields to any fields, equivariant to the isometries
    :math:`R^d \rtimes H`.

    For every output pose h, query :math:`(x_i, \tilde h)` and key :math:`(x_j, \hat h)`, with
    :math:`\Delta = x_j - x_i` and heads of C channels:

    .. math::
        s_h(i, \tilde h; j, \hat h) &= \langle q_i(\tilde h),\; k_j(\hat h)
            + \rho(h^{-1}\Delta,\, h^{-1}\hat h) \rangle / \sqrt C + \log\mu_j \\
        \mathrm{out}_i(h) &= \sum_{\tilde h \in Q(h)} \; \sum_{j \in N(i),\, \hat h}
            \mathrm{softmax}_{(j, \hat h)}(s_h) \; v_j(\hat h)

    and an equivariant projection of all heads together to ``out_type``. It is :class:`GroupSelfAttention` with the
    positions of points in place of a grid. Points are turned and never resampled, so that the layer is exact for every
    element of the fiber group, under translations, and under permutations of the points.

    Scalar fields (atoms, masses) look the same from every pose: from trivial fields alone queries and keys have no
    poses, and lifting costs :math:`|H|` times less.

    Args:
        in_type: the type of the input. Any fields, over a gspace on R² or R³.
        out_type: the type of the output, over the same gspace.
        num_heads: the number of heads.
        head_fields: the number C of regular fields of a head: see :class:`GroupSelfAttention`.
        radius: points attend to those within this distance, in the units of the coordinates; None for any distance.
        num_neighbours: points attend to the nearest so many, themselves included; None for all. Where neither is given
            a point attends to its whole cloud, or to the edges given on application.
        query, keys, projection, dropout, bias: as in :class:`GroupSelfAttention`.
        encoding: the positional encoding, as in :class:`GroupSelfAttention`, or a :class:`PairKernel`.
        relation: what the encoding sees of two points: :class:`~escnn_attention.geometry.relations.Offset` (None),
            :class:`~escnn_attention.geometry.relations.Pair`, :class:`~escnn_attention.geometry.relations.LogPolar`,
            or one of your own.
        length_scale: the length that is 1 to the encoding, in the units of the coordinates; by default ``radius``, or
            1. Choose the distances that matter: the encodings vary on lengths of about 1.
        samples: which elements stand for a continuous fiber group, as :class:`Samples` or as their number; None where
            it is finite.
        normalization: ``"softmax"``, or ``"count"``: scores divided by the number of keys, which may be negative.
        backend: ``"auto"``; ``"native"``, queries and the keys they see, on the CPU by a loop that is compiled for it;
            ``"neighbours"``, the same by operations of PyTorch, on every device; ``"dense"``, PyTorch's fused
            attention, for whole clouds with an encoding that factorises (Fourier, rotary, absolute, none), and without
            second derivatives, so that ``"auto"`` leaves it alone where ``coords`` require a gradient; ``"reference"``,
            the formula written out for whole clouds.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        TypeError: a type or number is none.
        ValueError: another gspace, one without a base space, heads that do not divide the fields, an unknown option.
        NotImplementedError: the fiber group is continuous, and there are no ``samples``.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import PointSelfAttention
        >>> g = gspaces.rot2dOnR3(4)
        >>> atoms = nn.FieldType(g, 5 * [g.trivial_repr])
        >>> hidden = nn.FieldType(g, 8 * [g.regular_repr])
        >>> layer = PointSelfAttention(atoms, hidden, num_heads=2, radius=3.0)
        >>> x = nn.GeometricTensor(torch.randn(7, 5), atoms, torch.randn(7, 3))
        >>> layer(x, batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([7, 32])

    Source: Hutchinson et al., "LieTransformer", ICML 2021; "Equivariant Attention on Homogeneous Spaces" (slides).
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        head_fields: int | None = None,
        radius: float | None = None,
        num_neighbours: int | None = None,
        query: QueryMode = "own",
        keys: KeyMode = "all",
        encoding: Encoding | PairKernel | str | None = None,
        relation: Relation | None = None,
        length_scale: float | None = None,
        normalization: Normalization = "softmax",
        projection: ProjectionKind = "group",
        dropout: float = 0.0,
        bias: bool = True,
        samples: Samples | int | None = None,
        backend: str = "auto",
    ):
        super().__init__(
            in_type,
            out_type,
            num_heads,
            head_fields=head_fields,
            radius=radius,
            num_neighbours=num_neighbours,
            query=query,
            keys=keys,
            encoding=encoding,
            relation=relation,
            length_scale=length_scale,
            normalization=normalization,
            projection=projection,
            dropout=dropout,
            bias=bias,
            backend=backend,
            kernel_features=None,
            samples=samples,
        )


class PointAttentiveConv(_PointAttention):
    r"""Attentive convolution on points: attention in which the values pass through a kernel of the location.

    .. math::
        \mathrm{out}_i(h) = \sum_{\tilde h \in Q(h)} \; \sum_{j \in N(i),\, \hat h}
            \alpha_h(i, \tilde h; j, \hat h) \; W(h^{-1}\Delta,\, h^{-1}\hat h) \, v_j(\hat h)

    with the attention :math:`\alpha` of :class:`PointSelfAttention`. The kernel of a head is
    :math:`W(\delta, p) = \sum_f \phi_f(\delta)\, W_f[p]`, with functions :math:`\phi_f` that a small network makes and
    matrices :math:`W_f[p]` of C × C numbers. With constant attention it is a continuous group convolution, with a
    constant kernel self-attention.

    Args:
        kernel_features: the number of functions :math:`\phi_f`.
        in_type, out_type, num_heads, head_fields, radius, num_neighbours, query: as in :class:`PointSelfAttention`.
        encoding, relation, length_scale, normalization: as in :class:`PointSelfAttention`.
        projection, dropout, bias, samples: as in :class:`PointSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        TypeError, ValueError, NotImplementedError: as :class:`PointSelfAttention`.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import PointAttentiveConv
        >>> g = gspaces.rot2dOnR2(6)
        >>> scalars, vectors = nn.FieldType(g, 3 * [g.trivial_repr]), nn.FieldType(g, 2 * [g.irrep(1)])
        >>> layer = PointAttentiveConv(scalars, vectors, num_heads=2, num_neighbours=5)
        >>> layer(nn.GeometricTensor(torch.randn(9, 3), scalars, torch.randn(9, 2))).shape
        torch.Size([9, 4])

    Source: "Equivariant Attention on Homogeneous Spaces" (slides), "Attentive Convolution".
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        kernel_features: int = 8,
        head_fields: int | None = None,
        radius: float | None = None,
        num_neighbours: int | None = None,
        query: QueryMode = "own",
        encoding: Encoding | PairKernel | str | None = None,
        relation: Relation | None = None,
        length_scale: float | None = None,
        normalization: Normalization = "softmax",
        projection: ProjectionKind = "group",
        dropout: float = 0.0,
        bias: bool = True,
        samples: Samples | int | None = None,
    ):
        kernel = as_encoding(encoding) if not isinstance(encoding, PairKernel) else encoding
        if isinstance(kernel, Encoding) and (kernel.absolute or isinstance(kernel, RotaryEncoding)):
            raise ValueError(
                f"encoding: PointAttentiveConv got {type(kernel).__name__}, needed a function of the relation of two "
                "points: mlp, separable, fourier, none or a PairKernel"
            )
        super().__init__(
            in_type,
            out_type,
            num_heads,
            head_fields=head_fields,
            radius=radius,
            num_neighbours=num_neighbours,
            query=query,
            keys="all",
            encoding=kernel,
            relation=relation,
            length_scale=length_scale,
            normalization=normalization,
            projection=projection,
            dropout=dropout,
            bias=bias,
            backend="auto",
            kernel_features=kernel_features,
            samples=samples,
        )
