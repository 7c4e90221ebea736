"""Platonic Transformers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_bool, check_int, check_length, check_option
from escnn_attention.encodings import RotaryEncoding
from escnn_attention.groups.fibers import fibers
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.convolutions import field_type_of, regular_type
from escnn_attention.nn.arguments import check_passed_on
from escnn_attention.nn.pointwise import PoseLinear, activation_of
from escnn_attention.nn.transformer import PointTransformerBlock
from escnn_attention.plain.point_network import PlatonicHead, PoseWaves


class PlatonicTransformer(CloudNetwork):
    r"""The network of Platonic Transformers: an embedding, blocks in the frames of the poses, and a head.

    .. math::
        f^0_i(h) &= W\,\rho(h)^{-1} x_i \;(+\; [\cos\Omega h^{-1}x_i,\, \sin\Omega h^{-1}x_i]) \\
        g^l &= f^l + \lambda_1\,\mathrm{Attention}_l(\mathrm{LN}(f^l)), \qquad
            f^{l+1} = g^l + \lambda_2\,W_2^l\,\sigma(W_1^l\,\mathrm{LN}(g^l)) \\
        y &= W_2\,\sigma\big(W_1 \operatorname{pool}_i f^L_i\big)

    with equivariant maps W and a last one to fields of any type. The blocks are
    :class:`~escnn_attention.PointTransformerBlock`: the attention is that of an ordinary transformer in the frame of
    every pose, with queries that attend to the keys of their own pose and rotary encodings of positions; norms act on
    each pose by itself, and the linear maps mix poses. Without ``positions`` the network is invariant under
    translations. As published, the embedding W has no bias, and norms remove the scale of its output: a single scalar
    feature needs a second one that is constant, such as 1.

    Args:
        gspace: the symmetry, over R^2 or R^3, with a finite fiber group.
        in_type: the type of the features; the number of scalars; or numbers of scalars and vectors by name, such as
            ``{"scalar": 1, "vector": 2}``.
        out_type: the type of the output, in the same three forms.
        fields: the width: the number of regular fields.
        num_blocks: the number of blocks.
        num_heads: of each attention, in the frame of each pose.
        block: further options of every :class:`~escnn_attention.PointTransformerBlock`. By default ``hidden_fields``
            are four times ``fields``, ``activation="gelu"``, ``norm_kind="layer"``, ``norm_scope="pose"``,
            ``keys="own"`` and ``encoding=RotaryEncoding(scale=1.0, constant_keys=True)``.
        positions: whether waves of the position itself are added to the embedding.
        hidden_readout: whether the head has a hidden layer, as wide as the features, with a GELU.
        pool: over the points of a cloud, ``"mean"`` or ``"sum"``; None for an output at every point.
        divisor: the pooled features are divided by this number, for sums of about that many points.

    Shape:
        ``(N, in_type.size)`` at points ``(N, d)`` to ``(B, out_type.size)`` for B clouds, or with ``pool=None`` to
        ``(N, out_type.size)``.

    Raises:
        ValueError: an unknown option, a divisor that is not positive, a head of an odd number of fields, or as
            :class:`~escnn_attention.PointTransformerBlock` raises.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PlatonicTransformer
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR3(4)
        >>> network = PlatonicTransformer(g, 5, {"scalar": 2, "vector": 1}, fields=8, num_blocks=1, num_heads=2)
        >>> network(torch.randn(7, 5), torch.randn(7, 3), batch=torch.tensor([0, 0, 0, 0, 1, 1, 1])).shape
        torch.Size([2, 5])

    Source: Islam et al., "Platonic Transformers: A Solid Choice For Equivariance", 2025, and the published
    implementation. Linear attention, there with ``mean_aggregation``, is ``block={"normalization": "count"}``.
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
        hidden = regular_type(gspace, check_int("fields", fields))
        options: dict[str, Any] = {"hidden_fields": 4 * fields, "activation": "gelu", "norm_kind": "layer"}
        options |= {"norm_scope": "pose", "keys": "own", "encoding": RotaryEncoding(scale=1.0, constant_keys=True)}
        options |= block or {}
        check_passed_on(PlatonicTransformer, "block", options, PointTransformerBlock, ("condition", "cross_attention"))
        self.embedding = PoseLinear(self.in_type, hidden, bias=False)
        if check_bool("positions", positions):
            if fields % 2:
                raise ValueError(f"fields: got {fields}, needed an even number with positions, a cosine for each sine")
            self.waves = PoseWaves(fields // 2, fibers(gspace).inverse_action)
        if fields % (2 * check_int("num_heads", num_heads)):
            raise ValueError(
                f"num_heads: got {num_heads}, needed a number that gives each head an even part of {fields} fields"
            )
        self.blocks = torch.nn.ModuleList(
            PointTransformerBlock(hidden, hidden, num_heads, **options)
            for _ in range(check_int("num_blocks", num_blocks))
        )
        # Each run of equal fields has its own readout.
        runs = [FieldType(gspace, list(run)) for _, run in itertools.groupby(self.out_type.representations)]
        parts = [_readout(hidden, run, check_bool("hidden_readout", hidden_readout)) for run in runs]
        self.head = PlatonicHead(parts, pool, check_length("divisor", divisor, "number"))


def _readout(hidden: FieldType, out_type: FieldType, layer: bool) -> torch.nn.Sequential:
    """The map from regular fields to the output, as a plain module."""
    maps: list[EquivariantModule] = [PoseLinear(hidden, hidden), activation_of(hidden, "gelu")] if layer else []
    return torch.nn.Sequential(*(m.export() for m in [*maps, PoseLinear(hidden, out_type)]))
