"""Inputs of equivariance reports, and the convolution whose error stands beside interpolated ones."""

from __future__ import annotations

import torch
from escnn.gspaces import GSpace2D, GSpace3D
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, R2Conv, R3Conv
from scipy.ndimage import gaussian_filter

__all__ = ["convolution_beside", "features_on_grid", "features_on_points"]


def convolution_beside(x: GeometricTensor, seed: int) -> EquivariantModule | None:
    """A convolution of escnn on features of a grid, ``R2Conv`` or ``R3Conv`` with random weights, in float64.

    It takes the whole type of the features to one field of each of its representations. None outside the plane and
    space.

    Example:
        >>> import torch
        >>> from escnn_attention.equivariance.inputs import convolution_beside
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(8)
        >>> image = nn.FieldType(g, 3 * [g.trivial_repr])
        >>> convolution_beside(image(torch.randn(1, 3, 9, 9)), seed=0).out_type.size
        1
    """
    space = x.type.gspace
    if not isinstance(space, (GSpace2D, GSpace3D)):
        return None
    kind = R2Conv if isinstance(space, GSpace2D) else R3Conv
    out_type = FieldType(space, list(dict.fromkeys(x.type.representations)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolution: EquivariantModule = kind(x.type, out_type, 3, padding=1, bias=False)
    return convolution.to(x.tensor.device).double().eval()


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


def _device(module: torch.nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
