import pytest
import torch

from escnn_attention.plain.resample import AntialiasedPool
from tests.layers import assert_formula


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("shape", [(6, 9), (2, 3), (4, 5, 6)])
def test_antialiased_pool_is_the_formula_with_gradients(kind, shape):
    x = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)

    def formula(x):
        dimensions = len(shape)
        if kind == "max":
            x = getattr(torch.nn.functional, f"max_pool{dimensions}d")(x, 3, stride=1, padding=1)
        for axis, n in enumerate(shape, start=2):
            weights = {0: (1, 3, 3, 1), 1: (1, 4, 6, 4, 1)}[n % 2]
            halved = []
            for start in range(-1, 2 * (n // 2) - 1, 2):
                seen = [(w, start + i) for i, w in enumerate(weights) if 0 <= start + i < n]
                halved.append(sum(w * x.select(axis, i) for w, i in seen) / sum(w for w, _ in seen))
            x = torch.stack(halved, axis)
        return x

    y, expected = AntialiasedPool(kind, len(shape)).double()(x), formula(x)
    assert_formula(y, expected, [x], 1e-14, 1e-14)


def test_antialiased_pool_of_other_precisions():
    x = torch.randn(2, 3, 6, 7)
    pool = AntialiasedPool("max", 2)
    torch.testing.assert_close(pool(x.double()), pool.double()(x.double()), rtol=1e-14, atol=1e-14)
    assert pool.float()(x.bfloat16()).dtype == torch.bfloat16
