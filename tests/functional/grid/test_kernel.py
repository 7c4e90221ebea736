"""A compiled loop and its derivatives, of the second order too, against the formula."""

import pytest
import torch

from escnn_attention.functional import PositionalBias, attention
from escnn_attention.functional.grid import native
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, doubled, leaves, outputs_and_gradients

if reason := native.why_not_built(torch.float64):
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["moderate", "large"])
def test_agrees_with_the_reference_in_lower_precision(dtype, tolerance, query, size):
    tensors, grid, terms = case(4, 4, 4, (6, 5), Window(3), {"spatial", "pose"}, dtype=dtype)
    if size > 1:
        if dtype == torch.bfloat16:
            pytest.skip("scores in the hundreds are not known to 2 % in bfloat16")
        # Exponentials would overflow.
        tensors = (tensors[0].detach().mul(size).requires_grad_(), *tensors[1:])
        tolerance *= size
    exact, exact_terms = doubled(tensors, terms)
    got = outputs_and_gradients("native", tensors, grid, terms, query)
    expected = outputs_and_gradients("reference", exact, grid, exact_terms, query)
    assert all(t.dtype == dtype for t in got)
    assert_same(got, expected, tolerance)


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_scores_of_any_size(query, size):
    """Exponentials would overflow, and others are less than the smallest number."""
    tensors, grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial", "pose"})
    tensors = (tensors[0].detach().mul(size).requires_grad_(), *tensors[1:])
    got, expected = (outputs_and_gradients(b, tensors, grid, terms, query) for b in ("native", "reference"))
    # Of probabilities that are 0 or 1 some gradients are next to nothing: the sums of others that cancel.
    largest = max(t.norm() for t in expected)
    assert all((a - b).norm() <= 1e-8 * b.norm() + 1e-12 * largest for a, b in zip(got, expected, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        (Window(3), {"spatial", "pose"}),
        (Window(), {"spatial", "pose"}),
        (Window(), {"waves", "pose"}),
        (Window(), {"waves"}),
        (Window(), {"pose"}),
        (Window(), set()),
    ],
)
def test_first_and_second_derivatives(query, window, kinds):
    tensors, grid, terms = case(2, 2, 2, (2, 2), window, kinds, heads=1, channels=1, batch=1)

    def function(q, k, v, *_):
        return attention(q, k, v, grid, terms, query=query, backend="native")

    inputs = tuple(leaves(tensors, terms))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize(("window", "kinds"), [(Window(3), {"spatial"}), (Window(), {"waves"}), (Window(), set())])
def test_dropout_drops_probabilities_and_keeps_the_mean(window, kinds):
    torch.manual_seed(0)
    (q, k, v), grid, terms = case(1, 1, 1, (2, 2), window, kinds, heads=1, batch=1)
    plain = attention(q, k, v, grid, terms, backend="reference")
    draws = torch.stack([attention(q, k, v, grid, terms, dropout=0.5, backend="native").detach() for _ in range(800)])
    assert draws.std(0).min() > 0
    torch.testing.assert_close(draws.mean(0), plain.detach(), atol=0.3, rtol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_independently(rate, query, dtype):
    """Equal scores over n keys of value 1: the mean of n independent draws, each 0 or 1 / (1 - rate)."""
    torch.manual_seed(0)
    positions, keys = 30 * 30, 4 * 49 * (4 if query == "all" else 1)
    q, k, v = (torch.zeros(2, 2, positions, 4, 3, dtype=dtype) for _ in range(3))
    grid = Grid((30, 30), Window(7))

    def draw():
        out = attention(q, k, v + 1, grid, PositionalBias(4), query=query, dropout=rate, backend="native")
        return (out / (4 if query == "all" else 1))[..., 0].transpose(2, 3).unflatten(-1, (30, 30))[..., 3:-3, 3:-3]

    inside = draw()
    variance = rate / (1 - rate) / keys
    assert abs(inside.mean().item() - 1) < 5 * (variance / inside.numel()) ** 0.5
    assert inside.var().item() == pytest.approx(variance, rel=0.06)
    flat = (inside - inside.mean()).flatten(3)
    neighbours = (flat[..., 1:] * flat[..., :-1]).mean() / flat.square().mean()
    assert abs(neighbours.item()) < 0.03  # queries side by side draw for themselves,
    draws = {
        "heads": (flat[0], flat[1]),
        "images": (flat[:, 0], flat[:, 1]),
        "poses": (flat[:, :, 0], flat[:, :, 1]),
        "calls": (flat, (draw() - inside.mean()).flatten(3)),
    }
    for name, (one, other) in draws.items():  # and so do these
        assert abs((one * other).mean().item()) < 0.05 * flat.square().mean().item(), name


def test_a_dilation_beyond_the_grid_costs_nothing():
    """Its buffers would have the size of the dilation."""
    (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(5, "square", 10**6), {"spatial", "pose"})
    for query in ("own", "all"):
        got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, query) for b in ("native", "reference"))
        assert_same(got, expected)
