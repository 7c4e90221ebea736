"""The four networks of the comparison.

All have the same outline: a first layer from the image to hidden fields, three further blocks, a pointwise map to the
final features, a maximum over poses (equivariant networks only), the mean over positions, and a linear map to the
classes. Grids of 8×8 or more are halved by 2×2 pooling without padding wherever the size is even, which keeps the
equivariance on the grid exact; odd sizes are not pooled. So 8×8 images are looked at on 4×4 positions after the first
layer, 28×28 images on 14×14 and then 7×7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from escnn import nn as enn
from escnn.gspaces import GSpace
from torch import Tensor, nn

from escnn_attention import FieldLayerNorm, LiftingSelfAttention, SiLU, TransformerBlock
from escnn_attention.models import EquivariantClassifier
from escnn_attention.training.settings import NETWORK_NAMES

_HEADS = 2
_LIFTING_HEADS = 4
_FIRST_KERNEL = 5
_KERNEL = 3
_WINDOW = 5
_BLOCKS = 3  # after the first layer
_LEAST_POOLED = 8  # smaller grids are not pooled


class PlainClassifier(nn.Module):
    """Stages of ordinary modules, mean over positions, linear map: images (B, 1, S, S) to logits (B, classes).

    Args:
        stages: by name, in order; feature maps (B, C, H, W) to feature maps.
        features: channels after the last stage.
        num_classes: number of classes.
    """

    def __init__(self, stages: Mapping[str, nn.Module], features: int, num_classes: int) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.head = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for stage in self.stages.values():
            x = stage(x)
        logits: Tensor = self.head(x.mean(dim=(-2, -1)))
        return logits


@dataclass(frozen=True)
class _Stage:
    """The grid that comes to a stage, and whether the stage ends in 2×2 pooling."""

    size: int
    pooled: bool


def _plan(size: int) -> list[_Stage]:
    """The first layer and the blocks, for images of ``size``."""
    plan = []
    for _ in range(1 + _BLOCKS):
        stage = _Stage(size, pooled=size >= _LEAST_POOLED and size % 2 == 0)
        plan.append(stage)
        size = size // 2 if stage.pooled else size
    return plan


def cnn(gspace: GSpace, size: int, num_classes: int, width: int, features: int) -> PlainClassifier:
    """The non-equivariant network: four convolutions with batch norm. ``gspace`` is of no concern to it."""

    def convolution(channels: int, kernel_size: int, pooled: bool) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, width, kernel_size, padding=kernel_size // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            *[nn.MaxPool2d(2)] * pooled,
        )

    first, *others = _plan(size)
    stages: dict[str, nn.Module] = {"convolution_1": convolution(1, _FIRST_KERNEL, first.pooled)}
    for i, stage in enumerate(others, start=2):
        stages[f"convolution_{i}"] = convolution(width, _KERNEL, stage.pooled)
    stages["features"] = nn.Conv2d(width, features, 1)
    return PlainClassifier(stages, features, num_classes)


def _types(gspace: GSpace, width: int, features: int) -> tuple[enn.FieldType, enn.FieldType, enn.FieldType]:
    image = enn.FieldType(gspace, [gspace.trivial_repr])
    return image, *(enn.FieldType(gspace, count * [gspace.regular_repr]) for count in (width, features))


def _pooling(kind: enn.FieldType, pooled: bool) -> list[enn.EquivariantModule]:
    return [enn.PointwiseMaxPool2D(kind, kernel_size=2, stride=2)] if pooled else []


def _convolution(in_type: enn.FieldType, out_type: enn.FieldType, kernel_size: int, **options: Any) -> enn.R2Conv:
    # Without recompute=True all convolutions that are alike share a basis: a change of precision would reach other
    # networks.
    return enn.R2Conv(in_type, out_type, kernel_size, recompute=True, **options)


def _steerable(source: enn.FieldType, hidden: enn.FieldType, kernel_size: int, pooled: bool) -> enn.SequentialModule:
    return enn.SequentialModule(
        _convolution(source, hidden, kernel_size, padding=kernel_size // 2, bias=False),
        enn.InnerBatchNorm(hidden),
        enn.ReLU(hidden, inplace=True),
        *_pooling(hidden, pooled),
    )


def steerable_cnn(gspace: GSpace, size: int, num_classes: int, width: int, features: int) -> EquivariantClassifier:
    """The same four convolutions, steerable: escnn only."""
    image, hidden, final = _types(gspace, width, features)
    first, *others = _plan(size)
    stages: dict[str, enn.EquivariantModule] = {"lifting": _steerable(image, hidden, _FIRST_KERNEL, first.pooled)}
    for i, stage in enumerate(others, start=2):
        stages[f"convolution_{i}"] = _steerable(hidden, hidden, _KERNEL, stage.pooled)
    stages["features"] = _convolution(hidden, final, 1)
    return EquivariantClassifier(stages, num_classes)


def hybrid(gspace: GSpace, size: int, num_classes: int, width: int, features: int) -> EquivariantClassifier:
    """Two steerable convolutions find local features, two blocks of group self-attention relate them."""
    image, hidden, final = _types(gspace, width, features)
    first, second, *others = _plan(size)
    stages: dict[str, enn.EquivariantModule] = {
        "lifting": _steerable(image, hidden, _FIRST_KERNEL, first.pooled),
        "convolution_2": _steerable(hidden, hidden, _KERNEL, second.pooled),
    }
    for i, stage in enumerate(others, start=1):
        stages[f"attention_{i}"] = _attention(hidden, "pre", stage)
    stages["features"] = enn.SequentialModule(FieldLayerNorm(hidden), _convolution(hidden, final, 1))
    return EquivariantClassifier(stages, num_classes)


def gsa_net(gspace: GSpace, size: int, num_classes: int, width: int, features: int) -> EquivariantClassifier:
    """A stand-alone group self-attention network (GSA-Nets, Fig. F.1): no convolution sees more than a pixel."""
    image, hidden, final = _types(gspace, width, features)
    first, *others = _plan(size)
    stages: dict[str, enn.EquivariantModule] = {
        "lifting": enn.SequentialModule(
            LiftingSelfAttention(image, hidden, _LIFTING_HEADS, _WINDOW, head_fields=-(-width // _LIFTING_HEADS)),
            FieldLayerNorm(hidden),
            SiLU(hidden),
            *_pooling(hidden, first.pooled),
        )
    }
    for i, stage in enumerate(others, start=1):
        stages[f"attention_{i}"] = _attention(hidden, "gsa", stage)
    stages["features"] = _convolution(hidden, final, 1)
    return EquivariantClassifier(stages, num_classes)


def _attention(hidden: enn.FieldType, norm: Literal["gsa", "pre"], stage: _Stage) -> enn.EquivariantModule:
    # On a grid no larger than the window, attention to everything sees more and costs less.
    window = _WINDOW if stage.size > _WINDOW else None
    block = TransformerBlock(hidden, hidden, _HEADS, window, head_fields=-(-len(hidden) // _HEADS), norm=norm)
    return enn.SequentialModule(block, *_pooling(hidden, True)) if stage.pooled else block


Builder = Callable[[GSpace, int, int, int, int], nn.Module]
"""``(gspace, size, num_classes, width, features)`` to a network; ``width`` hidden and ``features`` final fields."""

NETWORKS: dict[str, Builder] = dict(zip(NETWORK_NAMES, (cnn, steerable_cnn, hybrid, gsa_net), strict=True))
"""The networks by the names that the command line knows, in the order of the table."""

TITLES = {"cnn": "plain CNN", "steerable": "steerable CNN", "hybrid": "hybrid", "gsa-net": "GSA-Net"}
"""How tables and figures call them."""

DESCRIPTIONS = {
    "cnn": "not equivariant",
    "steerable": "steerable convolutions",
    "hybrid": "convolutions and attention",
    "gsa-net": "attention only",
}
"""What each is made of, for figures and captions."""


def count_parameters(network: nn.Module) -> int:
    """The number of trainable numbers in ``network``."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def build_network(name: str, gspace: GSpace, size: int, num_classes: int, parameters: int, seed: int) -> nn.Module:
    """The network ``name`` with about ``parameters`` parameters, initialised from ``seed``.

    The width is the largest with which the network stays below the budget; the number of final features, of which each
    adds few parameters, fills the rest.

    Args:
        name: one of :data:`NETWORKS`.
        gspace: the symmetry.
        size: side of the images in pixels.
        num_classes: number of classes.
        parameters: the budget. Below what one hidden field needs, the smallest network is built.
        seed: of the initial weights. The state of torch's generator is left as it was.
    """
    build = NETWORKS[name]

    def size_of(width: int, features: int) -> int:
        return count_parameters(build(gspace, size, num_classes, width, features))

    with torch.random.fork_rng(devices=[]):
        low, high = 1, 2
        while size_of(high, high) <= parameters:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size_of(middle, middle) <= parameters else (low, middle)
        least = size_of(low, low)
        each = size_of(low, low + 1) - least  # the count is affine in the number of features
        features = low + max(0, round((parameters - least) / each))
        torch.manual_seed(seed)
        return build(gspace, size, num_classes, low, features)
