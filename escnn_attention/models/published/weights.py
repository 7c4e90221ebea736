"""Published matrices, written into the layers of this package: where their rows, columns, heads and poses go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from escnn_attention.models.checkpoint import Checkpoint
from escnn_attention.nn.norms import FieldLayerNorm
from escnn_attention.nn.pointwise import PoseLinear
from escnn_attention.plain.projections import HeadModule

__all__ = ["at_pose", "load_heads", "load_norm", "load_pointwise", "load_values", "take_linear", "take_matrix"]


def take_matrix(checkpoint: Checkpoint, name: str, *shape: int) -> Tensor:
    """A matrix, which may be published as the kernel of a convolution of size 1: with axes of length 1 at its end."""
    dimensions = checkpoint.tensors[name].dim() if name in checkpoint.tensors else len(shape)
    return checkpoint.take(name, *shape, *[1] * (dimensions - len(shape))).reshape(shape)


def take_linear(checkpoint: Checkpoint, name: str, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    """The weight ``(outs, ins)`` and the bias ``(outs,)`` of a linear map."""
    return take_matrix(checkpoint, f"{name}.weight", outs, ins), checkpoint.take(f"{name}.bias", outs)


def at_pose(weight: Tensor, pose: int, order: int) -> Tensor:
    """A map of fields as one of poses, ``(outs, ins * order)``: it reads or writes one relative pose alone."""
    spread = weight.new_zeros(*weight.shape, order)
    spread[..., pose] = weight
    return spread.flatten(-2)


@torch.no_grad()
def load_pointwise(layer: PoseLinear, weight: Tensor, bias: Tensor | None) -> None:
    """Give a map with ``projection="pointwise"`` its weight ``(outs, ins)`` and its bias, where it has one."""
    projection = layer.plain.projection
    projection.weight.copy_(weight)
    if projection.bias is not None and bias is not None:
        projection.bias.copy_(bias)


@torch.no_grad()
def load_norm(checkpoint: Checkpoint, name: str, layer: FieldLayerNorm) -> None:
    """Give a norm of regular or trivial fields its scales and shifts, one of either a field."""
    for kind in ("weight", "bias"):
        own = getattr(layer.plain, kind)
        own.copy_(checkpoint.take(f"{name}.{kind}", len(own)))


@torch.no_grad()
def load_heads(module: HeadModule, made: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
    """Give a module its queries, values and keys.

    Args:
        module: with M heads of C channels.
        made: for each of ``"queries"``, ``"values"`` and ``"keys"`` the weight ``(M, C, in)``, its last axis as that
            of the projection's weight, and the bias ``(M, C)``. A bias of keys that changes nothing is left out.
    """
    projection = module.project_in
    weights, biases = [], []
    for name in module.needs.fields:
        weight, bias = made[name]
        weights.append(weight.flatten(0, 1))
        if bias is not None:
            used = module.needs.key_bias if name == "keys" else bias.shape[1]
            biases.append(bias[:, :used].flatten())
    projection.weight.copy_(torch.cat(weights))
    if projection.bias is not None:
        projection.bias.copy_(torch.cat(biases))


@torch.no_grad()
def load_values(parameter: Tensor | None, values: Tensor | None) -> None:
    """Give a parameter its values, of the same shape."""
    assert parameter is not None
    assert values is not None
    assert parameter.shape == values.shape
    parameter.copy_(values)
