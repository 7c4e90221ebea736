"""Convolutions on plain tensors."""

import pytest
import torch
import torch.nn.functional as F

from escnn_attention.functional.responses.convolution import (
    _derived_kernels,
    convolve,
    depthwise,
    depthwise_kernels,
    output_size,
    views,
)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("size", "kernel_size", "dilation", "dimensions"),
    [(n, k, d, 2) for n in (1, 2, 3, 7) for k, d in ((1, 1), (3, 1), (3, 2), (7, 1), (5, 3))]
    + [(n, 3, d, 3) for n in (1, 2, 3) for d in (1, 2)],
)
@pytest.mark.parametrize("circular", [False, True])
def test_depthwise_and_the_gradient_of_its_kernels(size, kernel_size, dilation, dimensions, circular):
    x = torch.randn(2, 3, 4, *[size] * dimensions, dtype=torch.float64)
    kernels = torch.randn(2, 4, 1, *[kernel_size] * dimensions, dtype=torch.float64, requires_grad=True)
    padding, seen = dilation * (kernel_size // 2), x
    if circular:  # so many tori side by side, and what is around the one in the middle
        around = -(-padding // size)
        middle = slice(around * size - padding, around * size + size + padding)
        seen, padding = x.repeat(1, 1, 1, *dimensions * [2 * around + 1])[(..., *dimensions * [middle])], 0
    expected = sum(
        convolve(i, k, padding=padding, dilation=dilation, groups=4) for i, k in zip(seen, kernels, strict=True)
    )
    y = sum(depthwise(i, k, dilation=dilation, circular=circular) for i, k in zip(x, kernels, strict=True))
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    (expected_grad,) = torch.autograd.grad(expected, kernels, grad)
    options = {"kernel_size": kernel_size, "dilation": dilation}
    for got in (
        depthwise_kernels(x, grad, circular=circular, **options),
        _derived_kernels(seen, grad, padding=padding, **options),
    ):
        torch.testing.assert_close(got, expected_grad.squeeze(2))


@pytest.mark.parametrize(("kernel_size", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (2, 3, 2), (4, 2, 2)])
def test_views_are_the_columns_of_a_convolution(kernel_size, stride, dilation):
    x = torch.randn(2, 3, 9, 8)
    seen = torch.stack(list(views(x, kernel_size, stride=stride, dilation=dilation, dimensions=2)), dim=2)
    expected = F.unfold(x, kernel_size, stride=stride, dilation=dilation)
    assert torch.equal(seen.flatten(1, 2).flatten(2), expected)
    sizes = [output_size(n, kernel_size, stride=stride, padding=0, dilation=dilation) for n in (9, 8)]
    assert list(seen.shape[3:]) == sizes
    # Adding to them is the transpose.
    total = torch.zeros_like(x)
    for number, view in enumerate(views(total, kernel_size, stride=stride, dilation=dilation, dimensions=2)):
        view.add_(seen[:, :, number])
    folded = F.fold(expected, (9, 8), kernel_size, stride=stride, dilation=dilation)
    torch.testing.assert_close(total, folded)


def test_no_place_for_a_kernel():
    assert output_size(3, 5, stride=1, padding=0, dilation=1) == 0
    assert output_size(3, 5, stride=1, padding=1, dilation=1) == 1
