"""A transformer block on point clouds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor

from escnn_attention._checks import check_int, check_probability, check_unused
from escnn_attention.geometry.cache import kept
from escnn_attention.geometry.points import where_present
from escnn_attention.groups.fibers import mass
from escnn_attention.groups.samples import Samples
from escnn_attention.nn.activations import Activation
from escnn_attention.nn.arguments import check_points, check_type
from escnn_attention.nn.batch_norm import BlockNorm, check_norm_kind, norm_of
from escnn_attention.nn.branches import DropPath, ends_of
from escnn_attention.nn.clouds import check_cloud
from escnn_attention.nn.options import AttentionLike, changed, check_options, choose_attention, option_names
from escnn_attention.nn.point_attention import PointAttentiveConv, PointSelfAttention
from escnn_attention.nn.point_module import PointModule
from escnn_attention.nn.transformer import dropout_of, export_of, pointwise_network, shortcut_of
from escnn_attention.plain.blocks import PointTransformerBlock as PlainPointTransformerBlock
from escnn_attention.plain.projections import ProjectionKind

__all__ = ["PointBlock", "PointTransformerBlock", "block_options"]


class PointBlock(PointModule):
    """What transformer blocks on points share: attention and a pointwise network, each with a shortcut; the export."""

    norm: EquivariantModule
    attention: EquivariantModule
    after: EquivariantModule
    shortcut: EquivariantModule
    feed_forward: SequentialModule
    drop_path: DropPath

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
        """Apply the block; the arguments are those of :meth:`PointSelfAttention.forward`.

        The output at points that a mask hides is zero.
        """
        x = check_points(x, self.in_type, self)
        if mask is None:
            return self._of_all(x, edge_index, batch, measure, edge_attr)
        kept(check_cloud, x.coords, edge_index, batch, mask, measure, edge_attr)

        def layer(tensor: Tensor, coords: Tensor, *others: Tensor | None) -> Tensor:
            return self._of_all(GeometricTensor(tensor, self.in_type, coords), *others).tensor

        y = where_present(layer, mask, x.tensor, x.coords, edge_index, batch, measure, edge_attr)
        return GeometricTensor(y, self.out_type, x.coords)

    def _of_all(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> GeometricTensor:
        """The block on points that are all there, none of them hidden by a mask."""
        attended = self._attend(self.norm(x), edge_index, batch, measure, edge_attr)
        y = self.shortcut(x) + self.drop_path(self.after(attended), batch)
        return y + self.drop_path(self.feed_forward(y), batch)

    @property
    def edge_dim(self) -> int | None:
        """The number of features of an edge, of the attention; None without."""
        return getattr(self.attention, "edge_dim", None)

    def _attend(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> GeometricTensor:
        """The attention of the block, which may know of no features of edges if it was given."""
        of_edges = {} if edge_attr is None else {"edge_attr": edge_attr}
        y: GeometricTensor = self.attention(x, edge_index, batch, measure=measure, **of_edges)
        return y

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`PointSelfAttention.export`."""
        self.eval()
        return PlainPointTransformerBlock(
            self.norm.export(),
            self.attention.export(),
            self.shortcut.export(),
            export_of(self.feed_forward),
            export_of(self.after) if isinstance(self.after, SequentialModule) else None,
        ).eval()


