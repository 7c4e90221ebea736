"""Checks of constructor arguments: field types, windows, and options passed on to another module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import torch
from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType

from escnn_attention._checks import check_bool, check_int, check_option, check_unused
from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.functional import KeyMode, QueryMode
from escnn_attention.functional.call import Normalization
from escnn_attention.geometry.relations import Relation
from escnn_attention.geometry.windows import Window, shape_of
from escnn_attention.groups.fibers import Fibers, is_pointwise, is_regular, regular_fields
from escnn_attention.groups.samples import Samples
from escnn_attention.groups.sequences import SpaceTime
from escnn_attention.plain.projections import ProjectionKind


class Required:
    """The default of an argument behind others with defaults that has to be said all the same."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Required()


def check_type(name: str, value: Any) -> FieldType:
    """``value``, if it is a field type with at least one field."""
    if not isinstance(value, FieldType):
        raise TypeError(f"{name}: got {type(value).__name__}, needed an escnn.nn.FieldType")
    return value


def check_types(in_type: Any, out_type: Any) -> None:
    """Both are field types, and live on one gspace."""
    check_type("in_type", in_type)
    check_type("out_type", out_type)
    check_same_gspace(in_type, out_type)


def check_same_gspace(in_type: FieldType, out_type: FieldType) -> None:
    """Both types live on one gspace."""
    if in_type.gspace != out_type.gspace:
        raise ValueError(
            f"out_type: its gspace is {out_type.gspace.name}, needed that of in_type, {in_type.gspace.name}"
        )


def check_regular(name: str, field_type: FieldType, why: str) -> None:
    """All fields are regular."""
    others = sorted({r.name for r in field_type.representations if not is_regular(r)})
    if others:
        raise ValueError(f"{name}: {why} needs regular fields only, got also {', '.join(others)}")


def check_pointwise(name: str, field_type: FieldType, why: str, instead: str = "") -> None:
    """All fields support pointwise nonlinearities; ``instead`` says what to do where they do not."""
    others = sorted({r.name for r in field_type.representations if not is_pointwise(r)})
    if others:
        raise ValueError(
            f"{name}: {why} acts on every channel by itself, which {', '.join(others)} does not support{instead}"
        )


def choose_head_fields(out_type: FieldType, num_heads: int, head_fields: int | None, order: int) -> int:
    """The regular fields of a head: as asked for, or so that the heads together have those of ``out_type``."""
    if head_fields is not None:
        return check_int("head_fields", head_fields)
    regular = regular_fields(out_type)
    if regular % num_heads:
        raise ValueError(
            f"num_heads: the {regular} regular fields of out_type do not divide among {num_heads} heads; "
            "set head_fields, the number of regular fields of a head"
        )
    # Without regular fields to share: the least number whose heads together have the channels of the output.
    return regular // num_heads if regular else -(-out_type.size // (num_heads * order))


def choose_window(
    group: Fibers,
    in_type: FieldType,
    kernel_size: int | Required | None,
    window: str,
    dilation: int,
    *,
    causal: bool = False,
    padding_mode: PaddingMode = "none",
) -> Window:
    """The window that is asked for, if the group maps it onto itself."""
    check_option("window", window, ("auto", "square", "disc"))
    check_int("dilation", dilation)
    if check_bool("causal", causal) and not isinstance(in_type.gspace, SpaceTime):
        raise ValueError(
            f"causal: got True, but {in_type.gspace.name} has no axis of time; needed fields over sequence_space "
            "or space_time"
        )
    circular = check_padding_mode(group, in_type.gspace, padding_mode, causal=causal)
    if isinstance(kernel_size, Required):
        if group.dimension:
            raise TypeError(
                "kernel_size: got none, needed the odd width of the window, such as 5, or None for attention to the "
                "whole grid, whose cost grows with the square of the number of positions"
            )
        kernel_size = None
    if kernel_size is None:
        for name, value, default in (("window", window, "auto"), ("dilation", dilation, 1)):
            check_unused(name, value, default, "attention is global (kernel_size=None)")
        return Window(None, shape_of("square", causal=causal, circular=circular))
    if group.dimension == 0:
        raise ValueError(
            f"kernel_size: got {kernel_size}, but {in_type.gspace.name} has no base space; leave it at None"
        )
    if check_int("kernel_size", kernel_size) % 2 == 0 and not (causal and group.dimension == 1):
        wide = " of positions along the axes of space" if causal else ""
        raise ValueError(f"kernel_size: got {kernel_size}, needed an odd number{wide} or None for global attention")
    if window == "square" and not group.preserves_square:
        raise ValueError(
            f'window: got "square", which the fiber group of {in_type.gspace.name} does not map onto itself; needed '
            '"disc" or "auto"'
        )
    square = window == "square" or (window == "auto" and group.preserves_square)
    shape = shape_of("square" if square else "disc", causal=causal, circular=circular)
    return Window(kernel_size, shape, dilation)


