"""Images of fields, as they are drawn and transformed."""

from __future__ import annotations

import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.groups.fibers import is_regular


def as_drawn(values: Tensor) -> Tensor:
    """``values`` on the CPU without a graph, as float32: NumPy has no bfloat16."""
    return values.detach().float().cpu()


def transformed(x: GeometricTensor, element: GroupElement) -> GeometricTensor:
    """``x.transform(element)`` in any precision: escnn goes through NumPy."""
    precise = x.tensor if x.tensor.dtype == torch.float64 else x.tensor.float()
    found = GeometricTensor(precise, x.type).transform(element)
    return GeometricTensor(found.tensor.to(x.tensor), x.type)


def is_regular_map(value: object) -> bool:
    """Whether a value is a tensor of regular fields on a grid in the plane."""
    return (
        isinstance(value, GeometricTensor)
        and value.tensor.ndim == 4
        and not value.type.gspace.fibergroup.continuous
        and all(is_regular(r) for r in value.type.representations)
    )
