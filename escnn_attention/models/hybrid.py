"""Networks of steerable convolutions and group self-attention, and their outline without a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, R2Conv, R3Conv, ReLU, SequentialModule
from torch import Tensor, nn

from escnn_attention._checks import check_bool, check_int, check_ints, check_option, check_sequence
from escnn_attention.groups.fibers import fibers
from escnn_attention.models.classifier import EquivariantClassifier
from escnn_attention.models.convolutions import BatchNorm, check_odd_widths, image_type, regular_type
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.nn.arguments import check_options, check_padding_mode, option_names
from escnn_attention.nn.field_convolution import convolution_of
from escnn_attention.nn.invariants import AttentionPool
from escnn_attention.nn.norms import FieldLayerNorm, check_norm_kind, norm_of
from escnn_attention.nn.pointwise import SiLU
from escnn_attention.nn.resample import AntialiasedPool, HalvingPool
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.nn.transformer import TransformerBlock, each_block
from escnn_attention.plain.resample import AntialiasedPool as PlainAntialiasedPool
from escnn_attention.plain.resample import PoolKind


class HybridNet(EquivariantClassifier):
    r"""Steerable convolutions for local features, followed by group self-attention.

    A network of stages, each on half as many positions along every axis as the one before. A stage is a number of
    steerable convolutions (with batch norm and ReLU), and then a number of :class:`TransformerBlock`\ s. Without any
    attention it is the steerable G-CNN of the same outline. By default attention is in windows and costs about as much
    as the convolutions that it replaces; global attention (``kernel_size=None``) sees the whole image.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images or volumes.
        num_classes: the number of classes.
        widths: the number of regular fields in each stage.
        convolutions: the number of convolutions in each stage; at least one in the first, which is the stem.
        attention: the number of attention blocks in each stage.
        stem: the odd width of the first convolution; or the options of a :class:`LiftingSelfAttention` in its place,
            such as ``{"num_heads": 9, "kernel_size": 5}``, which a layer norm and :class:`SiLU` follow. It takes
            ``encoding``, ``window``, ``padding_mode``, ``head_fields``, ``attention_dropout`` and ``backend`` from
            ``block``, where that has them.
        conv_kernel: the odd width of the other convolutions.
        num_heads: the number of heads of the blocks.
        kernel_size: the odd width of their windows; None for global attention, whose cost grows with the square of the
            number of positions.
        block: further options of every :class:`TransformerBlock`, such as ``encoding``, ``keys``, ``dropout``,
            ``layer_scale``, ``norm_kind`` (of the last norm, too) and ``drop_path`` (of the last block; from 0 of the
            first it rises by equal steps). By default ``norm`` is ``"pre"``, ``keys`` are ``"own"``, ``head_fields``
            is the width divided by the number of heads, rounded up and at least 2, and the ``encoding`` is
            ``"convolutional"`` in windows, and for global attention ``"rotary"``, on a torus ``"mlp"``.
            ``padding_mode="circular"`` makes the whole network one of tori, convolutions and poolings included: of
            sides that are multiples of :math:`2^{L-1}` for L stages. Rolls by such multiples keep the logits.
        last_norm: whether a layer norm follows the last stage where that ends in attention.
        features: the number of regular fields of a last pointwise convolution; by default there is none.
        class_token: the options of an :class:`AttentionPool`, ``num_heads`` and ``head_fields``, whose token reads the
            logits of all positions and poses; by default a linear map reads them of the maximum over the poses and the
            mean over the positions.
        pool: how positions are halved between the stages, ``"max"`` or ``"avg"``; both exact for any size.
        antialiased: whether a blur follows the maximum or replaces the mean (:class:`AntialiasedPool` in place of
            :class:`HalvingPool`); rotations by angles that do not map the grid onto itself then change the logits less.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        ValueError: a gspace without a grid, lists whose lengths do not agree, a stage with nothing in it, or an even
            width of a kernel.

    Example:
        >>> import torch
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
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
        stem: int | Mapping[str, Any] = 5,
        conv_kernel: int = 3,
        num_heads: int = 4,
        kernel_size: int | None = 5,
        block: Mapping[str, Any] | None = None,
        last_norm: bool = True,
        features: int | None = None,
        class_token: Mapping[str, int] | None = None,
        pool: PoolKind = "max",
        antialiased: bool = False,
    ):
        fields = image_type(gspace, in_channels)
        outline = _outline(widths, convolutions, attention)
        check_int("num_classes", num_classes)
        check_int("num_heads", num_heads)
        check_odd_widths(conv_kernel=conv_kernel)
        check_option("pool", pool, get_args(PoolKind))
        halve = AntialiasedPool if check_bool("antialiased", antialiased) else HalvingPool
        given = dict(block or {})
        mode = given.get("padding_mode", "none")
        circular = check_padding_mode(fibers(gspace), gspace, mode)
        beyond = "circular" if circular else "zeros"
        options = {**block_defaults(kernel_size, circular), **given}
        blocks = iter(each_block(HybridNet, options, sum(attention), ("samples", "attention")))
        stages: dict[str, EquivariantModule] = {}
        for kind, name, width in outline:
            wider = fields if kind == "pool" else regular_type(gspace, width)
            if kind == "pool":
                stages[name] = halve(fields, pool, padding_mode=mode)
            elif kind == "attention":
                own = {"head_fields": head_fields_of(width, num_heads), **next(blocks)}
                stages[name] = TransformerBlock(fields, wider, num_heads, kernel_size, **own)
            elif stages:
                stages[name] = steerable_convolution(fields, wider, conv_kernel, beyond)
            elif isinstance(stem, Mapping):
                stages["lifting"] = _lifting(fields, wider, stem, given)
            else:
                check_odd_widths(stem=stem)
                stages[name] = steerable_convolution(fields, wider, stem, beyond)
            fields = wider
        if attention[-1] and last_norm:
            stages["norm"] = norm_of(fields, check_norm_kind(options.get("norm_kind")))
        stages |= _last_stages(fields, num_classes, features, class_token)
        super().__init__(stages, num_classes if class_token is None else None)


