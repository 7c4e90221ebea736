"""Networks of steerable convolutions and group self-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, InnerBatchNorm, R2Conv, R3Conv, ReLU, SequentialModule

from escnn_attention._checks import check_int, check_option, check_sequence
from escnn_attention.encodings import Encoding
from escnn_attention.functional import KeyMode, QueryMode
from escnn_attention.models.classifier import EquivariantClassifier
from escnn_attention.models.convolutions import image_type
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.resample import HalvingPool
from escnn_attention.nn.transformer import TransformerBlock
from escnn_attention.plain.resample import PoolKind

__all__ = ["HybridNet"]


class HybridNet(EquivariantClassifier):
    r"""Steerable convolutions find local features, group self-attention relates them.

    A network of stages, each on half as many positions along every axis as the one before. A stage is a number of
    steerable convolutions (with batch norm and ReLU), and then a number of :class:`TransformerBlock`\ s; convolutions
    in the early stages and attention in the late ones is the usual division of labour. Without any attention it is the
    steerable G-CNN of the same outline.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images or volumes.
        num_classes: the number of classes.
        widths: the number of regular fields in each stage.
        convolutions: the number of convolutions in each stage; at least one in the first, which is the stem.
        attention: the number of attention blocks in each stage.
        stem_kernel: the width of the first convolution.
        conv_kernel: the width of the others.
        kernel_size: the width of the attention windows; None for global attention.
        window: their shape, see :class:`GroupSelfAttention`.
        num_heads: the number of heads.
        head_fields: the regular fields of a head; by default the width divided by the number of heads, rounded up.
        query, keys, encoding, backend: of the attention, see :class:`GroupSelfAttention`.
        norm: of the attention blocks, see :class:`TransformerBlock`.
        pool: how positions are halved between the stages, ``"max"`` or ``"avg"``; both exact for any size.
        attention_dropout, dropout: of the attention probabilities and of the branches of a block.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a gspace without a grid, lists whose lengths do not agree, a stage with nothing in it, or an even
            width of a kernel.
        NotImplementedError: the fiber group is continuous.

    Example:
        >>> import torch
        >>> from escnn import gspaces
        >>> from escnn_attention.models import HybridNet
        >>> network = HybridNet(gspaces.flipRot2dOnR2(4), 3, 10, widths=(4, 8), convolutions=(2, 1), attention=(0, 2))
        >>> network(torch.randn(2, 3, 17, 17)).shape
        torch.Size([2, 10])

    Source: the outline of Dai et al., "CoAtNet", 2021, with steerable convolutions (Weiler and Cesa 2019) and group
    self-attention.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int] = (16, 32, 32),
        convolutions: Sequence[int] = (2, 2, 0),
        attention: Sequence[int] = (0, 0, 2),
        stem_kernel: int = 5,
        conv_kernel: int = 3,
        kernel_size: int | None = None,
        window: str = "auto",
        num_heads: int = 4,
        head_fields: int | None = None,
        query: QueryMode = "own",
        keys: KeyMode = "all",
        encoding: Encoding | str | None = None,
        norm: Literal["gsa", "pre"] = "pre",
        pool: PoolKind = "max",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        backend: str = "auto",
    ):
        fields = image_type(gspace, in_channels)
        for name, numbers in {"widths": widths, "convolutions": convolutions, "attention": attention}.items():
            check_sequence(name, numbers, "one number for each stage")
        if not len(widths) == len(convolutions) == len(attention) >= 1:
            raise ValueError(
                "widths, convolutions, attention: needed one number for each stage, got "
                f"{len(widths)}, {len(convolutions)} and {len(attention)}"
            )
        check_int("convolutions", convolutions[0])
        check_int("num_classes", num_classes)
        check_int("num_heads", num_heads)
        for name, width in (("stem_kernel", stem_kernel), ("conv_kernel", conv_kernel)):
            if check_int(name, width) % 2 == 0:
                raise ValueError(f"{name}: got {width}, needed an odd width, which keeps the grid")
        check_option("pool", pool, get_args(PoolKind))
        stages: dict[str, EquivariantModule] = {}
        for stage, (width, count, blocks) in enumerate(zip(widths, convolutions, attention, strict=True), start=1):
            if check_int("convolutions", count, least=0) + check_int("attention", blocks, least=0) == 0:
                raise ValueError(f"convolutions, attention: stage {stage} has neither")
            wider = FieldType(gspace, check_int("widths", width) * [gspace.regular_repr])
            if stage > 1:
                stages[f"pool_{stage - 1}"] = HalvingPool(fields, pool)
            for i in range(1, count + 1):
                kernel = stem_kernel if stage == i == 1 else conv_kernel
                stages[f"convolution_{stage}_{i}"] = _convolution(fields, wider, kernel)
                fields = wider
            for i in range(1, blocks + 1):
                stages[f"attention_{stage}_{i}"] = TransformerBlock(
                    fields,
                    wider,
                    num_heads,
                    kernel_size,
                    head_fields=-(-width // num_heads) if head_fields is None else head_fields,
                    norm=norm,
                    query=query,
                    keys=keys,
                    encoding=encoding,
                    window=window,
                    attention_dropout=attention_dropout,
                    dropout=dropout,
                    backend=backend,
                )
                fields = wider
        if attention[-1]:
            stages["norm"] = FieldLayerNorm(fields)
        super().__init__(stages, num_classes)


def _convolution(in_type: FieldType, out_type: FieldType, kernel_size: int) -> SequentialModule:
    kinds = {2: R2Conv, 3: R3Conv}
    # Without recompute=True all convolutions that are alike share a basis: a change of precision would reach other
    # networks.
    options = {"padding": kernel_size // 2, "bias": False, "recompute": True}
    convolution = kinds[in_type.gspace.dimensionality](in_type, out_type, kernel_size, **options)
    return SequentialModule(convolution, InnerBatchNorm(out_type), ReLU(out_type, inplace=True))
