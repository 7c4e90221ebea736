"""Convolutions in two and three dimensions, and what they are made of, on plain tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight, conv3d_weight


def wrapped(x: Tensor, padding: int, dimensions: int) -> Tensor:
    """Features on a torus, the last ``dimensions`` axes, with so many positions of the other side at either end.

    Example:
        >>> wrapped(torch.arange(3), 4, dimensions=1).tolist()
        [2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    """
    if padding:
        for axis in range(x.dim() - dimensions, x.dim()):
            x = x.index_select(axis, torch.arange(-padding, x.shape[axis] + padding, device=x.device) % x.shape[axis])
    return x


def convolve(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    circular: bool = False,
) -> Tensor:
    """The convolution of PyTorch for as many dimensions as the kernel ``(out, in, *space)`` has.

    The padding is zeros, or on a torus what is on its other side.
    """
    convolution = {2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[kernel.dim() - 2]
    if circular:
        x, padding = wrapped(x, padding, x.dim() - 2), 0
    return convolution(x, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)


def depthwise(x: Tensor, kernels: Tensor, *, dilation: int, circular: bool = False) -> Tensor:
    """Every channel of ``(B, C, *space)`` convolved with a kernel of its own, ``(C, 1, *kernel)``, of odd width.

    The grid is padded with zeros, or is a torus, and keeps its size.

    Example:
        >>> depthwise(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), dilation=1)
        tensor([[[[4., 6., 4.],
                  [6., 9., 6.],
                  [4., 6., 4.]]]])
    """
    if math.prod(x.shape[2:]) == 1 and not circular:  # PyTorch takes longer for one position than for a hundred.
        return x * kernels.flatten(2)[:, :, kernels[0].numel() // 2].view(1, -1, *x.shape[2:])
    padding = dilation * (kernels.shape[-1] // 2)
    return convolve(x, kernels, padding=padding, dilation=dilation, groups=len(kernels), circular=circular)


def depthwise_kernels(x: Tensor, grad: Tensor, *, kernel_size: int, dilation: int, circular: bool = False) -> Tensor:
    """The gradient of the kernels of :func:`depthwise`.

    It is the input convolved with the gradient of the output, image by image: on a CPU that takes a twentieth of the
    time of PyTorch's own derivative.

    Args:
        x: ``(n, B, C, *space)``, n inputs whose outputs were added.
        grad: ``(B, C, *space)``.
        kernel_size, dilation: of the kernels.
        circular: whether the grid is a torus.

    Returns:
        ``(n, C, *kernel)``.
    """
    padding, dimensions = dilation * (kernel_size // 2), grad.dim() - 2
    if circular:
        x, padding = wrapped(x, padding, dimensions), 0
    if math.prod(grad.shape[2:]) == 1:
        seen = torch.nn.functional.pad(x, [padding] * (2 * dimensions))
        return (next(views(seen, 1, stride=dilation, dilation=1, dimensions=dimensions)) * grad).sum(1)
    if x.device.type != "cpu":
        return _derived_kernels(x, grad, kernel_size=kernel_size, dilation=dilation, padding=padding)
    kernels = grad.flatten(0, 1).unsqueeze(1)
    grads = convolve(x.flatten(1, 2), kernels, stride=dilation, padding=padding, groups=len(kernels))
    return grads.unflatten(1, grad.shape[:2]).sum(1)


def _derived_kernels(x: Tensor, grad: Tensor, *, kernel_size: int, dilation: int, padding: int) -> Tensor:
    """The gradient of the kernels of :func:`depthwise`, by PyTorch's own derivative of a convolution."""
    channels, dimensions = grad.shape[1], grad.dim() - 2
    derive = {2: conv2d_weight, 3: conv3d_weight}[dimensions]
    options = {"padding": padding, "dilation": dilation, "groups": channels}
    shape = (channels, 1, *[kernel_size] * dimensions)
    return torch.stack([derive(images, shape, grad, **options).squeeze(1) for images in x])


def output_size(size: int, kernel_size: int, *, stride: int, padding: int, dilation: int) -> int:
    """The places along one axis at which a kernel finds all that it needs, 0 where there are none.

    Example:
        >>> output_size(9, 3, stride=2, padding=1, dilation=1)
        5
    """
    return max(0, (size + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1)


def views(x: Tensor, kernel_size: int, *, stride: int, dilation: int, dimensions: int) -> Iterator[Tensor]:
    """Views of the padded ``x``, one for each place of a kernel, in the order of the places.

    They are views of the last ``dimensions`` axes: reading them gives the columns of the convolution as a product of
    matrices, adding to them is the transpose of that.

    Example:
        >>> list(views(torch.arange(4), 2, stride=1, dilation=1, dimensions=1))
        [tensor([0, 1, 2]), tensor([1, 2, 3])]
    """
    sizes = [output_size(n, kernel_size, stride=stride, padding=0, dilation=dilation) for n in x.shape[-dimensions:]]
    for place in itertools.product(range(kernel_size), repeat=dimensions):
        view = x
        for axis, (start, n) in enumerate(zip(place, sizes, strict=True), start=-dimensions):
            view = view.movedim(axis, 0)[dilation * start :: stride][:n].movedim(0, axis)
        yield view
