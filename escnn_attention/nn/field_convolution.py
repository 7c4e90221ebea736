"""Steerable convolutions in front of the projections of attention."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from escnn.gspaces import GSpace2D, GSpace3D
from escnn.nn import EquivariantModule, FieldType, R2Conv, R3Conv

from escnn_attention._checks import check_int, check_unused
from escnn_attention.exporting.modules import OnTensors, exported
from escnn_attention.plain.self_attention import FieldConvolution


def convolution_of(
    in_type: FieldType, out_type: FieldType, kernel_size: int, *, padding_mode: str = "zeros", groups: int = 1
) -> EquivariantModule:
    """A convolution of escnn without a bias that keeps the grid."""
    kind = R3Conv if isinstance(in_type.gspace, GSpace3D) else R2Conv
    # Without recompute=True equal convolutions share a basis, and a change of precision would affect other networks.
    options = {"padding": kernel_size // 2, "padding_mode": padding_mode, "bias": False, "recompute": True}
    return kind(in_type, out_type, kernel_size, groups=groups, **options)


def field_convolution(
    in_type: FieldType, kernel_size: int, filters: int | None, *, circular: bool
) -> tuple[FieldConvolution | None, FieldType]:
    """The convolution of features before they are projected, if any, and the type of what it gives.

    ``kernel_size`` and ``filters`` are ``projection_kernel_size`` and ``projection_filters`` of
    :class:`GroupSelfAttention`.
    """
    name, gspace = "projection_kernel_size", in_type.gspace
    if check_int(name, kernel_size) == 1:
        check_unused("projection_filters", filters, 1, f"{name} is 1")
        return None, in_type
    if filters is not None:
        check_int("projection_filters", filters)
    if kernel_size % 2 == 0:
        raise ValueError(f"{name}: got {kernel_size}, needed an odd width, which keeps the grid")
    if not isinstance(gspace, (GSpace2D, GSpace3D)):
        raise ValueError(
            f"{name}: got {kernel_size} over {gspace.name}, on which escnn has no convolutions; needed a grid of 2 or "
            "3 dimensions of space, or 1"
        )
    every = list(enumerate(in_type.representations))
    groups = [[i for i, _ in every]]
    if filters is not None:
        groups = [[i for i, r in every if r == kind] for kind in dict.fromkeys(in_type.representations)]
    parts, types, channels = [], list[FieldType](), []
    for some in groups:
        source = in_type.index_select(some)
        types.append(FieldType(gspace, (filters or 1) * list(source.representations)))
        convolution = convolution_of(
            source,
            types[-1],
            kernel_size,
            padding_mode="circular" if circular else "zeros",
            groups=1 if filters is None else len(some),
        )
        parts.append(OnTensors(convolution))
        channels.append([c for i in some for c in range(in_type.fields_start[i], in_type.fields_end[i])])
    return FieldConvolution(parts, channels), reduce(add, types)


def export_parts(convolution: FieldConvolution) -> None:
    """Replace the convolutions of escnn by their exports."""
    convolution.parts = torch.nn.ModuleList(exported(part.module) for part in convolution.parts)
