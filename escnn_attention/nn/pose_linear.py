"""Pointwise equivariant linear maps."""

from __future__ import annotations

from escnn.nn import FieldType

from escnn_attention.fibers import fibers, frames, invariant_vectors, regular_fields
from escnn_attention.nn._arguments import check_option, check_regular, check_same_gspace, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.pose_linear import PoseLinear as PlainPoseLinear
from escnn_attention.plain.projections import FromPoses, ProjectionKind, ToPoses

__all__ = ["PoseLinear"]


class PoseLinear(PlainModule):
    r"""A linear map at every position, to or from regular fields: escnn's 1×1 convolution, exact in any precision.

    To regular fields :math:`y(h) = W \rho(h)^{-1} x + b`, from regular fields :math:`y = \sum_h \rho(h) W x(h) + b`,
    which are all the equivariant maps there are. escnn expands a basis that it holds in float32; here the group acts on
    the weight itself, so that ``.double()`` is equivariant to 1e-15.

    Args:
        in_type: the type of the input.
        out_type: the type of the output. One of the two consists of regular fields.
        projection: ``"group"``, or ``"pointwise"`` to mix fields and leave the poses alone (both types regular).
        bias: whether to add a bias, where it is invariant.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``.

    Raises:
        ValueError: two gspaces, or neither type consists of regular fields.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention.nn import PoseLinear
        >>> g = gspaces.rot2dOnR2(6)
        >>> hidden, vectors = nn.FieldType(g, 4 * [g.regular_repr]), nn.FieldType(g, 2 * [g.irrep(1)])
        >>> PoseLinear(hidden, vectors)(hidden(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 4, 5, 5])
    """

    plain: PlainPoseLinear

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, projection: ProjectionKind = "group", bias: bool = True
    ):
        check_type("in_type", in_type)
        check_type("out_type", out_type)
        check_same_gspace(in_type, out_type)
        check_option("projection", projection, ("group", "pointwise"))
        order = fibers(in_type.gspace).order
        if projection == "pointwise":
            check_regular("in_type", in_type, 'projection="pointwise"')
            check_regular("out_type", out_type, 'projection="pointwise"')
        map_: ToPoses | FromPoses
        if regular_fields(out_type) == len(out_type):
            fields = len(out_type)
            map_ = ToPoses(frames(in_type), in_type.size, fields, order, kind=projection, bias=fields if bias else 0)
        else:
            check_regular("in_type", in_type, f"a map to {out_type}, which is not regular,")
            map_ = FromPoses(
                frames(out_type, dual=True),
                out_type.size,
                len(in_type),
                order,
                kind=projection,
                invariants=invariant_vectors(out_type) if bias else None,
            )
        super().__init__(in_type, out_type, PlainPoseLinear(map_, order))

    def extra_repr(self) -> str:
        projection = self.plain.projection
        return f"{super().extra_repr()}, projection={projection.kind!r}, bias={projection.bias is not None}"
