"""The networks of the published code of octic vision transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import cast

import torch
from escnn import gspaces
from torch import Tensor

from escnn_attention._checks import check_int
from escnn_attention.models.checkpoint import (
    Checkpoint,
    load_heads,
    load_linear,
    load_parameters,
    load_values,
    take_linear,
)
from escnn_attention.models.vision_transformer import VisionTransformer
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.pointwise import LayerScale
from escnn_attention.nn.transformer import TransformerBlock
from escnn_attention.plain.projections import FromPoses, HeadModule

_POSES = 8
_SIGNS = {"A1": (1, 1), "B1": (-1, 1), "A2": (1, -1), "B2": (-1, -1)}
"""The factors of one-dimensional irreps under a quarter turn and a reflection, in the order of this package."""
_IRREPS = (*_SIGNS, "E")
_PUBLISHED = ("A1", "A2", "B1", "B2", "E", "E'")
"""The published order; the first and the second half of E."""
_EPS = 1e-6
"""The epsilon of the norms. In the published octic blocks it is 1e-5, in sums of five variances."""
_SCALE = math.sqrt(8 * _EPS / 1e-5)
"""The factor of features with which the norms with the epsilon above equal the published ones. Features of E are also
halved: the published norm adds the mean of their two variances, for four times as many numbers as another irrep."""


def from_octic_vit(checkpoint: Checkpoint, *, num_heads: int = 16) -> VisionTransformer:
    """The network of a checkpoint of the published code of octic ViTs; no tensor shows its number of heads."""
    prefix = "blocks."
    octic, blocks = 0, checkpoint.count(prefix)
    while checkpoint.any(f"{prefix}{octic}.attn.qkv.lin_A1."):
        octic += 1
    fields, channels, half, _ = checkpoint.shape("patch_embed.lift8.conv_A1.weight", 4)
    positions = checkpoint.shape("pos_embed.0", 3)[0]
    if fields % check_int("num_heads", num_heads):
        raise ValueError(f"num_heads: got {num_heads}, which do not divide the {fields} fields of the tensors")
    first = f"{prefix}0."
    eight, registers = checkpoint.any("cls_token.5"), 0
    if checkpoint.any("register_tokens."):
        registers = checkpoint.shape("register_tokens.0", 3)[1]
        if not eight:
            raise ValueError(
                "register_tokens.0: got registers beside a class token that is not that of DINOv2, in eight parts; the "
                "published network cannot be applied with these"
            )
    scaled = [name for name in checkpoint.tensors if re.match(r"blocks\.0\.(gamma_|ls)1\b", name)]
    narrow = f"{first}mlp.fc1.{'lin_A1.' if octic else ''}weight"
    network = VisionTransformer(
        # About this axis the irrep of the vectors is the published E.
        gspaces.flipRot2dOnR2(4, axis=0.0),
        channels,
        None if eight and not checkpoint.any("head.") else checkpoint.shape("head.weight", 2)[0],
        image_size=4 * positions * half,
        patch_size=2 * half,
        fields=fields,
        num_heads=num_heads,
        num_blocks=(octic, blocks - octic),
        hidden_fields=checkpoint.shape(narrow, 2)[0] // (1 if octic else _POSES),
        invariant=checkpoint.any("invariant_proj."),
        class_token=checkpoint.any("cls_token."),
        registers=registers,
        layer_scale=1.0 if scaled else None,
        norm_eps=_EPS,
    )
    with torch.no_grad():
        _Loader(checkpoint, fields).load(network, eight)
    checkpoint.check_used()
    return network.eval()


class _Loader:
    """Writes maps between irreps, and tables under their symmetries, as maps to and from poses.

    ``fields`` are the numbers of each irrep of one dimension; there are twice as many of E.
    """

    def __init__(self, checkpoint: Checkpoint, fields: int):
        self.checkpoint, self.fields = checkpoint, fields
        # Of the channels, which are A1, A2, B1, B2 and both components of each E.
        self.scale = torch.full((_POSES * fields,), _SCALE)
        self.scale[4 * fields :] /= 2

    def load(self, network: VisionTransformer, eight: bool) -> None:
        """Load all weights; ``eight``: whether tokens have eight parts, with separate components of E, and not five."""
        token = network.token
        self._patches(network)
        self._positions(network)
        if token.weight is not None:
            load_values(token.weight, self._token("cls_token", (1, 1), eight).flatten())
        if token.registers is not None:
            load_values(token.registers, self._token("register_tokens", (1, len(token.registers)), eight)[0])
        if self.checkpoint.any("mask_token."):  # in place of patches, in DINOv2's training only
            self._token("mask_token", (1,), eight)
        blocks = [*network.blocks, *network.plain_blocks]
        for i, block in enumerate(blocks):
            load = self._octic_block if i < len(network.blocks) else self._block
            load(f"blocks.{i}.", cast(TransformerBlock, block))
        self._leave(network)
        load_parameters(self.checkpoint, "norm", network.norm)
        load_parameters(self.checkpoint, "head", network.head)

    def _token(self, name: str, shape: tuple[int, ...], eight: bool) -> Tensor:
        """The invariants ``(*shape, F)`` of tokens, whose other parts are zero."""
        parts = 7 * [(self.fields,)] if eight else [*3 * [(self.fields,)], (2, 2 * self.fields)]
        for i, part in enumerate(parts, start=1):
            if self.checkpoint.take(f"{name}.{i}", *shape, *part).any():
                raise ValueError(f"{name}.{i}: got a token that is not invariant, needed zeros")
        return _SCALE * self.checkpoint.take(f"{name}.0", *shape, self.fields)

    def _patches(self, network: VisionTransformer) -> None:
        take, fields, name = self.checkpoint.take, self.fields, "patch_embed.lift8.conv_"
        channels, half = len(network.in_type), network.embedding.plain.size // 2
        quarters = [
            take(f"{name}{irrep}.weight", fields, channels, half, half) for irrep in (*_SIGNS, "E_left", "E_right")
        ]
        kernels = self._unfolded(quarters, math.sqrt(2) / 4, 0.5)  # features, channels, and a patch
        embedding = network.embedding.plain
        embedding.table.fill((kernels * self.scale[:, None, None, None]).transpose(0, 1))
        load_values(embedding.bias, _SCALE * self._bias(f"{name}A1.bias", fields))

    def _positions(self, network: VisionTransformer) -> None:
        half = network.positions.plain.table.shape[0] // 2
        names = [f"pos_embed.{_PUBLISHED.index(irrep)}" for irrep in (*_IRREPS, "E'")]
        quarters = [self.checkpoint.take(name, half, half, self.fields).movedim(-1, 0)[:, None] for name in names]
        table = self._unfolded(quarters, 1.0, 1.0)[:, 0]
        network.positions.plain.table.fill((table * self.scale[:, None, None]).unsqueeze(0))

    def _unfolded(self, quarters: list[Tensor], gain: float, gain_of_e: float) -> Tensor:
        r"""Tables ``(8 F, C, n, n)`` of all features from their learned parts, six quarters ``(F, C, n/2, n/2)``.

        The table of an irrep of one dimension is :math:`\sum_g \chi(g)\, g\,q` over the eight elements, with the
        quarter q in the upper left; of the first component of E the sum over the reflections along the axes, and of
        the second the first one rotated.
        """
        tables = []
        padded = [torch.nn.functional.pad(q, (0, q.shape[-1], 0, q.shape[-2])) for q in quarters]
        for (turn, flip), table in zip(_SIGNS.values(), padded[:4], strict=True):
            turned = torch.stack([turn**k * table.rot90(k, (-2, -1)) for k in range(4)]).sum(0)
            tables.append(gain * (turned + flip * turned.flip(-1)))
        for table in padded[4:]:
            table = table + table.flip(-2)
            first = gain_of_e * (table - table.flip(-1))
            tables.append(torch.stack([first, first.rot90(1, (-2, -1))], dim=1).flatten(0, 1))
        return torch.cat(tables)

    def _octic_block(self, name: str, block: TransformerBlock) -> None:
        plain, heads = block.attention.plain, block.attention.num_heads
        norm, expand, _, contract, *_ = block.feed_forward
        self._octic_norm(f"{name}norm1", block.before[0])
        self._octic_norm(f"{name}norm2", norm)
        self._heads(plain, heads, *self._to_poses(f"{name}attn.qkv", 3 * self.fields, 3 * heads))
        self._from_poses(f"{name}attn.proj", plain.project_out, heads)
        weight, bias = self._to_poses(f"{name}mlp.fc1", len(expand.out_type), 1)
        load_values(expand.plain.projection.weight, weight)
        load_values(expand.plain.projection.bias, bias)
        self._from_poses(f"{name}mlp.fc2", contract.plain.projection, 1)
        self._branches(name, block, self._gains)

    def _heads(self, plain: HeadModule, heads: int, weight: Tensor, bias: Tensor) -> None:
        """Queries, keys and values, which follow each other."""
        pairs = zip(weight.unflatten(0, (3, heads, -1)), bias.view(3, heads, -1), strict=True)
        load_heads(plain, dict(zip(("queries", "keys", "values"), pairs, strict=True)))

    def _branches(self, block_name: str, block: TransformerBlock, take: Callable[[str], Tensor]) -> None:
        """The gains at the end of both branches of a block."""
        for number, branch in ((1, block.after), (2, block.feed_forward)):
            for layer in branch:
                if isinstance(layer, LayerScale):
                    deit = f"{block_name}gamma_{number}"
                    load_values(
                        layer.plain.gain, take(deit if self.checkpoint.any(deit) else f"{block_name}ls{number}")
                    )

    def _gains(self, name: str) -> Tensor:
        """A number of each field."""
        sizes = [self.fields] * 4 + [2 * self.fields]
        return torch.cat(
            [self.checkpoint.take(f"{name}.alpha_{irrep}", n) for irrep, n in zip(_IRREPS, sizes, strict=True)]
        )

    def _octic_norm(self, name: str, norm: FieldLayerNorm) -> None:
        """A norm, whose input has E at half its size and whose output does not."""
        gains = self._gains(f"{name}.scaling")
        gains[4 * self.fields :] *= 2
        load_values(norm.plain.weight, gains)
        load_values(norm.plain.bias, self.checkpoint.take(f"{name}.scaling.beta", self.fields))

    def _bias(self, name: str, size: int) -> Tensor:
        """A bias, zeros where there is none."""
        return self.checkpoint.take(name, size) if name in self.checkpoint.tensors else torch.zeros(size)

    def _matrices(self, name: str, outs: int, ins: int) -> list[Tensor]:
        sizes = [(outs, ins)] * 4 + [(2 * outs, 2 * ins)]
        names = [f"{name}.lin_{irrep}.weight" for irrep in _IRREPS]
        return [self.checkpoint.take(name, *size) for name, size in zip(names, sizes, strict=True)]

    def _to_poses(self, name: str, fields: int, groups: int) -> tuple[Tensor, Tensor]:
        r"""The weights of regular fields at the identity, ``(fields, 8 F)``, and their biases.

        At the identity a regular field is :math:`(A_1 + A_2 + B_1 + B_2 + E_1 + E_2 + E'_1 - E'_2) / \sqrt 8`, with E
        and E' one of the first and one of the second half of its E, which are apart in each group of fields.
        """
        *ones, pairs = self._matrices(name, fields, self.fields)
        first, second = pairs.unflatten(0, (groups, 2, -1)).unbind(1)
        of_e = torch.stack([first + second, first - second], dim=-1).flatten(0, 1).flatten(1)
        bias = self._bias(f"{name}.lin_A1.bias", fields)
        return torch.cat([*ones, of_e], dim=1) / math.sqrt(_POSES), bias / math.sqrt(_POSES)

    def _from_poses(self, name: str, projection: FromPoses, groups: int) -> None:
        """A map from regular fields, by its weights at the identity."""
        *ones, pairs = self._matrices(name, self.fields, len(projection.weight))
        first, second = pairs.unflatten(1, (groups, 2, -1)).unbind(2)
        of_e = torch.stack([first + second, first - second], dim=1).flatten(2).flatten(0, 1)
        load_values(projection.weight, (torch.cat([*ones, of_e]) * self.scale[:, None]).T / math.sqrt(_POSES))
        load_values(projection.bias, _SCALE * self._bias(f"{name}.lin_A1.bias", self.fields))

    def _leave(self, network: VisionTransformer) -> None:
        """The map out of the group: the published order of channels, without the scale."""
        fields, width = self.fields, _POSES * self.fields
        rows = torch.arange(4 * fields).view(4, fields)
        by_name = dict(zip(_SIGNS, rows, strict=True))
        of_one_dimension = torch.cat([by_name[irrep] for irrep in _PUBLISHED[:4]])
        if network.invariants is None:
            of_e = torch.arange(4 * fields, width).view(2, fields, 2).transpose(1, 2).flatten()
            order = torch.cat([of_one_dimension, of_e])
            load_values(network.leave.weight, torch.diag(1 / self.scale)[order])
            load_values(network.leave.bias, torch.zeros(width))
            return
        weight, bias = take_linear(self.checkpoint, "invariant_proj", width, 6 * fields)
        columns = torch.cat([of_one_dimension.argsort(), torch.arange(4 * fields, 6 * fields)])
        scale = torch.cat([self.scale[: 4 * fields], self.scale[4 * fields :: 2]])
        load_values(network.leave.weight, weight[:, columns] / scale)
        load_values(network.leave.bias, bias)

    def _block(self, name: str, block: TransformerBlock) -> None:
        take, width = self.checkpoint.take, _POSES * self.fields
        plain = block.attention.plain
        norm, expand, _, contract, *_ = block.feed_forward
        load_parameters(self.checkpoint, f"{name}norm1", block.before[0].plain)
        load_parameters(self.checkpoint, f"{name}norm2", norm.plain)
        weight = take(f"{name}attn.qkv.weight", 3 * width, width)
        self._heads(plain, block.attention.num_heads, weight, self._bias(f"{name}attn.qkv.bias", 3 * width))
        weight, bias = take_linear(self.checkpoint, f"{name}attn.proj", width, width)
        load_values(plain.project_out.weight, weight.T)
        load_values(plain.project_out.bias, bias)
        load_linear(self.checkpoint, f"{name}mlp.fc1", expand.plain.projection)
        load_linear(self.checkpoint, f"{name}mlp.fc2", contract.plain.projection)
        timm = f"{name}ls1.gamma" in self.checkpoint.tensors
        self._branches(name, block, lambda scale: take(f"{scale}.gamma" if timm else scale, width))
