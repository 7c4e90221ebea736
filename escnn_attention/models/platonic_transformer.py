"""Platonic Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, IdentityModule, SequentialModule

from escnn_attention._checks import check_bool, check_int, check_length, check_option
from escnn_attention.encodings import RotaryEncoding
from escnn_attention.groups.fibers import fibers
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.convolutions import field_type_of
from escnn_attention.nn.arguments import check_options, check_type, option_names
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.point_attention import PointSelfAttention
from escnn_attention.nn.pointwise import Activation, DropPath, PoseLinear, activation_of, ends_of
from escnn_attention.nn.transformer import PointBlock
from escnn_attention.plain.norms import NormKind
from escnn_attention.plain.point_network import PlatonicHead, PoseWaves


class PlatonicBlock(PointBlock):
    r"""A block of a Platonic Transformer: regular fields to the same.

    .. math::
        y &= x + \lambda_1\,\mathrm{Attention}(\mathrm{LN}(x)) \\
        z &= y + \lambda_2\,W_2\,\sigma(W_1\,\mathrm{LN}(y))

    The attention is that of an ordinary transformer in the frame of every pose: queries attend to the keys of their own
    pose, with rotary encodings of positions. Norms act on each pose separately; the linear maps mix poses.

    Args:
        in_type: the type of the input and of the output: regular fields.
        num_heads: the number of heads.
        hidden_fields: the fields of the pointwise network; by default four times those of ``in_type``.
        constant_keys, rotate_values: whether keys are constant, and whether values are rotated (``values`` of
            :class:`~escnn_attention.RotaryEncoding`).
        activation: :math:`\sigma`, ``"gelu"``, ``"silu"`` or ``"relu"``.
        norm_kind: ``"layer"`` or ``"rms"``, see :class:`~escnn_attention.FieldLayerNorm`.
        layer_scale: the initial gains :math:`\lambda`; None for none.
        backend: of the attention.

    Shape:
        ``(N, in_type.size)`` with ``coords`` ``(N, d)`` to the same.

    Raises:
        TypeError, ValueError: as the layers raise; fields that are not regular, or a head of an odd number of fields.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PlatonicBlock
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 8 * [g.regular_repr])
        >>> block = PlatonicBlock(fields, num_heads=2)
        >>> block(nn.GeometricTensor(torch.randn(9, 32), fields, torch.randn(9, 2))).shape
        torch.Size([9, 32])

    Source: Islam et al., "Platonic Transformers: A Solid Choice For Equivariance", 2025.
    """

    def __init__(
        self,
        in_type: FieldType,
        num_heads: int = 1,
        *,
        hidden_fields: int | None = None,
        constant_keys: bool = True,
        rotate_values: bool = False,
        activation: Activation = "gelu",
        norm_kind: NormKind = "layer",
        layer_scale: float | None = None,
        backend: str = "auto",
    ):
        super().__init__(check_type("in_type", in_type), in_type)
        fields = len(in_type)
        if fields % (2 * check_int("num_heads", num_heads)):
            raise ValueError(
                f"num_heads: got {num_heads}, needed a number that gives each head an even part of {fields} fields"
            )
        number = 4 * fields if hidden_fields is None else check_int("hidden_fields", hidden_fields)
        hidden = FieldType(in_type.gspace, number * [in_type.gspace.regular_repr])
        encoding = RotaryEncoding(
            scale=1.0,
            constant_keys=check_bool("constant_keys", constant_keys),
            values=check_bool("rotate_values", rotate_values),
        )
        self.norm = FieldLayerNorm(in_type, "pose", kind=norm_kind)
        self.attention = PointSelfAttention(in_type, in_type, num_heads, keys="own", encoding=encoding, backend=backend)
        self.after = SequentialModule(*(ends_of(in_type, layer_scale) or [IdentityModule(in_type)]))
        self.shortcut = IdentityModule(in_type)
        self.feed_forward = SequentialModule(
            FieldLayerNorm(in_type, "pose", kind=norm_kind),
            PoseLinear(in_type, hidden),
            activation_of(hidden, activation),
            PoseLinear(hidden, in_type),
            *ends_of(in_type, layer_scale),
        )
        self.drop_path = DropPath(in_type, 0.0)


class PlatonicTransformer(CloudNetwork):
    r"""The network of Platonic Transformers: an embedding, blocks in the frames of the poses, and a head.

    .. math::
        f^0_i(h) &= W\,\rho(h)^{-1} x_i \;(+\; [\cos\Omega h^{-1}x_i,\, \sin\Omega h^{-1}x_i]), \qquad
            f^{l+1} = \mathrm{Block}_l(f^l) \\
        y &= W_2\,\sigma\big(W_1 \operatorname{pool}_i f^L_i\big)

    with the blocks of :class:`PlatonicBlock`, equivariant maps W and a last one to fields of any type. Without
    ``positions`` it is invariant under translations. As published, the embedding W has no bias, and norms remove the
    scale of its output: a single scalar feature needs a second one that is constant, such as 1.

    Args:
        gspace: the symmetry, over R^2 or R^3, with a finite fiber group.
        in_type: the type of the features; the number of scalars; or numbers of scalars and vectors by name, such as
            ``{"scalar": 1, "vector": 2}``.
        out_type: the type of the output, in the same three forms.
        fields: the width: the number of regular fields.
        num_blocks: the number of blocks.
        num_heads: of each attention, in the frame of each pose.
        block: further options of every :class:`PlatonicBlock`, such as ``hidden_fields``, ``constant_keys``,
            ``rotate_values``, ``activation``, ``norm_kind`` and ``layer_scale``.
        positions: whether waves of the position itself are added to the embedding.
        hidden_readout: whether the head has a hidden layer, as wide as the features, with a GELU.
        pool: over the points of a cloud, ``"mean"`` or ``"sum"``; None for an output at every point.
        divisor: the pooled features are divided by this number, for sums of about that many points.

    Shape:
        ``(N, in_type.size)`` at points ``(N, d)`` to ``(B, out_type.size)`` for B clouds, or with ``pool=None`` to
        ``(N, out_type.size)``.

    Raises:
        ValueError: an unknown option, a divisor that is not positive, or as :class:`PlatonicBlock` raises.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PlatonicTransformer
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR3(4)
        >>> network = PlatonicTransformer(g, 5, {"scalar": 2, "vector": 1}, fields=8, num_blocks=1, num_heads=2)
        >>> network(torch.randn(7, 5), torch.randn(7, 3), batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([2, 5])

    Source: Islam et al., "Platonic Transformers: A Solid Choice For Equivariance", 2025, and the published
    implementation, with attention by a softmax.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_type: int | Mapping[str, int] | FieldType,
        out_type: int | Mapping[str, int] | FieldType,
        *,
        fields: int,
        num_blocks: int,
        num_heads: int,
        block: Mapping[str, Any] | None = None,
        positions: bool = False,
        hidden_readout: bool = True,
        pool: Literal["mean", "sum"] | None = "mean",
        divisor: float = 1.0,
    ):
        if pool is not None:
            check_option("pool", pool, ("mean", "sum"))
        super().__init__(gspace, field_type_of("in_type", in_type, gspace))
        self.out_type = field_type_of("out_type", out_type, gspace)
        hidden = FieldType(gspace, check_int("fields", fields) * [gspace.regular_repr])
        options = dict(block or {})
        check_options("block", options, option_names(PlatonicBlock))
        self.embedding = PoseLinear(self.in_type, hidden, bias=False)
        if check_bool("positions", positions):
            if fields % 2:
                raise ValueError(f"fields: got {fields}, needed an even number with positions, a cosine for each sine")
            self.waves = PoseWaves(fields // 2, fibers(gspace).inverse_action)
        self.blocks = torch.nn.ModuleList(
            PlatonicBlock(hidden, num_heads, **options) for _ in range(check_int("num_blocks", num_blocks))
        )
        parts = [_readout(hidden, part, check_bool("hidden_readout", hidden_readout)) for part in _parts(self.out_type)]
        self.head = PlatonicHead(parts, pool, check_length("divisor", divisor, "number"))


def _parts(out_type: FieldType) -> list[FieldType]:
    """The output in runs of equal fields, each with its own readout."""
    runs: list[list[Any]] = []
    for representation in out_type.representations:
        if runs and runs[-1][0] == representation:
            runs[-1].append(representation)
        else:
            runs.append([representation])
    return [FieldType(out_type.gspace, run) for run in runs]


def _readout(hidden: FieldType, out_type: FieldType, layer: bool) -> torch.nn.Sequential:
    """The map from regular fields to the output, as a plain module."""
    maps: list[EquivariantModule] = [PoseLinear(hidden, hidden), activation_of(hidden, "gelu")] if layer else []
    return torch.nn.Sequential(*(m.export() for m in [*maps, PoseLinear(hidden, out_type)]))
