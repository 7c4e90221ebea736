"""A transformer block on the sphere."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_probability
from escnn_attention.nn.arguments import check_type
from escnn_attention.nn.batch_norm import BlockNorm, check_norm_kind, norm_of
from escnn_attention.nn.branches import DropPath, ends_of
from escnn_attention.nn.module import PlainModule
from escnn_attention.nn.options import AttentionLike, changed, check_options, choose_attention, option_names
from escnn_attention.nn.point_transformer import PointBlock
from escnn_attention.nn.sphere_attention import SphereSelfAttention, check_on_sphere
from escnn_attention.nn.stabiliser import Stabiliser
from escnn_attention.nn.transformer import dropout_of, shortcut_of
from escnn_attention.plain.local_frames import LocalFrames
from escnn_attention.plain.sphere_attention import SphereFeedForward
from escnn_attention.plain.sphere_attention import SphereTransformerBlock as PlainBlock

__all__ = ["SphereTransformerBlock"]


class SphereTransformerBlock(PointBlock):
    r"""Attention on the sphere and a network at every point, each with a residual connection.

    .. math::
        y &= \mathrm{shortcut}(x) + \mathrm{Dropout}(\mathrm{Attention}(\mathrm{LN}(x))) \\
        z &= y + \mathrm{Dropout}(N(\mathrm{LN}(y)))

    with LN a :class:`FieldLayerNorm`. The network N makes functions on its frames of the fields at a point, applies a
    SiLU there, and makes fields of them again. The shortcut is the identity where the types agree, and an equivariant
    map elsewhere.

    Args:
        in_type, out_type, num_heads: as in :class:`SphereSelfAttention`.
        attention: another attention: a module from ``in_type`` to ``out_type`` that is called as
            :class:`SphereSelfAttention` is, or a function of the two types that makes one. The options of an attention
            are then left to it.
        samples, bias: of the attention and of the network N, as in :class:`SphereSelfAttention`.
        hidden_fields: the number of functions in the network; by default twice the fields of ``out_type``.
        attention_dropout: the dropout of the attention probabilities.
        dropout: the dropout of the branches, of whole fields where a field is not a scalar.
        norm_kind: ``"layer"``, ``"rms"``, ``"fields"`` or ``"batch"``: LN is a :class:`FieldLayerNorm` of this
            kind, or a :class:`FieldBatchNorm`; None for the layer norm of the type.
        norm_eps: what the norms add to the mean square.
        layer_scale: the gains at first of a :class:`LayerScale` at the end of both branches; None for no gains.
        drop_path: the probability with which a branch is left out in training, for a sphere as a whole
            (:class:`DropPath`).
        options: of the attention: ``head_fields``, ``radius``, ``num_neighbours``, ``query``, ``encoding``,
            ``length_scale``, ``normalization``, ``qk_norm`` and ``edge_dim``, as in :class:`SphereSelfAttention`.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, 3)``, unit vectors, to ``(N, out_type.size)`` with the same
        coordinates.

    Raises:
        TypeError: there is no such option, or ``attention`` is no module and makes none, or as
            :class:`SphereSelfAttention`.
        ValueError: ``attention`` is of other types, or as :class:`SphereSelfAttention`.

    Example:
        >>> import torch
        >>> from escnn_attention import SphereTransformerBlock
        >>> from escnn import gspaces, nn
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
        attention: AttentionLike | None = None,
        samples: int = 8,
        hidden_fields: int | None = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        norm_kind: BlockNorm | None = None,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        bias: bool = True,
        **options: Any,
    ):
        super().__init__(check_type("in_type", in_type), check_type("out_type", out_type))
        dropout = check_probability("dropout", dropout)
        check_probability("attention_dropout", attention_dropout)
        shared: dict[str, Any] = {"samples": samples, "bias": bias}
        passed_on = [n for n in option_names(SphereSelfAttention) if n not in ("dropout", *shared)]
        check_options(type(self).__name__, options, [*option_names(SphereTransformerBlock), *passed_on])
        if attention is None:
            layer: EquivariantModule = SphereSelfAttention(
                in_type, out_type, num_heads, dropout=attention_dropout, **shared, **options
            )
        else:
            own = changed({"num_heads": (num_heads, 1), "attention_dropout": (attention_dropout, 0.0)})
            layer = choose_attention(attention, in_type, out_type, {**own, **options})
        stabiliser = Stabiliser(in_type, samples)
        hidden = 2 * len(out_type) if hidden_fields is None else check_int("hidden_fields", hidden_fields)
        self.attention = layer
        kind = check_norm_kind(norm_kind)
        self.norms = torch.nn.ModuleList(norm_of(fields, kind, eps=norm_eps) for fields in (in_type, out_type))
        self.gains = torch.nn.ModuleList(g for _ in range(2) for g in ends_of(out_type, layer_scale))
        self.drop_path = DropPath(out_type, check_probability("drop_path", drop_path))
        self.shortcut = shortcut_of(in_type, out_type, "group")
        self.dropout = dropout_of(out_type, dropout)
        self.network = SphereFeedForward(
            LocalFrames(stabiliser.generators(out_type)),
            stabiliser.read(out_type, hidden, bias=hidden if bias else 0),
            stabiliser.mean(out_type, hidden, 1, bool(bias)),
        )

    def _of_all(
        self,
        x: GeometricTensor,
        edge_index: Tensor | None,
        batch: Tensor | None,
        measure: Tensor | None,
        edge_attr: Tensor | None,
    ) -> GeometricTensor:
        attended = self.dropout(self._attend(self.norms[0](x), edge_index, batch, measure, edge_attr))
        y = self.shortcut(x) + self._branch(attended, 0, batch)
        z = GeometricTensor(self.network(self.norms[1](y).tensor, y.coords), self.out_type, y.coords)
        return y + self._branch(self.dropout(z), 1, batch)

    def _branch(self, x: GeometricTensor, number: int, batch: Tensor | None) -> GeometricTensor:
        """The end of a branch, the first or the second."""
        if len(self.gains):
            x = self.gains[number](x)
        y: GeometricTensor = self.drop_path(x, batch)
        return y

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode: see :meth:`PointSelfAttention.export`."""
        self.eval()
        norms, gains = (
            torch.nn.ModuleList(cast(PlainModule, module).export() for module in modules)
            for modules in (self.norms, self.gains)
        )
        parts = (self.attention.export(), self.shortcut.export(), copy.deepcopy(self.network))
        return PlainBlock(norms, gains, *parts).eval()

    def check_equivariance(self, atol: float = 1e-2, rtol: float = 1e-2) -> list[tuple[GroupElement, float]]:
        """Check on random points that the block nearly commutes: see :meth:`SphereSelfAttention.check_equivariance`."""
        return check_on_sphere(self, atol, rtol)