PaddingMode = Literal["none", "circular"]
"""What lies beyond a grid: nothing, or its other side."""


ConvolutionPadding = Literal["zeros", "circular"]
"""What a convolution finds beyond a grid: zeros, or its other side."""


def check_padding_mode(
    group: Fibers, gspace: GSpace, padding_mode: str, kinds: Any = PaddingMode, *, causal: bool = False
) -> bool:
    """Whether the grid is a torus, if the group maps it to one."""
    check_option("padding_mode", padding_mode, get_args(kinds))
    if padding_mode != "circular":
        return False
    space = gspace.name
    if group.dimension == 0:
        default = get_args(kinds)[0]
        raise ValueError(f'padding_mode: got "circular", but {space} has no base space; leave it at {default!r}')
    if causal and group.dimension == 1:
        raise ValueError(
            f'padding_mode: got "circular" with causal=True over {space}, whose only axis is time; needed axes of space'
        )
    if not group.preserves_square:
        raise ValueError(
            f'padding_mode: got "circular", but the fiber group of {space} does not map a lattice, of which tori are '
            "made, onto itself; needed a subgroup of D4 or of the full octahedral group about the axes"
        )
    return True


AttentionLike: TypeAlias = EquivariantModule | Callable[[FieldType, FieldType], EquivariantModule]
"""An attention from one type to another, or what makes one of the two types."""


Subgroup: TypeAlias = "tuple[Any, ...] | int | None"
"""The id of a subgroup of a finite fiber group, as escnn numbers them; None for the subgroup of one element."""


class HeadOptions(TypedDict, total=False):
    """Options of the heads of an attention layer, which several layers share: see :class:`GroupSelfAttention`."""

    head_fields: int | None
    projection: ProjectionKind
    bias: bool
    qk_norm: bool
    registers: int


class SameGridOptions(HeadOptions, total=False):
    """Options of self-attention on grids that keeps the grid: see :class:`GroupSelfAttention`."""

    is_causal: bool
    normalization: Normalization
    poses: Subgroup
    projection_kernel_size: int
    projection_filters: int | None


class GridOptions(SameGridOptions, total=False):
    """Options of :class:`GroupSelfAttention` besides those that it lists."""

    stride: int
    scale_factor: int


class WindowOptions(SameGridOptions, total=False):
    """Options of attention on grids that lifting and blocks pass on: see :class:`GroupSelfAttention`."""

    encoding: Encoding | str | None
    window: str
    dilation: int
    causal: bool
    padding_mode: PaddingMode
    backend: str
    samples: Samples | int | None


class BlockOptions(WindowOptions, total=False):
    """Options of :class:`TransformerBlock` besides those that it lists."""

    query: QueryMode
    keys: KeyMode
    shared_scores: bool
    attention_dropout: float
    condition: int | None
    cross_attention: EquivariantModule | None


