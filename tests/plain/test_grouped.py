import pytest
import torch

from escnn_attention.plain.grouped import collect, spread


def arguments(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


# With many channels for a group one product is taken for all of them.
channels = pytest.mark.parametrize("size", [3, 13])


@channels
def test_products(size):
    x, weight, y = arguments((4, size), (5, 2, size), (5, 4, 2))
    torch.testing.assert_close(spread(x, weight), torch.einsum("ns,gos->gno", x, weight))
    torch.testing.assert_close(collect(y, weight), torch.einsum("gno,gos->ns", y, weight))


@channels
def test_derivatives_of_both_orders(size):
    x, weight, y = arguments((4, size), (2, 2, size), (2, 4, 2))
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(spread, (x, weight))
        assert check(collect, (y, weight))


@channels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_under_autocast(dtype, size):
    x, weight, y = (t.detach().to(dtype).requires_grad_() for t in arguments((4, size), (2, 2, size), (2, 4, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        spread_x, collected = spread(x, weight), collect(y, weight)
    assert spread_x.dtype == collected.dtype == torch.bfloat16
    for out, leaf in ((spread_x, x), (collected, y)):
        gradients = torch.autograd.grad(out.float().sum(), (leaf, weight))
        assert [g.dtype for g in gradients] == [dtype, dtype]