class PointTransformerBlock(PointBlock):
    r"""Attention between points and a network at every point, each with a residual connection.

    It is the pre-norm transformer

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))) \\
        z &= y + \mathrm{Dropout}(W_2\,\sigma(W_1\,\mathrm{LN}(y)))

    with LN a :class:`FieldLayerNorm`, :math:`\sigma` the activation and W equivariant maps by way of regular fields,
    or of functions on the samples of a continuous fiber group. The shortcut is the identity where the types agree and
    an equivariant map elsewhere.

    Args:
        in_type: the type of the input. Any fields whose representations are orthogonal.
        out_type: the type of the output, likewise.
        num_heads: the number of heads.
        attention: another attention: a module from ``in_type`` to ``out_type`` that is called as
            :class:`PointSelfAttention` is, or a function of the two types that makes one. The options of an attention
            are then left to it.
        kernel_features: None for self-attention; a number for :class:`PointAttentiveConv` with so many.
        hidden_fields: the number of regular fields in the pointwise network; by default twice the output's channels, in
            units of a regular field, and at least one.
        activation: :math:`\sigma`: ``"silu"``, ``"gelu"`` or ``"relu"``.
        last_activation: whether the pointwise network ends in :math:`\sigma`, too, as that of the LieTransformer; the
            fields of ``out_type`` then have pointwise nonlinearities.
        projection, bias, samples: of the attention and of the pointwise network, as in :class:`PointSelfAttention`.
        attention_dropout: the dropout of the attention probabilities.
        dropout: the dropout of the branches; whole fields where a field has no pointwise nonlinearities.
        norm_kind: ``"layer"``, ``"rms"``, ``"fields"`` or ``"batch"``: LN is a :class:`FieldLayerNorm` of this
            kind, or a :class:`FieldBatchNorm`; None for the layer norm of the type.
        norm_eps: what the norms add to the mean square.
        layer_scale: the gains at first of a :class:`LayerScale` at the end of both branches; None for no gains.
        drop_path: the probability with which a branch is left out in training, for a cloud as a whole
            (:class:`DropPath`).
        options: of the attention: ``head_fields``, ``radius``, ``num_neighbours``, ``query``, ``keys``,
            ``shared_scores``, ``encoding``, ``relation``, ``length_scale``, ``normalization``, ``qk_norm``,
            ``edge_dim`` and ``backend``, as in :class:`PointSelfAttention`; with ``kernel_features`` neither ``keys``
            nor ``shared_scores`` nor ``backend``.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to ``(N, out_type.size)`` with the same coordinates.

    Raises:
        TypeError: there is no such option, or ``attention`` is no module and makes none, or as the layers inside raise.
        ValueError, NotImplementedError: ``attention`` is of other types, or as the layers inside raise.

    Example:
        >>> import torch
        >>> from escnn_attention import PointTransformerBlock
        >>> from escnn import gspaces, nn
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
        attention: AttentionLike | None = None,
        kernel_features: int | None = None,
        hidden_fields: int | None = None,
        activation: Activation = "silu",
        last_activation: bool = False,
        projection: ProjectionKind = "group",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        norm_kind: BlockNorm | None = None,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        bias: bool = True,
        samples: Samples | int | None = None,
        **options: Any,
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        dropout = check_probability("dropout", dropout)
        check_probability("attention_dropout", attention_dropout)
        check_options(type(self).__name__, options, block_options())
        shared: dict[str, Any] = {"projection": projection, "bias": bias, "samples": samples}
        if attention is not None:
            own: dict[str, Any] = {"num_heads": (num_heads, 1), "kernel_features": (kernel_features, None)}
            own["attention_dropout"] = (attention_dropout, 0.0)
            layer: EquivariantModule = choose_attention(attention, in_type, out_type, {**changed(own), **options})
        elif kernel_features is None:
            layer = PointSelfAttention(in_type, out_type, num_heads, dropout=attention_dropout, **shared, **options)
        else:
            for name, default in (("keys", "all"), ("shared_scores", False), ("backend", "auto")):
                why = "an attentive convolution (kernel_features) has no such option"
                check_unused(name, options.pop(name, default), default, why)
            options["kernel_features"] = kernel_features
            layer = PointAttentiveConv(in_type, out_type, num_heads, dropout=attention_dropout, **shared, **options)
        if hidden_fields is None:
            hidden_fields = max(1, 2 * out_type.size // mass(out_type))
        check_int("hidden_fields", hidden_fields)
        shared |= {"activation": activation, "last_activation": last_activation}
        network = pointwise_network(out_type, hidden_fields, **shared)
        norm_for = partial(norm_of, kind=check_norm_kind(norm_kind), eps=norm_eps)
        gains = ends_of(out_type, layer_scale)
        self.attention = layer
        self.norm = norm_for(in_type)
        self.after: EquivariantModule = dropout_of(out_type, dropout)
        if gains:
            self.after = SequentialModule(self.after, *gains)
        self.shortcut = shortcut_of(in_type, out_type, projection)
        self.feed_forward = SequentialModule(
            norm_for(out_type), *network, dropout_of(out_type, dropout), *ends_of(out_type, layer_scale)
        )
        self.drop_path = DropPath(out_type, check_probability("drop_path", drop_path))


def block_options() -> list[str]:
    """The names of all options of a :class:`PointTransformerBlock`, those of its attention included."""
    own = option_names(PointTransformerBlock)
    return [*own, *(n for n in option_names(PointSelfAttention) if n not in own)]
