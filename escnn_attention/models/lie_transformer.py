"""The networks of the LieTransformer, as published."""

from __future__ import annotations

import copy
from typing import Any, Literal, TypedDict

import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_int, check_option, check_unused
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.relations import LiftedMotion, Relation
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.convolutions import field_type_of, regular_type
from escnn_attention.nn.arguments import check_options, check_type, option_names
from escnn_attention.nn.heads import check_scalars
from escnn_attention.nn.point_lift import PointLift
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.nn.transformer import PointTransformerBlock
from escnn_attention.plain.point_lift import LiftedNetwork
from escnn_attention.plain.point_network import LiftedHead, Readout


class LieBlockOptions(TypedDict, total=False):
    """Options of the blocks of a :class:`LieTransformer`."""

    encoding: Encoding | PairKernel | str | None
    normalization: Normalization
    relation: Relation | None
    backend: str
    num_neighbours: int | None


class LieTransformer(CloudNetwork):
    r"""The network of the LieTransformer as published: an embedding, blocks, and a head.

    .. math::
        f^0_i(h) &= W x_i + b, \qquad g^l = f^l + \mathrm{Attention}_l(\mathrm{LN}(f^l)), \qquad
            f^{l+1} = g^l + \sigma(W_2^l\,\sigma(W_1^l\,\mathrm{LN}(g^l))) \\
        y &= \mathrm{MLP}\Big( \operatorname{pool}_{i,h} f^L_i(h) \Big)
        \qquad\text{or}\qquad y = \operatorname{pool}_{i,h} W' \sigma(f^L_i(h)) + b'

    with an MLP that begins with a nonlinearity and has two hidden layers as wide as the features. The blocks are
    :class:`~escnn_attention.PointTransformerBlock`: maps do not mix poses, norms act on each pose by itself, and the
    pointwise network, as wide as the features, ends in a nonlinearity. Use :class:`PointTransformer` for everything but
    comparisons with the published network: it has a norm before its head, maps that mix poses, and any field type.

    Args:
        gspace: the symmetry, over R^2 or R^3, with a finite fiber group: translations alone for the trivial one. Or
            ``gspaces.rot2dOnR2(-1)`` or ``gspaces.rot3dOnR3()``, with ``lift_samples``.
        in_type: the number of scalars at each point, or their type.
        num_outputs: the numbers of the output.
        fields: the width: the number of regular fields.
        num_blocks: the number of blocks.
        num_heads: of each attention.
        readout: the MLP on the pooled features of ``"clouds"``, or a linear map at ``"points"`` that are then pooled.
        pool: ``"mean"`` or ``"max"``, over points and poses together.
        lift_samples: with all rotations of the plane or of space, the number of rotations that are drawn for each
            point: see :class:`~escnn_attention.PointLift`. The sum over h is then over them.
        positive_quaternions: draw them with positive real parts, where ``relation`` is
            ``LiftedMotion("quaternion")``: see :class:`~escnn_attention.PointLift`.
        options: of the blocks: ``encoding``, by default the published kernel,
            ``PairKernel(biases=True, last_activation=True)``; ``relation``, by default the offset, or for lifted points
            :class:`~escnn_attention.LiftedMotion`; ``normalization``, ``backend``; and ``num_neighbours``, with
            ``lift_samples`` the nearest lifts by :meth:`LiftedMotion.distance <escnn_attention.LiftedMotion.distance>`.

    Attributes:
        lift: the :class:`~escnn_attention.PointLift`, or None.

    Shape:
        ``(N, in_type.size)`` at points ``(N, d)`` to ``(B, num_outputs)`` for B clouds.

    Example:
        >>> import torch
        >>> from escnn_attention.models import LieTransformer
        >>> from escnn import gspaces
        >>> network = LieTransformer(gspaces.rot2dOnR2(4), 3, num_outputs=2, fields=8, num_blocks=2, num_heads=2)
        >>> network(torch.randn(7, 3), torch.randn(7, 2), batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([2, 2])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, and the published implementation: its architectures
    "model_1" (``"clouds"``) and "lieconv" (``"points"``).
    """

    def __init__(
        self,
        gspace: GSpace,
        in_type: int | FieldType,
        num_outputs: int,
        *,
        fields: int,
        num_blocks: int,
        num_heads: int,
        readout: Readout = "clouds",
        pool: Literal["mean", "max"] = "mean",
        lift_samples: int | None = None,
        positive_quaternions: bool = False,
        **options: Unpack[LieBlockOptions],
    ):
        check_options(type(self).__name__, options, option_names(LieTransformer))
        check_option("readout", readout, ("clouds", "points"))
        check_option("pool", pool, ("mean", "max"))
        if isinstance(in_type, int):
            in_type = field_type_of("in_type", in_type, gspace)
        check_scalars(check_type("in_type", in_type), type(self).__name__)
        super().__init__(gspace, in_type)
        self.lift = _lift(in_type, lift_samples, options.get("relation"), positive_quaternions)
        if self.lift is not None:
            in_type, options["relation"] = self.lift.out_type, options.get("relation") or LiftedMotion()
        hidden = regular_type(in_type.gspace, check_int("fields", fields))
        self.num_outputs = check_int("num_outputs", num_outputs)
        if options.get("encoding") is None:
            options["encoding"] = PairKernel(biases=True, last_activation=True)
        self.embedding = PoseLinear(in_type, hidden)
        # As in torch.nn.Linear: without a bias the norm reduces a single scalar to its sign.
        bias = self.embedding.plain.projection.bias
        assert bias is not None
        torch.nn.init.uniform_(bias, -(in_type.size**-0.5), in_type.size**-0.5)
        published: dict[str, Any] = {"norm_scope": "pose", "projection": "pointwise", "last_activation": True}
        published |= {"hidden_fields": fields, **options}
        self.blocks = torch.nn.ModuleList(
            PointTransformerBlock(hidden, hidden, num_heads, **published)
            for _ in range(check_int("num_blocks", num_blocks))
        )
        self.head = LiftedHead(fields, in_type.fibergroup.order(), num_outputs, pool, readout)

    def forward(  # type: ignore[override]
        self,
        input: GeometricTensor | Tensor,
        coords: Tensor | None = None,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
        lifts: Tensor | None = None,
    ) -> Tensor:
        """The output of the head.

        Args:
            input, coords, edge_index, batch, mask, measure: as in :meth:`CloudNetwork.forward`.
            lifts: the rotations of each point, of a network with ``lift_samples``: angles ``(N, S)`` or quaternions
                ``(N, S, 4)``, real part first. None to draw them: see :class:`~escnn_attention.PointLift`.

        Raises:
            TypeError, ValueError: as :meth:`CloudNetwork.forward`; lifts of another shape, or of points without any.
        """
        if self.lift is None:
            if lifts is not None:
                raise ValueError("lifts: got some, and this network has no lift_samples; leave them out")
            return super().forward(input, coords, edge_index, batch, mask, measure)
        x = self._as_cloud(input, coords)
        return self._forward(*self.lift(x, edge_index, batch, mask=mask, measure=measure, lifts=lifts))

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`CloudNetwork.export`.

        With ``lift_samples`` it takes ``lifts`` behind the ``measure``.
        """
        network = super().export()
        if self.lift is None:
            return network
        return LiftedNetwork(lift=copy.deepcopy(self.lift.plain), network=network).eval()


def _lift(
    in_type: FieldType, lift_samples: int | None, relation: Relation | None, positive_quaternions: bool
) -> PointLift | None:
    """The lift of a continuous fiber group; None for a finite one."""
    group = in_type.fibergroup
    if not (isinstance(relation, LiftedMotion) and relation.rotation == "quaternion"):
        why = 'no quaternions are seen without relation=LiftedMotion("quaternion")'
        check_unused("positive_quaternions", positive_quaternions, False, why)
    if not group.continuous:
        check_unused(
            "lift_samples", lift_samples, None, f"the fiber group {group.name} is finite, and has all its poses"
        )
        return None
    if lift_samples is None:
        raise ValueError(
            f"lift_samples: got None, and the fiber group {group.name} is continuous; needed the number of rotations "
            "that are drawn for each point, or a finite group"
        )
    if relation is not None and not isinstance(relation, LiftedMotion):
        raise ValueError(f"relation: got {relation}, needed a LiftedMotion between lifted points, or None")
    check_int("lift_samples", lift_samples)
    return PointLift(in_type, lift_samples, positive_quaternions)
