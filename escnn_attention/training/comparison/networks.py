"""The four networks of the comparison, described as a configuration file describes them.

All have the same outline: a first layer from the image to hidden fields, two or three further layers, a pointwise map
to the final features, a maximum over poses (equivariant networks only), the mean over positions, and a linear map to
the classes. Grids of more than 8×8 are halved by 2×2 pooling wherever the size is even; odd sizes are not pooled. So
16×16 images are looked at on 8×8 positions after the first layer, 28×28 images on 14×14 and then 7×7. Smaller grids
would lose what a rotation by an angle that does not keep the pixels leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from escnn_attention.training.comparison.groups import describe_gspace
from escnn_attention.training.experiment.described import build_described

TITLES = {"cnn": "plain CNN", "steerable": "steerable CNN", "hybrid": "hybrid", "gsa-net": "GSA-Net"}
"""How tables and figures call the networks."""

DESCRIPTIONS = {
    "cnn": "not equivariant",
    "steerable": "steerable convolutions",
    "hybrid": "convolutions and attention",
    "gsa-net": "attention only",
}
"""What each network is made of, for figures and captions."""

_LAYERS = {"cnn": (4, 0), "steerable": (4, 0), "hybrid": (3, 1), "gsa-net": (1, 2)}
"""How many layers convolve, and how many attend after them. The stem of the GSA-Net is a lifting attention."""

_LARGEST = 8  # grids of this size, and smaller ones, are not pooled

# Every head begins with a place of a convolution: with a thousand images, attention that has to find its places first
# is far behind one that knows them. Layer norms of each position would make as much of the dark ones as of the others.
_ATTENTION = {
    "num_heads": 4,
    "kernel_size": 5,
    "block": {
        "encoding": "convolutional",
        "head_fields": 2,
        "keys": "own",
        "projection": "group",
        "norm_scope": "sample",
    },
    "last_norm": False,
}


def count_parameters(network: nn.Module) -> int:
    """The number of trainable numbers in ``network``."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def describe_network(name: str, group: str, size: int, num_classes: int, parameters: int) -> dict[str, Any]:
    """The network ``name`` with about ``parameters`` parameters, as ``class_path`` and ``init_args``.

    The width is the largest with which the network stays below the budget; the number of final features, of which each
    adds few parameters, fills the rest.

    Args:
        name: one of :data:`TITLES`.
        group: the symmetry, see :func:`~.groups.gspace_by_name`.
        size: side of the images in pixels.
        num_classes: number of classes.
        parameters: the budget. Below what one hidden field needs, the smallest network is described.

    Example:
        >>> network = describe_network("hybrid", "c4", 16, 10, 900)
        >>> network["class_path"], network["init_args"]["convolutions"], network["init_args"]["attention"]
        ('escnn_attention.models.HybridNet', [1, 2], [0, 1])
    """
    describe = _outline(name, group, size, num_classes)

    def size_of(width: int, features: int) -> int:
        return count_parameters(build_described(describe(width, features)))

    with torch.random.fork_rng(devices=[]):
        low, high = 1, 2
        while size_of(high, high) <= parameters:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size_of(middle, middle) <= parameters else (low, middle)
        least = size_of(low, low)
        each = size_of(low, low + 1) - least  # the count is affine in the number of features
    return describe(low, low + max(0, round((parameters - least) / each)))


def _outline(name: str, group: str, size: int, num_classes: int) -> Callable[[int, int], dict[str, Any]]:
    """The description of a network as a function of its width and the number of final features."""
    convolving, attending = _LAYERS[name]
    layers = _layers_by_grid(size, convolving + attending)
    options: dict[str, Any] = {"in_channels": 1, "num_classes": num_classes}
    if name == "cnn":
        model, options["convolutions"] = "CNN", layers
    else:
        convolutions: list[int] = []
        for count in layers:
            convolutions.append(min(count, convolving - sum(convolutions)))
        attention = [count - convolving for count, convolving in zip(layers, convolutions, strict=True)]
        model = "HybridNet"
        options |= {"gspace": describe_gspace(group), "convolutions": convolutions, "attention": attention}
        options |= _ATTENTION if attending else {}
    if name == "gsa-net":
        # Each looks at an orbit of places at first: four would leave most of the window out.
        options["stem"] = {"num_heads": 9, "kernel_size": 5}

    def describe(width: int, features: int) -> dict[str, Any]:
        sizes = {"widths": len(layers) * [width], "features": features}
        return {"class_path": f"escnn_attention.models.{model}", "init_args": {**options, **sizes}}

    return describe


def _layers_by_grid(size: int, count: int) -> list[int]:
    """How many of ``count`` layers see each grid, from that of the image to the last."""
    layers = [0]
    for i in range(count):
        layers[-1] += 1
        if i + 1 < count and size > _LARGEST and size % 2 == 0:
            layers.append(0)
            size //= 2
    return layers
