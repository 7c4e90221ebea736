"""Stand-alone group self-attention networks (GSA-Nets, Fig. F.1), for the sake of their cost.

The published networks crop inside of a block; here the output of a block is cropped, which costs a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from escnn import nn as enn
from torch import Tensor, nn

from escnn_attention import FieldLayerNorm, LiftingSelfAttention, SiLU, TransformerBlock
from examples.benchmarks.subjects.spaces import gspace, regular
from examples.benchmarks.subjects.subject import Poses, Step

_HEADS = 9


@dataclass(frozen=True)
class Block:
    """A transformer block.

    Attributes:
        fields: regular fields it gives.
        crop: positions cut off at every side afterwards.
        pooled: whether it ends in 2×2 pooling.
    """

    fields: int
    crop: int = 0
    pooled: bool = False


@dataclass(frozen=True)
class Plan:
    """A network.

    Attributes:
        space: the group, as in :func:`.spaces.gspace`.
        channels, size, classes: the images and the answers.
        lifted: regular fields after the lifting layer.
        pooled: whether the lifting layer ends in 2×2 pooling.
        blocks: what follows.
        normalised: whether norm and activation follow each block.
    """

    space: str
    channels: int
    size: int
    classes: int
    lifted: int
    pooled: bool
    blocks: tuple[Block, ...]
    normalised: bool


ROTMNIST = Plan(
    "c4",
    1,
    28,
    10,
    20,
    False,
    (Block(20, crop=2), Block(20, pooled=True), Block(20, crop=2), *2 * [Block(20, 1)]),
    False,
)
"""The network for rotated MNIST, for p4."""

PCAM = Plan("d4", 3, 96, 2, 12, True, (Block(24, 0, True), Block(48, 2), Block(48, 1, True), Block(96, 1, True)), True)
"""The network for PatchCamelyon, for p4m."""

PLANS = {"rotmnist-p4": ROTMNIST, "d4-96": PCAM}
"""The networks by the names of the command line."""


class Crop(nn.Module):
    """Cuts positions off at every side."""

    def __init__(self, margin: int):
        super().__init__()
        self.margin = margin

    def forward(self, x: enn.GeometricTensor) -> enn.GeometricTensor:
        inside = slice(self.margin, -self.margin)
        return enn.GeometricTensor(x.tensor[..., inside, inside], x.type)


class Network(nn.Module):
    """The network of a plan: images (B, channels, size, size) to logits (B, classes).

    Args:
        plan: the plan.
        kernel_size: the window of all layers.
        query: of all blocks.
    """

    def __init__(self, plan: Plan, kernel_size: int, query: Poses):
        super().__init__()
        space = gspace(plan.space)
        self.image = enn.FieldType(space, plan.channels * [space.trivial_repr])
        kind = regular(plan.space, plan.lifted)
        lifting = LiftingSelfAttention(self.image, kind, _HEADS, kernel_size, head_fields=plan.lifted // 2)
        stages: list[nn.Module] = [lifting, *_activated(kind), *_pooled(kind, plan.pooled)]
        for block in plan.blocks:
            before, kind = kind, regular(plan.space, block.fields)
            stages.append(
                TransformerBlock(before, kind, _HEADS, kernel_size, head_fields=block.fields // 2, query=query)
            )
            stages += [Crop(block.crop)] if block.crop else []
            stages += _activated(kind) if plan.normalised else []
            stages += _pooled(kind, block.pooled)
        self.stages = nn.Sequential(*stages)
        self.order = space.fibergroup.order()
        self.head = nn.Linear(len(kind), plan.classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(enn.GeometricTensor(images, self.image)).tensor
        # The sum over space and the maximum over poses of the logits, as published.
        logits = self.head(x.unflatten(1, (-1, self.order)).flatten(3).sum(-1).transpose(1, 2))
        return logits.amax(1)


def _activated(kind: enn.FieldType) -> Sequence[nn.Module]:
    return FieldLayerNorm(kind, "sample"), SiLU(kind)


def _pooled(kind: enn.FieldType, pooled: bool) -> Sequence[nn.Module]:
    return [enn.PointwiseMaxPool2D(kind, kernel_size=2, stride=2)] if pooled else []


def train_step(network: Network, images: Tensor, labels: Tensor) -> Step:
    """What a step of training does: logits, cross entropy, gradients, Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step
