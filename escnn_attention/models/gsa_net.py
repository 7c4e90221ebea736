"""The stand-alone group self-attention networks of GSA-Nets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypedDict

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, SequentialModule
from typing_extensions import Self, Unpack

from escnn_attention._checks import check_bool, check_int, check_option, check_sequence
from escnn_attention.encodings import Encoding, SeparableEncoding
from escnn_attention.functional import QueryMode
from escnn_attention.models.classifier import EquivariantClassifier, PositionSum
from escnn_attention.models.convolutions import drop, image_type, regular_type
from escnn_attention.nn.arguments import option_names
from escnn_attention.nn.norms import check_norm_kind, norm_of
from escnn_attention.nn.pointwise import PoseLinear, SiLU
from escnn_attention.nn.resample import HalvingPool
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.nn.transformer import TransformerBlock, each_block
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses
from escnn_attention.plain.self_attention import SelfAttention

_TAKEN = ("norm", "crop", "attention", "samples", "query", "projection")
"""Options of blocks that the network sets itself."""

_GAIN = math.sqrt(2)  # "He's initialisation"


def _outline(
    blocks: Sequence[int], expansion: Sequence[int] | None, crops: Sequence[int] | None, pool: Sequence[bool] | None
) -> list[tuple[int, list[int], bool]]:
    """Of each stage how its first block multiplies the fields, the margins that its blocks crop, whether it pools."""
    counts = [check_int("blocks", n, least=0) for n in check_sequence("blocks", blocks, "one number for each stage")]
    factors = [check_int("expansion", n) for n in _listed("expansion", expansion, len(counts), "stage", 1)]
    pooled = [check_bool("pool", value) for value in _listed("pool", pool, len(counts), "stage", False)]
    margins = [check_int("crops", n, least=0) for n in _listed("crops", crops, sum(counts), "block", 0)]
    if any(n > 1 and not count for n, count in zip(factors, counts, strict=True)):
        raise ValueError("expansion: a stage without blocks has none to widen, needed 1 for it")
    stops = list(accumulate(counts, initial=0))
    of_stages = (margins[start:stop] for start, stop in pairwise(stops))
    return list(zip(factors, of_stages, pooled, strict=True))


class GSANetOptions(TypedDict, total=False):
    """Options of :class:`GSANet`."""

    channels: int
    blocks: Sequence[int]
    expansion: Sequence[int] | None
    crops: Sequence[int] | None
    pool: Sequence[bool] | None
    num_heads: int
    kernel_size: int | None
    query: QueryMode | Literal["each"]
    norm_between: bool
    input_dropout: float
    pool_dropout: float
    readout: Literal["max", "sum"]
    block: Mapping[str, Any] | None


class GSANet(EquivariantClassifier):
    r"""A stand-alone group self-attention network (GSA-Nets, Figure F.1).

    .. math::
        f_0 &= \sigma(\mathrm{LN}(\mathrm{Lifting}(\mathrm{image}))) \\
        f_{i+1} &= \mathrm{Pool}(\mathrm{Block}_{i, n_i}(\cdots \mathrm{Block}_{i, 1}(f_i))) \\
        \mathrm{logits} &= \operatorname{mean}_x \max_h\, W f(x, h)

    with the blocks of :class:`TransformerBlock` (``norm="gsa"``), and maps that mix channels but not poses: apart from
    the pose embeddings the number of parameters does not depend on the group. (The trivial group needs no embedding of
    its single pose, and the coordinates get its channels.)

    :meth:`rotmnist`, :meth:`cifar10` and :meth:`patch_camelyon` build the networks of the paper. Unlike the published
    code this network is equivariant: in its encodings, by discs as windows where the group does not map a square onto
    itself, and by symmetric poolings (:class:`HalvingPool`). Encoders do not normalise their hidden features.

    Args:
        gspace: the symmetry, of the plane or of space.
        in_channels: the channels of the images.
        num_classes: the number of classes.
        channels: the number of regular fields after the lifting layer.
        blocks: the number of attention blocks in each stage.
        expansion: for each stage, by how much its first block multiplies the number of fields.
        crops: for each attention block of all stages, the margin that it takes off the grid.
        pool: for each stage, whether it ends in 2×2 pooling. A stage may have no blocks and only pool.
        num_heads: the number of heads; each has half as many fields as the layer gives.
        kernel_size: the width of the windows; None for global attention.
        query: the queries that contribute to a pose; ``"all"`` in the paper. ``"each"`` gives each relative pose its
            own heads: :math:`|H|` times the heads, with queries of the pose itself, projections of the attention that
            mix poses, and by default one encoding per head. GE-ViT's networks have this form: there, head d has the
            queries :math:`q(x, h d)` and its own table over the poses.
        norm_between: whether a layer norm and a nonlinearity follow every block.
        input_dropout: of the pixels.
        pool_dropout: in front of every pooling.
        readout: ``"max"`` for the logits above; ``"sum"`` for :math:`\max_h \sum_x W f(x, h)`, those of the published
            code.
        block: further options of every :class:`TransformerBlock`: ``attention_dropout`` and ``dropout``, by default
            0.1; ``encoding``, ``window``, ``padding_mode`` and ``backend``, which the lifting layer shares (with
            ``"circular"`` the whole network is of tori, whose sides are even where they are halved);
            ``norm_kind`` and ``norm_eps``, of all norms of the network; ``drop_path`` (of the last block; from 0 of the
            first it rises by equal steps), ``layer_scale`` and ``qk_norm``. The default encoding is a
            :class:`SeparableEncoding` that all heads share, as published.

    Shape:
        ``(B, in_channels, *space)`` to ``(B, num_classes)``.

    Raises:
        ValueError: a gspace without a grid, lists whose lengths do not agree, numbers that are not positive, or, on
            application, images too small for the crops and poolings.

    Example:
        >>> import torch
        >>> from escnn_attention.models import GSANet
        >>> from escnn import gspaces
        >>> network = GSANet.rotmnist(gspaces.rot2dOnR2(4), kernel_size=5)
        >>> network(torch.randn(1, 1, 28, 28)).shape
        torch.Size([1, 10])

    Source: Romero and Cordonnier, "Group Equivariant Stand-Alone Self-Attention For Vision", ICLR 2021, Figure F.1 and
    Appendix F, with the details of the published implementation.
    """

    def __init__(
        self,
        gspace: GSpace,
        in_channels: int,
        num_classes: int,
        *,
        channels: int,
        blocks: Sequence[int],
        expansion: Sequence[int] | None = None,
        crops: Sequence[int] | None = None,
        pool: Sequence[bool] | None = None,
        num_heads: int = 9,
        kernel_size: int | None = 5,
        query: QueryMode | Literal["each"] = "all",
        norm_between: bool = False,
        input_dropout: float = 0.0,
        pool_dropout: float = 0.0,
        readout: Literal["max", "sum"] = "max",
        block: Mapping[str, Any] | None = None,
    ):
        image = image_type(gspace, in_channels)
        check_bool("norm_between", norm_between)
        check_option("query", query, ("own", "all", "each"))
        check_option("readout", readout, ("max", "sum"))
        outline = _outline(blocks, expansion, crops, pool)
        fields = regular_type(gspace, check_int("channels", channels))
        given: dict[str, Any] = {"attention_dropout": 0.1, "dropout": 0.1, **(block or {})}
        least = 2 * gspace.dimensionality + 2
        if given.get("encoding") is None and channels < least:
            raise ValueError(
                f"channels: got {channels}, needed at least {least}, so that a head has a channel for each coordinate "
                "and one for the poses"
            )
        layers: dict[str, Any] = {"num_heads": num_heads, "kernel_size": kernel_size, "projection": "pointwise"}
        layers["dropout"] = given.pop("attention_dropout")
        blocks_left, of_attention = _blocks(given, sum(len(margins) for _, margins, _ in outline))
        names = ("encoding", "window", "padding_mode", "backend")
        shared = {name: of_attention[name] for name in names if name in of_attention}
        has_encoding = shared.get("encoding") is not None
        if not has_encoding:
            shared["encoding"] = SeparableEncoding(per_head=False)
        mode = shared.get("padding_mode", "none")
        if mode == "circular" and any(any(margins) for _, margins, _ in outline):
            raise ValueError('crops: got margins with padding_mode="circular", and a torus has no border; needed 0')
        kind, eps = check_norm_kind(given.get("norm_kind")), given.get("norm_eps", 1e-5)

        def norm(fields: FieldType) -> tuple[EquivariantModule, ...]:
            return norm_of(fields, kind, "sample", eps), SiLU(fields)

        lifting = LiftingSelfAttention(image, fields, **_half("head", fields), **layers, **shared)
        first = drop(image, input_dropout, "input_dropout").values()
        stages: dict[str, EquivariantModule] = {"lifting": SequentialModule(*first, lifting, *norm(fields))}
        of_attention |= layers | shared | {"query": query}
        if query == "each":
            encoding = {} if has_encoding else {"encoding": SeparableEncoding()}
            heads = num_heads * gspace.fibergroup.order()
            of_attention |= {"query": "own", "projection": "group", "num_heads": heads, **encoding}

        def attention(fields: FieldType, wider: FieldType) -> GroupSelfAttention:
            return GroupSelfAttention(fields, wider, **_half("head", wider), **of_attention)

        for number, (factor, margins, pooled) in enumerate(outline, start=1):
            wider = regular_type(gspace, len(fields) * factor)
            for i, crop in enumerate(margins, start=1):
                own = {"projection": "pointwise", **_half("hidden", wider), **next(blocks_left)}
                layer = TransformerBlock(fields, wider, attention=attention, crop=crop, **own)
                fields = wider
                stages[f"attention_{number}_{i}"] = SequentialModule(layer, *(norm(fields) if norm_between else ()))
            if pooled:
                first = drop(fields, pool_dropout, "pool_dropout").values()
                stages[f"pool_{number}"] = SequentialModule(*first, HalvingPool(fields, padding_mode=mode))
        classes = regular_type(gspace, check_int("num_classes", num_classes))
        stages["classes"] = PoseLinear(fields, classes, projection="pointwise", bias=False)
        if readout == "sum":
            stages["sum"] = PositionSum(classes)
        super().__init__(stages, None)
        self.reset_parameters()

    @classmethod
    def rotmnist(cls, gspace: GSpace, **options: Unpack[GSANetOptions]) -> Self:
        """The network for rotated MNIST (App. F.1): one channel of 28×28, five blocks of 20 fields.

        The groups of the paper are Z2, R4, R8, R12 and R16; ``options`` take the place of its options.
        """
        published: GSANetOptions = {"channels": 20, "blocks": (2, 3), "crops": (2, 0, 2, 1, 1), "pool": (True, False)}
        return cls(gspace, 1, 10, **(published | options))

    @classmethod
    def cifar10(cls, gspace: GSpace, **options: Unpack[GSANetOptions]) -> Self:
        """The network for CIFAR-10 (App. F.2): three channels of 32×32, six blocks of 96 and 192 fields.

        The groups of the paper are Z2 and Z2M.
        """
        published: GSANetOptions = {
            "channels": 96,
            "blocks": (2, 2, 2),
            "expansion": (1, 2, 1),
            "pool": (True, True, False),
            "norm_between": True,
            "input_dropout": 0.3,
            "pool_dropout": 0.2,
        }
        return cls(gspace, 3, 10, **(published | options))

    @classmethod
    def patch_camelyon(cls, gspace: GSpace, **options: Unpack[GSANetOptions]) -> Self:
        """The network for PatchCamelyon (App. F.3): three channels of 96×96, four blocks of 24 to 96 fields.

        The groups of the paper are Z2, R4, R8 and R4M.
        """
        published: GSANetOptions = {
            "channels": 12,
            "blocks": (0, 1, 2, 1),
            "expansion": (1, 2, 2, 2),
            "crops": (0, 2, 1, 1),
            "pool": (True, True, True, True),
            "norm_between": True,
        }
        return cls(gspace, 3, 2, **(published | options))

    @torch.no_grad()
    def reset_parameters(self, gain: float = _GAIN) -> None:
        r"""Draw all weights as the published implementation does.

        Weights are normal with standard deviation ``gain`` / √(fan in), biases 0, pose embeddings standard normal,
        norms the identity. There, scores are divided by the square root of the number s of fields a layer is given,
        here by that of the C channels of a head: queries are scaled by :math:`\sqrt{C / s}`, which gives the same.
        """
        for module in self.modules():
            if isinstance(module, (ToPoses, FromPoses, Scalars)):
                module.weight.normal_(std=gain / math.sqrt(module.weight.shape[1]))
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=gain / math.sqrt(module.in_features))
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Encoding) and module.pose_embedding is not None:
                module.pose_embedding.normal_()
        for module in self.modules():
            if isinstance(module, SelfAttention):
                weight = module.project_in.weight
                queries = len(weight) // len(module.needs.fields)  # those of all heads come first
                weight[:queries] *= math.sqrt(queries / module.num_heads / weight.shape[1])
                module.start()


def _listed(name: str, values: Sequence[Any] | None, count: int, unit: str, default: Any) -> list[Any]:
    """One value for each stage or block."""
    if values is None:
        return [default] * count
    if len(check_sequence(name, values, f"one value for each {unit}")) != count:
        raise ValueError(f"{name}: got {len(values)} values, needed one for each {unit}, {count}")
    return list(values)


def _half(what: str, fields: FieldType) -> dict[str, Any]:
    """The option of so many fields of one kind, half as many as there are."""
    return {f"{what}_fields": max(1, len(fields) // 2)}


def _blocks(block: Mapping[str, Any], number: int) -> tuple[Iterator[dict[str, Any]], dict[str, Any]]:
    """The options of each block besides its attention, and those of the attention of all of them."""
    options = each_block(GSANet, block, number, _TAKEN)
    of_attention = [n for n in option_names(GroupSelfAttention) if n != "dropout"]
    rest = [{n: value for n, value in own.items() if n not in of_attention} for own in options]
    return iter(rest), {n: block[n] for n in of_attention if n in block}
