"""The networks of the LieTransformer, as published."""

from __future__ import annotations

from typing import Any, Literal

import torch
from escnn.gspaces import GSpace
from escnn.nn import FieldType, IdentityModule, SequentialModule

from escnn_attention._checks import check_int, check_option
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.relations import Relation
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.nn.activations import SiLU
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.branches import DropPath
from escnn_attention.nn.heads import check_scalars
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.point_attention import PointSelfAttention
from escnn_attention.nn.point_transformer import PointBlock
from escnn_attention.nn.pose_linear import PoseLinear
from escnn_attention.plain.point_network import LiftedHead, Readout

__all__ = ["LieTransformer", "LieTransformerBlock"]


class LieTransformerBlock(PointBlock):
    r"""A block of the LieTransformer as published: regular fields to the same.

    .. math::
        y &= x + \mathrm{Attention}(\mathrm{LN}(x)) \\
        z &= y + \sigma(W_2\,\sigma(W_1\,\mathrm{LN}(y)))

    Its maps leave the poses where they are, its norms are of each pose by itself, and its pointwise network, as wide as
    the features, ends in a nonlinearity. With the trivial group poses are no matter.

    Args:
        in_type: the type of the input and of the output: regular fields.
        num_heads: the number of heads.
        options: of :class:`~escnn_attention.PointSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to the same.

    Raises:
        TypeError, ValueError: as :class:`~escnn_attention.PointSelfAttention`; fields that are not regular.

    Example:
        >>> import torch
        >>> from escnn_attention.models import LieTransformerBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> block = LieTransformerBlock(fields, num_heads=2)
        >>> block(nn.GeometricTensor(torch.randn(9, 16), fields, torch.randn(9, 2))).shape
        torch.Size([9, 16])

    Source: the implementation published with Hutchinson et al., "LieTransformer", ICML 2021.
    """

    def __init__(self, in_type: FieldType, num_heads: int = 1, **options: Any):
        super().__init__(check_type("in_type", in_type), in_type)
        self.norm = FieldLayerNorm(in_type, "pose")
        self.attention = PointSelfAttention(in_type, in_type, num_heads, projection="pointwise", **options)
        self.after = self.shortcut = IdentityModule(in_type)
        linear = [PoseLinear(in_type, in_type, projection="pointwise") for _ in range(2)]
        layers = [FieldLayerNorm(in_type, "pose"), linear[0], SiLU(in_type), linear[1], SiLU(in_type)]
        self.feed_forward = SequentialModule(*layers)
        self.drop_path = DropPath(in_type, 0.0)


class LieTransformer(CloudNetwork):
    r"""The network of the LieTransformer as published: an embedding, blocks, and a head.

    .. math::
        f^0_i(h) &= W x_i + b, \qquad f^{l+1} = \mathrm{Block}_l(f^l) \\
        y &= \mathrm{MLP}\Big( \operatorname{pool}_{i,h} f^L_i(h) \Big)
        \qquad\text{or}\qquad y = \operatorname{pool}_{i,h} W' \sigma(f^L_i(h)) + b'

    with an MLP that begins with a nonlinearity and has two hidden layers as wide as the features, and the blocks of
    :class:`LieTransformerBlock`. :class:`PointTransformer` is the network to use for all else: it has norms in front of
    its head, maps that mix poses, and any field type.

    Args:
        gspace: the symmetry, over R^2 or R^3, with a finite fiber group: translations alone for the trivial one.
        in_type: the number of scalars at each point, or their type.
        num_outputs: the numbers of the output.
        fields: the width: the number of regular fields.
        num_blocks: the number of blocks.
        num_heads: of each attention.
        encoding: of each attention; by default the published kernel,
            ``PairKernel(biases=True, last_activation=True)``.
        normalization: ``"softmax"``, or ``"count"``.
        relation: what the encoding sees of two points: see :class:`~escnn_attention.PointSelfAttention`.
        readout: the MLP on the pooled features of ``"clouds"``, or a linear map at ``"points"`` that are then pooled.
        pool: ``"mean"`` or ``"max"``, over points and poses together.
        backend: see :class:`~escnn_attention.PointSelfAttention`.

    Attributes:
        in_type: the type of the features.
        num_outputs: the numbers of the output.

    Shape:
        ``(N, in_type.size)`` at points ``(N, d)`` to ``(B, num_outputs)`` for B clouds.

    Raises:
        TypeError: a type or number is none.
        ValueError: an unknown option, or features that are not scalars.

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
        encoding: Encoding | PairKernel | str | None = None,
        normalization: Normalization = "softmax",
        relation: Relation | None = None,
        readout: Readout = "clouds",
        pool: Literal["mean", "max"] = "mean",
        backend: str = "auto",
    ):
        check_option("readout", readout, ("clouds", "points"))
        check_option("pool", pool, ("mean", "max"))
        if isinstance(in_type, int):
            in_type = FieldType(gspace, check_int("in_type", in_type) * [gspace.trivial_repr])
        check_scalars(check_type("in_type", in_type), type(self).__name__)
        hidden = FieldType(gspace, check_int("fields", fields) * [gspace.regular_repr])
        super().__init__(gspace, in_type)
        self.num_outputs = check_int("num_outputs", num_outputs)
        kernel = PairKernel(biases=True, last_activation=True) if encoding is None else encoding
        options: dict[str, Any] = {
            "encoding": kernel,
            "normalization": normalization,
            "relation": relation,
            "backend": backend,
        }
        self.embedding = PoseLinear(in_type, hidden)
        self.blocks = torch.nn.ModuleList(
            LieTransformerBlock(hidden, num_heads, **options) for _ in range(check_int("num_blocks", num_blocks))
        )
        self.head = LiftedHead(fields, gspace.fibergroup.order(), num_outputs, pool, readout)
