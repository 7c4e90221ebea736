"""Products and sums of many small matrices: against torch's own, in every layout, with derivatives of both orders."""

from __future__ import annotations

import pytest
import torch

from escnn_attention.functional.matmul import add_to_each, matmul


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# Short rows, short columns, both, neither.
SIZES = [(20, 5, 3), (3, 5, 20), (4, 5, 3), (17, 5, 18), (1, 4, 30), (30, 4, 1)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(rows, inner, columns, transposed):
    a = random(2, 3, rows, inner)
    b = random(2, 3, columns, inner).mT if transposed else random(2, 3, inner, columns)
    torch.testing.assert_close(matmul(a, b), a @ b)
    torch.testing.assert_close(matmul(a, b[:, :1]), a @ b[:, :1])
    weight = random(2, 3, rows, columns)
    for gradients in zip(
        torch.autograd.grad((matmul(a, b) * weight).sum(), (a, b)),
        torch.autograd.grad(((a @ b) * weight).sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(17, 2, 2), (2, 2, 17), (2, 2, 3)])
def test_derivatives_of_both_orders(rows, inner, columns):
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(matmul, (random(2, rows, inner), random(2, inner, columns)))
        assert check(add_to_each, (random(2, 3, columns), random(2, 1, columns)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_under_autocast(dtype):
    a, b = (t.detach().to(dtype).requires_grad_() for t in (random(2, 20, 5), random(2, 5, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        y = matmul(a, b)
    assert y.dtype == torch.bfloat16
    assert [g.dtype for g in torch.autograd.grad(y.float().sum(), (a, b))] == [dtype, dtype]


@pytest.mark.parametrize("shape", [(2, 4, 3, 1, 6), (2, 4, 1, 1, 6), (2, 4, 3, 5, 6), (6,)])
def test_sums_with_rows_that_all_share(shape):
    x, rows = random(2, 4, 3, 5, 6), random(*shape)
    torch.testing.assert_close(add_to_each(x, rows), x + rows)
    torch.testing.assert_close(
        add_to_each(x, rows[..., ::2].repeat_interleave(2, -1)), x + rows[..., ::2].repeat_interleave(2, -1)
    )
    assert add_to_each(x.float(), rows).dtype == torch.float64
