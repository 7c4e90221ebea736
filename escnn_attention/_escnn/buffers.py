"""Lets escnn's convolutions be copied and saved in eval mode, as in training mode.

When they stop training, escnn's convolutions and linear maps keep what they make of their weights (``filter``,
``matrix``, ``expanded_bias``) as buffers. These are no leaves of the graph, which ``copy.deepcopy`` refuses. Their
bases are seen through a permutation of axes, and convolutions that are alike share them; both are refused by
``safetensors.torch.save_file``. :func:`register` mends this at the modules that hold such buffers: values and modes
stay as they are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from escnn.nn import EquivariantModule
from escnn.nn.modules.basismanager.basisexpansion_singleblock import SingleBlockBasisExpansion

DERIVED = ("filter", "matrix", "expanded_bias")
_EXPANSIONS = ("expand_parameters", "expand_bias")


def register() -> None:
    """Have escnn's modules copied and saved. Called when :mod:`escnn_attention` is imported."""
    EquivariantModule.__deepcopy__ = _deepcopy
    SingleBlockBasisExpansion._save_to_state_dict = _save_to_state_dict


def derived_buffers(network: torch.nn.Module) -> set[str]:
    """The names of all buffers that escnn's modules make of their weights, and that are there in some modes only."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in network.named_modules()
        if isinstance(module, EquivariantModule) and any(hasattr(module, method) for method in _EXPANSIONS)
        for name in DERIVED
        if name in module._buffers
    }


def _deepcopy(self: EquivariantModule, memo: dict[int, Any]) -> EquivariantModule:
    """A copy whose filters have the same values; their gradients reach its weights once it has trained again."""
    for buffer in self._buffers.values():
        if buffer is not None and not buffer.is_leaf:
            memo[id(buffer)] = buffer.detach().clone()
    # PyTorch's parametrized modules keep their state from pickle, and so from __reduce_ex__.
    state = self.__dict__ if "parametrizations" in self._modules else self.__reduce_ex__(4)[2]
    copied: EquivariantModule = object.__new__(type(self))
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(state, memo))
    return copied


def _save_to_state_dict(
    self: SingleBlockBasisExpansion, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    torch.nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
    name = f"{prefix}sampled_basis"
    if not keep_vars:
        destination[name] = destination[name].clone(memory_format=torch.contiguous_format)
