"""Random features to measure the equivariance of modules on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from escnn.group import GroupElement
from escnn.nn import EquivariantModule, GeometricTensor
from scipy.ndimage import gaussian_filter


def features_on_grid(module: EquivariantModule, shape: tuple[int, ...], seed: int, smooth: bool) -> GeometricTensor:
    """Random features for a module, normally distributed, and smoothed where they are to be interpolated."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if smooth:
        sigma = (0, 0, *(max(1.0, n / 8) for n in shape[2:]))
        x = torch.from_numpy(gaussian_filter(x.numpy(), sigma, mode="constant"))
        x = x / x.std()
    return GeometricTensor(x.to(_device(module)), module.in_type)


def features_on_points(
    module: EquivariantModule, shape: tuple[int, ...], seed: int, coords: torch.Tensor | None
) -> GeometricTensor:
    """Random features for a module on a cloud, at points that are given or random."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if coords is None:
        dimension = module.in_type.gspace.dimensionality
        coords = torch.randn(shape[0], dimension, dtype=torch.float64, generator=generator)
    device = _device(module)
    return GeometricTensor(x.to(device), module.in_type, coords.to(device, torch.float64))


def further_features(layer: torch.nn.Module, x: GeometricTensor, given: Collection[str] = ()) -> dict[str, Any]:
    """Random features that a layer of this package needs beside those of its input ``x``, by the names of arguments.

    They are those of all pairs of points, a condition, a memory, and keys; those of the names ``given`` are left out.
    """
    found: dict[str, Any] = {}
    rows, edge_dim, condition = len(x.tensor), getattr(layer, "edge_dim", None), getattr(layer, "condition", None)
    if edge_dim is not None:
        found["edge_attr"] = torch.randn(1, rows, rows, edge_dim).to(x.tensor)
    if isinstance(condition, int):
        found["condition"] = torch.randn(rows, condition).to(x.tensor)
    random_keys: Any = getattr(layer, "random_keys", None)
    if random_keys is not None and "keys" not in given:
        found |= random_keys(x)
    memory_type = getattr(layer, "memory_type", None)
    if memory_type is not None and "memory" not in given:
        attention: Any = next(part for part in layer.modules() if hasattr(part, "random_memory"))
        found |= attention.random_memory(memory_type, x)
    return {name: value for name, value in found.items() if name not in given}


def transformed_features(arguments: Mapping[str, Any], g: GroupElement) -> dict[str, Any]:
    """Further arguments of a module, of which an element transforms those that are a GeometricTensor."""
    return {name: y.transform(g) if isinstance(y, GeometricTensor) else y for name, y in arguments.items()}


def _device(module: torch.nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