def block_defaults(kernel_size: int | None, circular: bool) -> dict[str, Any]:
    """The options of the blocks of a network that is mostly convolutions, which cost about as much as they do."""
    everywhere = "mlp" if circular else "rotary"
    return {"norm": "pre", "keys": "own", "encoding": everywhere if kernel_size is None else "convolutional"}


def head_fields_of(width: int, num_heads: int) -> int:
    """The fields of a head that divide a width among heads: at least two, of which a rotary encoding makes a pair."""
    return max(2, -(-width // num_heads))


def _outline(
    widths: Sequence[int], convolutions: Sequence[int], attention: Sequence[int]
) -> list[tuple[Literal["pool", "convolution", "attention"], str, int]]:
    """The parts before the last norm, in order: the kind, the name, and the number of regular fields."""
    for name, numbers in {"widths": widths, "convolutions": convolutions, "attention": attention}.items():
        check_sequence(name, numbers, "one number for each stage")
    if not len(widths) == len(convolutions) == len(attention) >= 1:
        raise ValueError(
            "widths, convolutions, attention: needed one number for each stage, got "
            f"{len(widths)}, {len(convolutions)} and {len(attention)}"
        )
    check_int("convolutions", convolutions[0])
    parts: list[tuple[Literal["pool", "convolution", "attention"], str, int]] = []
    for stage, (width, count, blocks) in enumerate(zip(widths, convolutions, attention, strict=True), start=1):
        if check_int("convolutions", count, least=0) + check_int("attention", blocks, least=0) == 0:
            raise ValueError(f"convolutions, attention: stage {stage} has neither")
        check_int("widths", width)
        if stage > 1:
            parts.append(("pool", f"pool_{stage - 1}", width))
        parts += [("convolution", f"convolution_{stage}_{i}", width) for i in range(1, count + 1)]
        parts += [("attention", f"attention_{stage}_{i}", width) for i in range(1, blocks + 1)]
    return parts


def _last_stages(
    fields: FieldType, num_classes: int, features: int | None, class_token: Mapping[str, int] | None
) -> dict[str, EquivariantModule]:
    """The stages behind the last norm: a pointwise convolution and a token, each where it is asked for."""
    stages: dict[str, EquivariantModule] = {}
    if features is not None:
        wider = regular_type(fields.gspace, check_int("features", features))
        convolution = R2Conv if fields.gspace.dimensionality == 2 else R3Conv
        stages["features"] = convolution(fields, wider, 1, recompute=True)
        fields = wider
    if class_token is not None:
        if not isinstance(class_token, Mapping):
            raise TypeError(f"class_token: got {class_token!r}, needed the options of an AttentionPool, by name")
        check_options("class_token", class_token, ("num_heads", "head_fields"))
        stages["class_token"] = AttentionPool(fields, num_classes, **class_token)
    return stages


def steerable_convolution(
    in_type: FieldType, out_type: FieldType, kernel_size: int, padding_mode: str = "zeros"
) -> SequentialModule:
    """A convolution of escnn that keeps the grid, batch norm and ReLU."""
    convolution = convolution_of(in_type, out_type, kernel_size, padding_mode=padding_mode)
    return SequentialModule(convolution, BatchNorm(out_type), ReLU(out_type, inplace=True))


_SHARED = ("encoding", "window", "padding_mode", "head_fields", "backend")
"""The options of the blocks that a stem of attention takes, too."""


def _lifting(
    in_type: FieldType, out_type: FieldType, stem: Mapping[str, Any], block: Mapping[str, Any]
) -> SequentialModule:
    """The stem of attention, of its own options and of those that it takes from the blocks."""
    check_options("stem", stem, ("num_heads", "kernel_size", *option_names(GroupSelfAttention)))
    shared = {name: block[name] for name in _SHARED if name in block}
    mode = block.get("padding_mode", "none")
    if stem.get("padding_mode", mode) != mode:
        raise ValueError(
            f"padding_mode: got {stem['padding_mode']!r} in stem and {mode!r} in block, needed the same, since the "
            "network is a torus as a whole or not at all; leave it out of stem"
        )
    if stem.get("kernel_size", 5) is None:  # it sees everything, and has no window
        shared.pop("window", None)
    options = {"num_heads": 4, "kernel_size": 5, "dropout": block.get("attention_dropout", 0.0), **shared, **stem}
    options.setdefault("head_fields", -(-len(out_type) // check_int("num_heads", options["num_heads"])))
    lifting = LiftingSelfAttention(in_type, out_type, **options)
    return SequentialModule(lifting, FieldLayerNorm(out_type), SiLU(out_type))


class CNN(PretrainedMixin, nn.Module):
    r"""Convolutions with batch norm and ReLU, a mean over the positions and a linear map.

    The outline of :class:`HybridNet` without a group: stages of convolutions, each on half as many positions along
    every axis as the one before (2×2 maximum), and a last pointwise convolution.

    .. math:: \mathrm{logits} = W \operatorname{mean}_x f(x) + b

    Args:
        in_channels: the channels of the images.
        num_classes: the number of classes.
        widths: the number of channels in each stage.
        convolutions: the number of convolutions in each stage.
        features: the number of channels that the last pointwise convolution gives.
        stem_kernel: the odd width of the first convolution.
        conv_kernel: the odd width of the others.
        antialiased: whether a blur follows the maximum, of windows of 3×3 then, as in :class:`HybridNet`.

    Shape:
        ``(B, in_channels, H, W)`` to ``(B, num_classes)``.

    Raises:
        ValueError: a number that is not positive, lists whose lengths do not agree, or an even width of a kernel.

    Example:
        >>> import torch
        >>> from escnn_attention.models import CNN
        >>> CNN(1, 10, widths=(4, 8), convolutions=(2, 1), features=8)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int],
        convolutions: Sequence[int],
        features: int,
        stem_kernel: int = 5,
        conv_kernel: int = 3,
        antialiased: bool = False,
    ):
        super().__init__()
        self.in_channels = channels = check_int("in_channels", in_channels)
        self.num_classes = check_int("num_classes", num_classes)
        counts = check_sequence("convolutions", convolutions, "one number for each stage")
        sizes = check_ints("widths", widths, len(counts), "one for each stage")
        check_odd_widths(stem_kernel=stem_kernel, conv_kernel=conv_kernel)
        check_bool("antialiased", antialiased)
        stages: dict[str, nn.Module] = {}
        for stage, (width, count) in enumerate(zip(sizes, counts, strict=True), start=1):
            if stage > 1:
                stages[f"pool_{stage - 1}"] = PlainAntialiasedPool("max", 2) if antialiased else nn.MaxPool2d(2)
            for i in range(1, check_int("convolutions", count) + 1):
                kernel = conv_kernel if stages else stem_kernel
                stages[f"convolution_{stage}_{i}"] = nn.Sequential(
                    nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                )
                channels = width
        stages["features"] = nn.Conv2d(channels, check_int("features", features), 1)
        self.stages = nn.ModuleDict(stages)
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits ``(B, num_classes)`` of images ``(B, in_channels, H, W)``."""
        x = images
        for stage in self.stages.values():
            x = stage(x)
        return self.head(x.mean(dim=(-2, -1)))
