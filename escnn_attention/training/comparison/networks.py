"""The four networks of the comparison: the shipped networks of digits, for another group, size and budget.

All have the same outline: a first layer from the image to hidden fields, two or three further layers, a pointwise map
to the final features, a maximum over poses (equivariant networks only), the mean over positions, and a linear map to
the classes. Grids of more than 8×8 and even size are halved by a maximum and a blur. So layers after the first see 8×8
positions of 16×16 images, and 14×14 and then 7×7 of 28×28 images. Smaller grids would lose the effect of a rotation
that does not map pixels onto pixels.
"""

from __future__ import annotations

import copy
import functools
import re
from bisect import bisect_right
from typing import Any

import torch
from escnn.gspaces import GSpace

from escnn_attention.models.description import build
from escnn_attention.models.registry import description_of
from escnn_attention.nn.summary import count_parameters
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.network import build_described

_LAYERS = {"cnn": (4, 0), "steerable": (4, 0), "hybrid": (3, 1), "gsa-net": (1, 2)}
"""The numbers of convolutions and of attention layers behind them. The stem of the GSA-Net is a lifting attention."""

_LARGEST_GRID = 8  # grids of this size, and smaller ones, are not pooled
_LARGEST_ORDER = 32


def describe_gspace(name: str) -> dict[str, Any]:
    """The plane with the group ``cN`` or ``dN``, as a configuration file describes it; see :func:`gspace_by_name`."""
    match = re.fullmatch(r"([cd])([1-9]\d{0,3})", name.lower())
    if match is None:
        example = "cN for rotations by 360°/N or dN with reflections, for example c4 or d4"
        raise UserError(f"unknown group {name!r}: give {example}")
    kind, fold = match[1], int(match[2])
    order = fold if kind == "c" else 2 * fold
    if order < 2:
        raise UserError("group 'c1' is no symmetry at all: choose c2 or more")
    if order > _LARGEST_ORDER:
        raise UserError(f"group {name!r} has {order} elements: choose one with at most {_LARGEST_ORDER}")
    if name.lower() == "d1":
        return {"class_path": "escnn.gspaces.flip2dOnR2"}
    space = "rot2dOnR2" if kind == "c" else "flipRot2dOnR2"
    return {"class_path": f"escnn.gspaces.{space}", "init_args": {"N": fold}}


def gspace_by_name(name: str) -> GSpace:
    """The plane with the group ``cN`` (rotations by 360°/N) or ``dN`` (these and reflections), of 2 to 32 elements.

    >>> gspace_by_name("d4").fibergroup.order()
    8
    """
    return build(describe_gspace(name))


def describe_network(name: str, group: str, size: int, num_classes: int, parameters: int) -> dict[str, Any]:
    """The network ``name`` with about ``parameters`` parameters, as ``class_path`` and ``init_args``.

    The width is the largest within the budget, at least one hidden field; the number of final features, of which each
    adds few parameters, fills the rest. ``size`` is the side of the images.

    >>> network = describe_network("hybrid", "c4", 16, 10, 900)
    >>> network["class_path"], network["init_args"]["convolutions"], network["init_args"]["attention"]
    ('escnn_attention.models.HybridNet', [1, 2], [0, 1])
    """
    return copy.deepcopy(_described(name, group, size, num_classes, parameters))


@functools.cache
def _described(name: str, group: str, size: int, num_classes: int, parameters: int) -> dict[str, Any]:
    layers, base = _outline(name, group, size)

    def sized(width: int, features: int) -> dict[str, Any]:
        sizes = {"num_classes": num_classes, "widths": len(layers) * [width], "features": features}
        return {**base, "init_args": {**base["init_args"], **sizes}}

    def size_of(width: int, features: int) -> int:
        return count_parameters(build_described(sized(width, features)))

    with torch.random.fork_rng(devices=[]):
        high = 2
        while size_of(high, high) <= parameters:
            high *= 2
        too_wide = bisect_right(range(high), parameters, high // 2, key=lambda width: size_of(width, width))
        width = max(1, too_wide - 1)
        least = size_of(width, width)
        each = size_of(width, width + 1) - least  # the count is affine in the number of features
    return sized(width, width + max(0, round((parameters - least) / each)))


def _outline(name: str, group: str, size: int) -> tuple[list[int], dict[str, Any]]:
    """The layers of a network on each of its grids, and its description but for sizes."""
    convolving, attending = _LAYERS[name]
    layers = _layers_by_grid(size, convolving + attending)
    if name == "cnn":
        base: dict[str, Any] = {"class_path": "escnn_attention.models.CNN", "init_args": {"convolutions": layers}}
    else:
        convolutions: list[int] = []
        for count in layers:
            convolutions.append(min(count, convolving - sum(convolutions)))
        attention = [count - convolving for count, convolving in zip(layers, convolutions, strict=True)]
        base = description_of(f"{name}-digits")
        base["init_args"] |= {"gspace": describe_gspace(group), "convolutions": convolutions, "attention": attention}
    base["init_args"] |= {"in_channels": 1, "antialiased": True}
    return layers, base


def _layers_by_grid(size: int, count: int) -> list[int]:
    """The numbers of layers, ``count`` in all, on each grid from that of the image to the last."""
    layers = [0]
    for i in range(count):
        layers[-1] += 1
        if i + 1 < count and size > _LARGEST_GRID and size % 2 == 0:
            layers.append(0)
            size //= 2
    return layers
