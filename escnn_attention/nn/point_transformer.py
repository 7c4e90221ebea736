"""A transformer block on point clouds."""

from __future__ import annotations

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor

from escnn_attention._checks import check_int, check_probability
from escnn_attention.encodings import Encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.functional import KeyMode, QueryMode
from escnn_attention.functional.points.attention import Normalization
from escnn_attention.geometry.clouds import once, where_present
from escnn_attention.geometry.relations import Relation
from escnn_attention.groups.fibers import mass
from escnn_attention.groups.samples import Samples
from escnn_attention.nn.arguments import check_points, check_type
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.point_attention import PointAttentiveConv, PointModule, PointSelfAttention, check_cloud
from escnn_attention.nn.pose_linear import PoseFeedForward, PoseLinear
from escnn_attention.nn.silu import SiLU
from escnn_attention.nn.transformer import dropout_of, export_of, shortcut_of
from escnn_attention.plain.point_transformer import PointTransformerBlock as PlainPointTransformerBlock
from escnn_attention.plain.projections import ProjectionKind

__all__ = ["PointTransformerBlock"]


class PointBlock(PointModule):
    """What transformer blocks on points share: the call and its checks."""

    def forward(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> GeometricTensor:
        """Apply the block; the arguments are those of :meth:`PointSelfAttention.forward`.

        The output at points that a mask hides is zero.
        """
        x = check_points(x, self.in_type, self)
        if mask is None:
            return self._of_all(x, edge_index, batch, measure)
        once(check_cloud, x.coords, edge_index, batch, mask, measure)

        def layer(tensor: Tensor, coords: Tensor, *others: Tensor | None) -> Tensor:
            return self._of_all(GeometricTensor(tensor, self.in_type, coords), *others).tensor

        y = where_present(layer, mask, x.tensor, x.coords, edge_index, batch, measure)
        return GeometricTensor(y, self.out_type, x.coords)

    def _of_all(
        self, x: GeometricTensor, edge_index: Tensor | None, batch: Tensor | None, measure: Tensor | None
    ) -> GeometricTensor:
        """The same of points that are all there."""
        raise NotImplementedError


class PointTransformerBlock(PointBlock):
    r"""Attention between points and a network at every point, each with a residual connection.

    It is the pre-norm transformer

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))) \\
        z &= y + \mathrm{Dropout}(W_2\,\sigma(W_1\,\mathrm{LN}(y)))

    with LN a :class:`FieldLayerNorm`, :math:`\sigma` a :class:`SiLU` and W equivariant maps by way of regular fields,
    or of functions on the samples of a continuous fiber group. The shortcut is the identity where the types agree and
    an equivariant map elsewhere.

    Args:
        in_type: the type of the input. Any fields whose representations are orthogonal.
        out_type: the type of the output, likewise.
        num_heads, head_fields, radius, num_neighbours, query, keys: as in :class:`PointSelfAttention`.
        encoding, relation, length_scale, normalization: as in :class:`PointSelfAttention`.
        projection, bias, samples, backend: as in :class:`PointSelfAttention`.
        kernel_features: None for self-attention; a number for :class:`PointAttentiveConv` with so many.
        hidden_fields: the number of regular fields in the pointwise network; by default twice the output's channels, in
            units of a regular field, and at least one.
        attention_dropout: the dropout of the attention probabilities.
        dropout: the dropout of the branches; whole fields where a field has no pointwise nonlinearities.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        TypeError, ValueError, NotImplementedError: as the layers inside raise.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from escnn_attention import PointTransformerBlock
        >>> g = gspaces.flipRot2dOnR2(3)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr] + 2 * [g.irrep(1, 1)])
        >>> block = PointTransformerBlock(fields, fields, num_heads=2, num_neighbours=6)
        >>> block(nn.GeometricTensor(torch.randn(9, fields.size), fields, torch.randn(9, 2))).shape
        torch.Size([9, 28])

    Source: Hutchinson et al., "LieTransformer", ICML 2021, Section 3.3; Xiong et al., "On Layer Normalization in the
    Transformer Architecture", ICML 2020.
    """

    def __init__(
        self,
        in_type: FieldType,
        out_type: FieldType,
        num_heads: int = 1,
        *,
        kernel_features: int | None = None,
        hidden_fields: int | None = None,
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
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        bias: bool = True,
        samples: Samples | int | None = None,
        backend: str = "auto",
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        dropout = check_probability("dropout", dropout)
        check_probability("attention_dropout", attention_dropout)
        self.attention: PointSelfAttention | PointAttentiveConv
        if kernel_features is None:
            self.attention = PointSelfAttention(
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
                dropout=attention_dropout,
                bias=bias,
                samples=samples,
                backend=backend,
            )
        else:
            if keys != "all" or backend != "auto":
                name = "keys" if keys != "all" else "backend"
                raise ValueError(f"{name}: an attentive convolution (kernel_features) has no such option; leave it out")
            self.attention = PointAttentiveConv(
                in_type,
                out_type,
                num_heads,
                kernel_features=kernel_features,
                head_fields=head_fields,
                radius=radius,
                num_neighbours=num_neighbours,
                query=query,
                encoding=encoding,
                relation=relation,
                length_scale=length_scale,
                normalization=normalization,
                projection=projection,
                dropout=attention_dropout,
                bias=bias,
                samples=samples,
            )
        if hidden_fields is None:
            hidden_fields = max(1, 2 * out_type.size // mass(out_type))
        check_int("hidden_fields", hidden_fields)
        network: list[EquivariantModule]
        if in_type.fibergroup.continuous:
            network = [PoseFeedForward(out_type, out_type, hidden_fields, samples=samples, bias=bias)]
        else:
            hidden = FieldType(in_type.gspace, hidden_fields * [in_type.gspace.regular_repr])
            network = [
                PoseLinear(out_type, hidden, projection=projection, bias=bias),
                SiLU(hidden),
                PoseLinear(hidden, out_type, projection=projection, bias=bias),
            ]
        self.norm = FieldLayerNorm(in_type)
        self.after: EquivariantModule = dropout_of(out_type, dropout)
        self.shortcut = shortcut_of(in_type, out_type, projection)
        self.feed_forward = SequentialModule(FieldLayerNorm(out_type), *network, dropout_of(out_type, dropout))

    def _of_all(
        self, x: GeometricTensor, edge_index: Tensor | None, batch: Tensor | None, measure: Tensor | None
    ) -> GeometricTensor:
        attended = self.attention(self.norm(x), edge_index, batch, measure=measure)
        y = self.shortcut(x) + self.after(attended)
        return y + self.feed_forward(y)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`PointSelfAttention.export`."""
        self.eval()
        shortcut = torch.nn.Identity() if self.in_type == self.out_type else self.shortcut.export()
        return PlainPointTransformerBlock(
            self.norm.export(), self.attention.export(), shortcut, export_of(self.feed_forward)
        ).eval()
