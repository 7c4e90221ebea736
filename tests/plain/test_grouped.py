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
@pytest.mark.parametrize("groups", [1, 5])
def test_with_a_bias(size, groups):
    x, weight, y, added, shift = arguments((4, size), (groups, 2, size), (groups, 4, 2), (groups, 2), (size,))
    torch.testing.assert_close(spread(x, weight, added), spread(x, weight) + added[:, None])
    torch.testing.assert_close(collect(y, weight, shift), collect(y, weight) + shift)
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(spread, (x, weight, added))
        assert check(collect, (y, weight, shift))


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
        with_bias = spread(x, weight, weight[:, :, 0]), collect(y, weight, weight[0, 0])
    assert {out.dtype for out in (spread_x, collected, *with_bias)} == {torch.bfloat16}
    for out, leaf in ((spread_x, x), (collected, y)):
        gradients = torch.autograd.grad(out.float().sum(), (leaf, weight))
        assert [g.dtype for g in gradients] == [dtype, dtype]
