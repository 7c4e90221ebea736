"""Which parameters weight decay is for."""

from __future__ import annotations

from typing import Any

import escnn.nn
from torch import nn
from torch.nn import Parameter

from escnn_attention.encodings import Encoding, PairKernel
from escnn_attention.plain.norms import LayerNorm

__all__ = ["decayed_parameters", "parameter_groups"]

# Modules whose parameters scale and shift what goes through, hold thresholds, or say where things are.
_SPARED: tuple[type, ...] = (
    Encoding,
    PairKernel,
    LayerNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    escnn.nn.IIDBatchNorm1d,
    escnn.nn.IIDBatchNorm2d,
    escnn.nn.IIDBatchNorm3d,
    escnn.nn.GNormBatchNorm,
    escnn.nn.InducedNormBatchNorm,
    escnn.nn.InducedNormNonLinearity,
    escnn.nn.NormBatchNorm,
    escnn.nn.NormNonLinearity,
)


def decayed_parameters(network: nn.Module) -> list[str]:
    """The names of the parameters that decoupled weight decay is for: the weights of linear maps.

    Not of norms, not of positional encodings and kernels, and no biases: they have a scale of their own, from which
    decay would take them away without making the network any simpler.

    Args:
        network: any module. Parameters of types that are not known to be otherwise are weights.

    Example:
        >>> from escnn_attention import GroupSelfAttention
        >>> from escnn_attention.training.modules.decay import decayed_parameters
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 4 * [g.regular_repr])
        >>> decayed_parameters(GroupSelfAttention(fields, fields, num_heads=2, kernel_size=3))
        ['plain.project_in.weight', 'plain.project_out.weight']
    """
    names = []
    spared: set[int] = set()
    for module in network.modules():
        if isinstance(module, _SPARED):
            spared.update(id(parameter) for parameter in module.parameters())
        spared.update(id(p) for name, p in module.named_parameters(recurse=False) if _is_bias(name))
    for name, parameter in network.named_parameters():
        if id(parameter) not in spared:
            names.append(name)
    return names


def parameter_groups(network: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a network in groups for an optimiser: those that decay, and those whose weight decay is 0.

    Args:
        network: any module that has parameters.
    """
    chosen = set(decayed_parameters(network))
    groups: tuple[list[Parameter], list[Parameter]] = [], []
    for name, parameter in network.named_parameters():
        groups[name not in chosen].append(parameter)
    found: list[dict[str, Any]] = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


def _is_bias(name: str) -> bool:
    return name == "bias" or name.startswith("bias_") or name.endswith("_bias")
