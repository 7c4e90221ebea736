"""Vision transformers that are equivariant in all blocks or in the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from escnn import gspaces
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor

from escnn_attention._checks import check_bool, check_int, check_ints
from escnn_attention.exporting.modules import exported_parts
from escnn_attention.groups.fibers import invariant_vectors
from escnn_attention.models.classifier import InvariantLogits, images_of
from escnn_attention.models.convolutions import field_type_of, image_type
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.embeddings import PatchDecoder, PatchEmbedding, PositionTable
from escnn_attention.nn.invariants import PowerSpectrum
from escnn_attention.nn.module import GridModule
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.transformer import TransformerBlock, each_block
from escnn_attention.plain.image_networks import ClassToken
from escnn_attention.plain.image_networks import VisionTransformer as PlainVisionTransformer
from escnn_attention.plain.norms import InvariantNorm

_OF_GRIDS = (
    "window",
    "dilation",
    "causal",
    "is_causal",
    "padding_mode",
    "projection_kernel_size",
    "projection_filters",
)
"""Options of blocks that read where positions are; here they stand in a row, behind tokens."""


class VisionTransformer(PretrainedMixin, PlainVisionTransformer):
    r"""A vision transformer whose first blocks are equivariant: the octic ViT, for any group that keeps a square.

    .. math::
        f &= \mathrm{token} \oplus (\mathrm{patches}(x) + p), \qquad f' = \mathrm{Blocks}(f) \\
        z &= V f' + b \quad\text{or}\quad z = V \lVert f' \rVert + b, \qquad
        \mathrm{logits} = W'\, \mathrm{LN}(\mathrm{Blocks}'(z))_\mathrm{token} + b'

    The features f are irreps, as many of each as in ``fields`` regular fields: a :class:`PatchEmbedding`, a
    :class:`PositionTable` p, and a class token, which is learned and invariant. The equivariant blocks are
    :class:`TransformerBlock`\ s in which all poses of a head attend alike (``shared_scores``), without an encoding,
    with the norm ``"fields"``. Then a linear map leaves the group: of the features themselves, so that the following
    blocks depend on the orientation of the image (the hybrid), or of their :class:`PowerSpectrum`, after which
    everything is invariant. The blocks behind it are ordinary ones, those of the trivial group.

    Args:
        gspace: the symmetry; a finite group that maps a square onto itself, such as ``gspaces.flipRot2dOnR2(4)``.
        in_channels: the channels of the images or volumes; or a type of any fields, such as velocities.
        num_classes: the number of classes; None for the features of the token, without a head; or a type of any fields,
            which the network then gives on the grid of the images, by a norm and a :class:`PatchDecoder` behind the
            equivariant blocks. There are no ordinary blocks then, no ``invariant`` and no ``class_token``.
        image_size: the positions along every axis of the images of the table, a multiple of ``patch_size``. For images
            of other sizes the table is interpolated.
        patch_size: the positions along every axis of a patch.
        fields: the features are the irreps of this number of regular fields; the width is ``fields`` times the order
            of the group.
        num_heads: the number of heads, which divides ``fields``.
        num_blocks: the number of equivariant blocks, and of those behind them.
        hidden_fields: the regular fields of the network in every block; by default four times ``fields``.
        invariant: whether the map out of the group reads invariants of the features.
        class_token: whether the head reads a token, and not the mean over the patches.
        registers: the number of further tokens, learned and invariant, which are not read.
        layer_scale: the initial gains of both branches of every block; None for no gains.
        norm_eps: the epsilon of all norms.
        block: further options of every :class:`TransformerBlock`, such as ``drop_path`` (of the last block; from 0 of
            the first it rises by equal steps), ``dropout`` and ``qk_norm``. Tokens stand in a row, so there are none of
            windows, causal attention or convolutions.

    Attributes:
        num_classes: the number of classes, or None.
        out_type: the type of fields that the network gives, or None.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``, in the plane or in space; without a head to
        ``(B, fields · |H|)``; of fields to ``(B, out_type.size, *space)``.

    Raises:
        ValueError: a group that does not map a square onto itself, patches that do not divide the image, heads that do
            not divide the fields, a single field, or fields as output behind parts that are not equivariant.

    Example:
        >>> import torch
        >>> from escnn_attention import assert_equivariant
        >>> from escnn_attention.models import VisionTransformer
        >>> from escnn import gspaces
        >>> network = VisionTransformer(
        ...     gspaces.flipRot2dOnR2(4), 3, 10, image_size=16, patch_size=4, fields=4, num_heads=2, num_blocks=(2, 2),
        ...     invariant=True,
        ... )
        >>> network(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
        >>> assert_equivariant(network.as_fields(), (1, 3, 16, 16), tolerance=1e-12)

    Source: Nordström et al., "Octic Vision Transformers: Quicker ViTs Through Equivariance", 2025; Touvron, Cord and
    Jégou, "DeiT III: Revenge of the ViT", ECCV 2022, for the ordinary blocks; Darcet et al., "Vision Transformers Need
    Registers", ICLR 2024.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int | FieldType,
        num_classes: int | FieldType | None,
        *,
        image_size: int,
        patch_size: int,
        fields: int,
        num_heads: int,
        num_blocks: Sequence[int] = (6, 6),
        hidden_fields: int | None = None,
        invariant: bool = False,
        class_token: bool = True,
        registers: int = 0,
        layer_scale: float | None = 1e-4,
        norm_eps: float = 1e-6,
        block: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        image_type(gspace, 1)
        in_type = field_type_of("in_channels", in_channels, gspace)
        self.out_type: FieldType | None = None
        if num_classes is not None and not isinstance(num_classes, int):
            self.out_type, num_classes = field_type_of("num_classes", num_classes, gspace), None
        equivariant, ordinary = check_ints("num_blocks", num_blocks, 2, "equivariant and ordinary blocks", least=0)
        if check_int("image_size", image_size) % check_int("patch_size", patch_size):
            raise ValueError(f"image_size: patches of {patch_size} do not divide {image_size}")
        if check_int("fields", fields) % check_int("num_heads", num_heads):
            raise ValueError(f"num_heads: {num_heads} heads do not divide {fields} fields")
        if num_classes is not None:
            check_int("num_classes", num_classes)
        if self.out_type is not None and (ordinary or invariant or class_token):
            raise ValueError(
                f"num_classes: got a type of fields with num_blocks={tuple(num_blocks)}, invariant={invariant} and "
                f"class_token={class_token}, needed num_blocks=({equivariant}, 0), invariant=False, class_token=False"
            )
        order = gspace.fibergroup.order()
        hidden = 4 * fields if hidden_fields is None else check_int("hidden_fields", hidden_fields)
        tokens: dict[str, Any] = {"encoding": "none", "query": "own", "keys": "own", "shared_scores": True}
        tokens |= {"norm": "pre", "layer_scale": layer_scale, "norm_eps": norm_eps, "kernel_size": None}
        per_head = fields // num_heads
        of_equivariant: dict[str, Any] = {"norm_kind": "fields", "hidden_fields": hidden, "head_fields": per_head}
        of_ordinary: dict[str, Any] = {"hidden_fields": hidden * order, "head_fields": per_head * order}
        taken = (*tokens, *of_equivariant, "attention", "norm_scope", "registers", "samples", "crop", *_OF_GRIDS)
        given = {"activation": "gelu", **(block or {})}
        options = each_block(VisionTransformer, given, equivariant + ordinary, taken)
        self.gspace, self.in_type, self.num_classes = gspace, in_type, num_classes
        self.hidden_type = _irreps(gspace, fields)
        trivial = gspaces.trivialOnR2() if gspace.dimensionality == 2 else gspaces.trivialOnR3()
        self.plain_type = FieldType(trivial, self.hidden_type.size * [trivial.regular_repr])
        self.embedding = PatchEmbedding(in_type, self.hidden_type, patch_size)
        self.positions = PositionTable(self.hidden_type, image_size // patch_size)
        there, more = check_bool("class_token", class_token), check_int("registers", registers, least=0)
        self.token = ClassToken(invariant_vectors(self.hidden_type), there, more)
        self.blocks = torch.nn.ModuleList(
            TransformerBlock(self.hidden_type, self.hidden_type, num_heads, **tokens, **of_equivariant, **own)
            for own in options[:equivariant]
        )
        self.invariants = PowerSpectrum(self.hidden_type) if check_bool("invariant", invariant) else None
        self.decoder = None
        if self.out_type is not None:
            norm = FieldLayerNorm(self.hidden_type, kind="fields", eps=norm_eps)
            self.decoder = SequentialModule(norm, PatchDecoder(self.hidden_type, self.out_type, patch_size))
        read = self.hidden_type if self.invariants is None else self.invariants.out_type
        self.leave = torch.nn.Linear(read.size, self.plain_type.size)
        self.plain_blocks = torch.nn.ModuleList(
            TransformerBlock(self.plain_type, self.plain_type, num_heads, **tokens, **of_ordinary, **own)
            for own in options[equivariant:]
        )
        width = self.plain_type.size
        self.norm: torch.nn.Module = InvariantNorm(width, eps=norm_eps)
        self.head = torch.nn.Identity() if num_classes is None else torch.nn.Linear(width, num_classes)
        if self.decoder is not None:
            self.leave, self.norm = cast(torch.nn.Linear, torch.nn.Identity()), torch.nn.Identity()

    def forward(self, input: GeometricTensor | Tensor) -> Any:
        """The logits ``(B, num_classes)`` of images, as a GeometricTensor of type ``in_type`` or as a plain tensor.

        Where the output is fields, a GeometricTensor gives one.

        Raises:
            ValueError: a tensor of another type or shape, or one that patches do not divide.
        """
        y = super().forward(input)  # type: ignore[arg-type]
        return GeometricTensor(y, self.out_type) if self.out_type and isinstance(input, GeometricTensor) else y

    def tokens(self, input: GeometricTensor | Tensor) -> Tensor:
        """The features of all tokens behind the last norm, ``(B, 1 + registers + N, fields · |H|)``.

        First that of the class, where there is one, then the registers, then the patches row by row.
        """
        return super().tokens(input)  # type: ignore[arg-type]

    def _embed(self, x: GeometricTensor | Tensor) -> Tensor:
        return super()._embed(images_of(x, self.in_type, self).tensor)

    def _apply_module(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        y: GeometricTensor = module(GeometricTensor(x, cast(EquivariantModule, module).in_type))
        return y.tensor

    def as_fields(self) -> EquivariantModule:
        """The network as an equivariant module, for :func:`escnn_attention.equivariance_report`."""
        if self.out_type is not None:
            return _Fields(self, self.in_type, self.out_type)
        return InvariantLogits(self, self.in_type, self.num_classes or self.plain_type.size)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, from images ``(B, in_channels, *space)`` to logits."""
        return exported_parts(self, PlainVisionTransformer)


class _Fields(GridModule):
    """A network that gives fields, as an equivariant module."""

    def __init__(self, network: torch.nn.Module, in_type: FieldType, out_type: FieldType):
        super().__init__(in_type, out_type)
        self.network = network

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        return self.network(input)


def _irreps(gspace: GSpace, fields: int) -> FieldType:
    """The irreps of so many regular fields, sorted by size and name: all fields of the first one, of the second, ..."""
    regular, group = gspace.regular_repr, gspace.fibergroup
    names = sorted(set(regular.irreps), key=lambda name: (group.irrep(*name).size, name))
    return FieldType(gspace, [group.irrep(*name) for name in names for _ in range(fields * regular.irreps.count(name))])