class PointOptions(HeadOptions, total=False):
    """Options of attention between points besides those of its heads: see :class:`PointSelfAttention`."""

    cutoff: bool | Callable[[torch.Tensor], torch.Tensor]
    period: float | Sequence[float] | None


class PointSelfOptions(PointOptions, total=False):
    """Options of :class:`PointSelfAttention` besides those of its heads."""

    poses: Subgroup


class PairOptions(PointOptions, total=False):
    """Options of attention between points that convolutions and blocks pass on: see :class:`PointSelfAttention`."""

    radius: float | None
    num_neighbours: int | None
    query: QueryMode
    relation: Relation | None
    length_scale: float | None
    normalization: Normalization
    edge_dim: int | None
    samples: Samples | int | None


class PointBlockOptions(PairOptions, total=False):
    """Options of :class:`PointTransformerBlock` besides those that it lists."""

    attention_dropout: float
    norm_scope: Literal["position", "pose"]
    poses: Subgroup
    encoding: Encoding | PairKernel | str | None
    keys: KeyMode
    shared_scores: bool
    backend: str


class CrossOptions(PointOptions, total=False):
    """Options of attention between two sets besides those of its heads: see :class:`GroupCrossAttention`."""

    dilation: int
    causal: bool
    is_causal: bool
    padding_mode: PaddingMode
    radius: float | None
    num_neighbours: int | None


def option_names(layer: Callable[..., Any]) -> list[str]:
    """The arguments of a class or function that are passed by name only, with those that it unpacks."""
    parameters = inspect.signature(layer, eval_str=True).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    unpacked = [get_args(p.annotation)[0] for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    return [*names, *(name for kind in unpacked for name in kind.__annotations__)]


def check_options(
    owner: str, options: Mapping[str, Any], known: Collection[str], others: Mapping[str, str] | None = None
) -> None:
    """Check that all names of ``options``, which ``owner`` was given, are known; ``others`` says why some are not."""
    for name in options:
        if name not in known:
            why = f" ({others[name]})" if others and name in others else ""
            raise TypeError(f"{name}: {owner} has no such option{why}, needed some of {', '.join(known)}")


def check_passed_on(
    network: type, owner: str, options: Mapping[str, Any], layer: Callable[..., Any], taken: Collection[str]
) -> None:
    """Check the options ``owner`` of a network, which it passes on to a ``layer``: all but those ``taken``."""
    others = dict.fromkeys(taken, f"{network.__name__} sets it or does without")
    others |= dict.fromkeys(inspect.signature(network).parameters, f"{network.__name__} has it itself")
    check_options(owner, options, [name for name in option_names(layer) if name not in taken], others)


def choose_attention(
    attention: AttentionLike,
    in_type: FieldType,
    out_type: FieldType,
    options: Mapping[str, Any],
    **own: tuple[Any, Any],
) -> EquivariantModule:
    """The attention of a block between these types: a module, or what makes one.

    The options of an attention that the block would make are refused: ``own``, each with its default, and others.
    """
    for name, value in {**changed(own), **options}.items():
        raise ValueError(f"{name}: got {value!r} beside an attention, which has options of its own; leave out one")
    is_made = isinstance(attention, EquivariantModule) or not callable(attention)
    layer = attention if is_made else attention(in_type, out_type)
    if not isinstance(layer, EquivariantModule):
        raise TypeError(
            f"attention: got {type(layer).__name__}, needed an equivariant module, or a function of two types that "
            "makes one"
        )
    for name, got, needed in (("in_type", layer.in_type, in_type), ("out_type", layer.out_type, out_type)):
        if got != needed:
            raise ValueError(f"attention: its {name} is {got}, needed {needed}")
    return layer


def changed(values: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The values that are not their defaults, of ``(value, default)`` by name."""
    return {name: value for name, (value, default) in values.items() if value != default}


def shown(**options: tuple[Any, Any]) -> list[str]:
    """The options that are not their defaults, as a representation shows them; of ``(value, default)`` by name."""
    return [f"{name}={value!r}" for name, value in changed(options).items()]
