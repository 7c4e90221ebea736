import numpy as np
import pytest
import torch

from escnn_attention.plain.norms import LayerNorm


def layer_norm(field=(0, 0, 0, 1, 1, 2), mean=(1, 1, 1, 0, 0, 1), scope="position", affine=True, eps=1e-5):
    """A regular field of three poses, a vector and a scalar."""
    invariants = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1.0]]).T
    field, mean = np.array(field), np.array(mean, dtype=float)
    invariants = invariants if len(field) == 6 else np.zeros((len(field), 0))
    return LayerNorm(field, mean, invariants, scope=scope, eps=eps, affine=affine)


@pytest.mark.parametrize("scope", ["position", "sample"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_taken_in_single(dtype, scope):
    """Many channels far from zero, whose sum half precision cannot hold, nor the square of one of them."""
    size = 301
    module = layer_norm(field=range(size), mean=[1] * size, scope=scope, affine=False)
    x = (3000 + 100 * torch.randn(2, size, 3, 3)).to(dtype)
    expected = module(x.float())
    y = module.to(dtype)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, atol=0.01, rtol=0.01)


def test_affine_starts_as_the_identity_and_can_be_left_out():
    x = torch.randn(2, 6, 3, 3)
    torch.testing.assert_close(layer_norm()(x), layer_norm(affine=False)(x))
    assert not list(layer_norm(affine=False).parameters())
    assert [tuple(p.shape) for p in layer_norm().parameters()] == [(3,), (2,)]
    assert layer_norm(field=(0, 0), mean=(0, 0)).bias is None


def test_constant_input_gives_zero_and_not_nan():
    x = torch.full((1, 6, 2, 2), 5.0)
    x[:, 3:5] = 0
    assert layer_norm()(x).abs().max() < 1e-3
    x.requires_grad_()
    layer_norm()(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_transforms_of_tensors_that_are_not_contiguous(num_groups):
    """Their memory is that of images whose channels lie side by side, as attention makes them."""
    group = None if num_groups == 1 else np.arange(6) // 3
    module = LayerNorm(
        np.arange(6), np.ones(6), np.ones((6, 1)), scope="sample", eps=0.1, affine=True, group=group
    ).double()
    x = torch.randn(2, 3, 4, 3, 6, dtype=torch.float64).movedim(-1, 2)
    for function in (
        torch.func.vmap(module),
        torch.func.vmap(torch.func.grad(lambda x: module(x).sin().sum())),
        lambda x: torch.func.jvp(module, (x[0],), (x[1],))[1],
    ):
        torch.testing.assert_close(function(x), function(x.contiguous()), rtol=1e-12, atol=1e-12)
