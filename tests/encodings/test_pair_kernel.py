"""Kernels of content and location: options, sizes, scale. Their values: tests/nn/test_point_attention.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from escnn_attention import PairKernel


def bound(content: str, location: str, combine: str, **options: bool) -> PairKernel:
    return PairKernel(content, location, combine, hidden=5, **options).bind(2, 3, 4, 6)


def possible() -> list[tuple[str, str, str]]:
    every = itertools.product(("dot", "concat", "none"), ("mlp", "raw", "none"), ("sum", "product", "mlp"))
    return [(c, x, b) for c, x, b in every if (c, x) != ("none", "none") and not (b == "product" and "none" in (c, x))]


PUBLISHED = {"biases": True, "last_activation": True}


@pytest.mark.sampled
@pytest.mark.parametrize(("content", "location", "combine"), possible())
@pytest.mark.parametrize("options", [{}, PUBLISHED])
def test_every_parameter_matters(content, location, combine, options):
    torch.manual_seed(0)
    if options and "mlp" not in (location, combine):
        with pytest.raises(ValueError, match=r"biases: .*is no network"):
            bound(content, location, combine, **options)
        return
    kernel = bound(content, location, combine, **options).double()
    q = torch.randn(2, 3, 6, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 3, 1, 1, 6, 7, 4, dtype=torch.float64)
    seen = torch.randn(2, 6, 5, 1, 7, 2, dtype=torch.float64)
    poses = kernel.poses(torch.randint(6, (6, 6)), None)
    assert (poses is None) == (location == "none")
    score = kernel.score(q, lambda: k, seen, None if poses is None else poses.unsqueeze(3)).scores(lambda: k)
    assert torch.broadcast_shapes(score.shape, (2, 3, 6, 1, 5, 6, 7)) == (2, 3, 6, 1, 5, 6, 7)
    score.sin().sum().backward()
    for name, parameter in kernel.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@pytest.mark.slow
def test_scores_vary_by_about_one_at_first():
    torch.manual_seed(1)
    for options in possible():
        spread = []
        for _ in range(20):
            kernel = bound(*options)
            q, k = torch.randn(2, 3, 6, 1, 5, 4), torch.randn(2, 3, 1, 1, 6, 40, 4)
            poses = kernel.poses(torch.randint(6, (6, 6)), None)
            seen = 2 * torch.rand(2, 6, 5, 1, 40, 2) - 1
            terms = kernel.score(q, lambda: k, seen, None if poses is None else poses.unsqueeze(3))  # noqa: B023
            score = terms.scores(lambda: k)  # noqa: B023
            spread.append(score.expand(2, 3, 6, 1, 5, 6, 40).flatten(5).std(-1).mean())
        assert 0.2 < torch.stack(spread).mean() < 3, options


def test_a_kernel_belongs_to_one_layer():
    kernel = PairKernel()
    assert not list(kernel.parameters())
    first, second = kernel.bind(2, 1, 2, 4), kernel.bind(2, 1, 2, 4)
    assert first is not second
    assert not kernel.bound
    with pytest.raises(ValueError, match="belongs"):
        first.bind(2, 1, 2, 4)
    assert repr(PairKernel("concat", "raw", "mlp", hidden=6)).startswith("PairKernel('concat', 'raw', 'mlp', hidden=6")


def test_a_last_activation_bounds_the_number():
    """By the least value of SiLU, -0.2785."""
    torch.manual_seed(2)
    seen = torch.randn(1, 6, 5, 1, 40, 2)
    for number, options in ((True, PUBLISHED), (False, {"biases": True})):
        kernel = bound("none", "mlp", "sum", **options)
        for parameter in kernel.parameters():
            torch.nn.init.normal_(parameter)
        poses = kernel.poses(torch.randint(6, (6, 6)), None)
        least = kernel.score(seen, lambda: seen, seen, poses.unsqueeze(3)).scores(lambda: seen).min()
        assert (least > -0.2786) == number


def test_options_are_checked():
    for name in PUBLISHED:
        with pytest.raises(TypeError, match=rf"{name}: .*True or False"):
            PairKernel(**{name: 1})
        with pytest.raises(ValueError, match=rf"{name}: .*is no network"):
            PairKernel("dot", "raw", "sum", **{name: True})
    assert (
        repr(PairKernel(**PUBLISHED)) == "PairKernel('dot', 'mlp', 'sum', hidden=16, biases=True, last_activation=True)"
    )
