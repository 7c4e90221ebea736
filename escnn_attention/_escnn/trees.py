"""Lets PyTorch look into escnn's GeometricTensors, as into lists and dictionaries of tensors.

PyTorch looks for the tensors in the inputs and outputs of modules in containers that it knows: ``fully_shard`` in nodes
of trees or, in recent releases, in dataclasses, and ``DistributedDataParallel`` in dataclasses. If it finds none,
``fully_shard`` of a module inside a network frees the weights after the forward pass and does not gather them for the
backward pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor
from torch.utils import _pytree


def register() -> None:
    """Register GeometricTensors. Called when :mod:`escnn_attention` is imported; calling it again changes nothing."""
    if dataclasses.is_dataclass(GeometricTensor):
        return
    GeometricTensor.__annotations__ = {"tensor": Tensor, "type": FieldType, "coords": Tensor | None}
    dataclasses.dataclass(init=False, repr=False, eq=False)(GeometricTensor)
    _pytree.register_pytree_node(GeometricTensor, lambda x: ([x.tensor, x.coords], x.type), _unflatten)


def _unflatten(parts: Any, type: FieldType) -> GeometricTensor:
    # Trees are made of other things than tensors, too, which the constructor refuses.
    x = GeometricTensor.__new__(GeometricTensor)
    (x.tensor, x.coords), x.type = parts, type
    return x
