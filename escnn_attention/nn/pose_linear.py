"""Pointwise equivariant maps."""

from __future__ import annotations

import numpy as np
from escnn.nn import FieldType

from escnn_attention._checks import check_int, check_option
from escnn_attention.groups.fibers import fibers, frames, invariant_vectors, mass, regular_fields
from escnn_attention.groups.lie_algebra import random_transformation
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.activations import Activation, plain_activation
from escnn_attention.nn.arguments import check_regular, check_types
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.pose_linear import FieldLinear as PlainFieldLinear
from escnn_attention.plain.pose_linear import Isotypic
from escnn_attention.plain.pose_linear import PoseFeedForward as PlainPoseFeedForward
from escnn_attention.plain.pose_linear import PoseLinear as PlainPoseLinear
from escnn_attention.plain.projections import FromPoses, ProjectionKind, ToPoses

__all__ = ["FieldLinear", "PoseFeedForward", "PoseLinear"]


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
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Raises:
        ValueError: two gspaces, or neither type consists of regular fields.

    Example:
        >>> import torch
        >>> from escnn_attention.nn import PoseLinear
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(6)
        >>> hidden, vectors = nn.FieldType(g, 4 * [g.regular_repr]), nn.FieldType(g, 2 * [g.irrep(1)])
        >>> PoseLinear(hidden, vectors)(hidden(torch.randn(1, 24, 5, 5))).shape
        torch.Size([1, 4, 5, 5])
    """

    plain: PlainPoseLinear
    pointwise = True

    def __init__(
        self, in_type: FieldType, out_type: FieldType, *, projection: ProjectionKind = "group", bias: bool = True
    ):
        check_types(in_type, out_type)
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


class PoseFeedForward(PlainModule):
    r"""A pointwise network of one hidden layer: to regular fields, a nonlinearity, and to any fields.

    .. math:: y = \sum_h \rho_\mathrm{out}(h)\, W_2\, \sigma(W_1 \rho_\mathrm{in}(h)^{-1} x + b_1) + b_2

    For a finite fiber group it is :class:`PoseLinear`, :class:`escnn_attention.SiLU` and :class:`PoseLinear`. For a
    continuous one the hidden fields are functions on its :class:`escnn_attention.Samples`, on which a nonlinearity may
    act, and the sum is a quadrature: exact for the elements of a subgroup that is sampled, and otherwise up to an error
    that falls with the number of samples.

    Args:
        in_type: the type of the input.
        out_type: the type of the output.
        hidden_fields: the number of hidden fields; by default twice the channels of the output, in units of what a
            field holds.
        samples: for a continuous fiber group, its samples or their number.
        bias: whether there are biases; that of the output where it is invariant.
        activation: :math:`\sigma`, ``"silu"``, ``"gelu"`` or ``"relu"``.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Raises:
        ValueError: two gspaces, or samples that the fiber group has not.
        NotImplementedError: the fiber group is continuous and there are no samples.

    Example:
        >>> import torch
        >>> from escnn_attention.nn import PoseFeedForward
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot3dOnR3()
        >>> vectors = nn.FieldType(g, 4 * [g.irrep(1)])
        >>> PoseFeedForward(vectors, vectors, samples=24)(vectors(torch.randn(1, 12, 3, 3, 3))).shape
        torch.Size([1, 12, 3, 3, 3])
    """

    plain: PlainPoseFeedForward
    pointwise = True

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        hidden_fields: int | None = None,
        *,
        samples: Samples | int | None = None,
        bias: bool = True,
        activation: Activation = "silu",
    ):
        check_types(in_type, out_type)
        group = fibers(in_type.gspace, as_samples(samples))
        if hidden_fields is None:
            hidden_fields = max(1, 2 * out_type.size // mass(out_type))
        fields = check_int("hidden_fields", hidden_fields)
        expand = ToPoses(frames(in_type, group=group), in_type.size, fields, group.order, bias=fields if bias else 0)
        contract = FromPoses(
            frames(out_type, group=group, dual=True),
            out_type.size,
            fields,
            group.order,
            invariants=invariant_vectors(out_type) if bias else None,
            mass=mass(out_type),
        )
        super().__init__(
            in_type,
            out_type,
            PlainPoseFeedForward(
                expand, plain_activation(activation), contract, random_transformation(in_type, out_type, group)
            ),
        )
        self.hidden_fields = fields
        self.samples = group.samples

    def extra_repr(self) -> str:
        samples = "" if self.samples is None else f", samples={self.samples!r}"
        return f"{super().extra_repr()}, hidden_fields={self.hidden_fields}{samples}"


class FieldLinear(PlainModule):
    r"""Every equivariant linear map between two types at every position, exact for every fiber group.

    By Schur's lemma it mixes the copies of an irrep among each other, by numbers, or by elements of the algebra of maps
    of the irrep to itself, which for a rotation of the plane are complex numbers. escnn's 1×1 convolution is the same
    map; it holds its basis in float32.

    Args:
        in_type: the type of the input.
        out_type: the type of the output.
        bias: whether to add a bias, where it is invariant.

    Shape:
        ``(B, in_type.size, *space)`` to ``(B, out_type.size, *space)``, or ``(N, size)`` at scattered points.

    Raises:
        ValueError: two gspaces.

    Example:
        >>> import torch
        >>> from escnn_attention.nn import FieldLinear
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(-1)
        >>> one, other = nn.FieldType(g, 3 * [g.irrep(1)]), nn.FieldType(g, [g.irrep(1), g.trivial_repr])
        >>> FieldLinear(one, other)(one(torch.randn(1, 6, 5, 5))).shape
        torch.Size([1, 3, 5, 5])
    """

    plain: PlainFieldLinear
    pointwise = True

    def __init__(self, in_type: FieldType, out_type: FieldType, *, bias: bool = True):
        check_types(in_type, out_type)
        sources, targets = _irreps(in_type), _irreps(out_type)
        parts = [
            Isotypic(
                source=np.stack([reads for reads, _ in sources[id]]),
                target=np.stack([writes for _, writes in targets[id]], axis=1),
                endomorphisms=in_type.fibergroup.irrep(*id).endomorphism_basis(),
            )
            for id in sources
            if id in targets
        ]
        invariants = invariant_vectors(out_type) if bias else None
        super().__init__(in_type, out_type, PlainFieldLinear(parts, out_type.size, invariants))


def _irreps(field_type: FieldType) -> dict[tuple, list[tuple[np.ndarray, np.ndarray]]]:
    """The matrices that read each copy of an irrep off a type, ``(d, size)``, and that write it, ``(size, d)``."""
    found: dict[tuple, list[tuple[np.ndarray, np.ndarray]]] = {}
    start = 0
    for representation in field_type.representations:
        channels, position = slice(start, start + representation.size), 0
        for id in representation.irreps:
            here = slice(position, position + field_type.fibergroup.irrep(*id).size)
            reads = np.zeros((here.stop - here.start, field_type.size))
            reads[:, channels] = representation.change_of_basis_inv[here]
            writes = np.zeros((field_type.size, here.stop - here.start))
            writes[channels] = representation.change_of_basis[:, here]
            found.setdefault(id, []).append((reads, writes))
            position = here.stop
        start = channels.stop
    return found
