"""Tiles on the CPU, against the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import Terms, attention, tiled
from escnn_attention.positions import Grid, Window
from tests.functional.cases import assert_same, case, cases, doubled, leaves, outputs_and_gradients, refusal


@given(cases(), st.sampled_from([1, 300, 2**20]))
def test_agrees_with_the_reference_in_pieces_of_any_size(arguments, piece):
    if refusal("tiled", *arguments) is not None:
        assert arguments[1].complete or not arguments[1].shape
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "PIECE", piece)
        got = outputs_and_gradients("tiled", *arguments)
    assert_same(got, outputs_and_gradients("reference", *arguments))


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
    got = outputs_and_gradients("tiled", tensors, grid, terms, query)
    expected = outputs_and_gradients("reference", exact, grid, exact_terms, query)
    assert all(t.dtype == dtype for t in got)
    assert_same(got, expected, tolerance)


@pytest.mark.parametrize("query", ["own", "all"])
def test_scores_of_any_size(query):
    """Where exponentials overflow, the largest score is subtracted."""
    tensors, grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial", "pose"})
    tensors = (tensors[0].detach().mul(1e3).requires_grad_(), *tensors[1:])
    got, expected = (outputs_and_gradients(b, tensors, grid, terms, query) for b in ("tiled", "reference"))
    assert_same(got, expected, 1e-8)


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        (Window(3), {"spatial", "pose"}),
        (Window(), {"waves", "pose"}),
        (Window(), {"waves"}),
        (Window(), {"pose"}),
        (Window(), set()),
    ],
)
def test_first_and_second_derivatives(query, window, kinds):
    tensors, grid, terms = case(2, 2, 2, (2, 2), window, kinds, heads=1, channels=1, batch=1)

    def function(q, k, v, *_):
        return attention(q, k, v, grid, terms, query=query, backend="tiled")

    inputs = tuple(leaves(tensors, terms))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("query", ["own", "all"])
def test_dropout_is_the_same_in_the_backward_pass(monkeypatch, query):
    monkeypatch.setattr(tiled, "PIECE", 200)
    (q, k, v), grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial", "pose"})

    def function(*leaves):
        torch.manual_seed(3)
        q, k, v, spatial, pose = leaves
        return attention(q, k, v, grid, type(terms)(2, spatial, pose), query=query, dropout=0.4, backend="tiled")

    assert torch.autograd.gradcheck(function, (q, k, v, terms.spatial, terms.pose))


def test_dropout_drops_probabilities_and_keeps_the_mean():
    torch.manual_seed(0)
    (q, k, v), grid, terms = case(1, 1, 1, (2, 2), Window(3), {"spatial"}, heads=1, batch=1)
    plain = attention(q, k, v, grid, terms, backend="reference")
    draws = torch.stack([attention(q, k, v, grid, terms, dropout=0.5, backend="tiled").detach() for _ in range(800)])
    assert draws.std(0).min() > 0
    torch.testing.assert_close(draws.mean(0), plain.detach(), atol=0.3, rtol=0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_independently(rate):
    """Equal scores over n keys of value 1: the mean of n independent draws, each 0 or 1 / (1 - rate)."""
    torch.manual_seed(0)
    positions, keys = 30 * 30, 4 * 49
    q, k, v = (torch.zeros(2, 2, 4, positions, 3, dtype=torch.float64) for _ in range(3))
    grid = Grid((30, 30), Window(7))
    out = attention(q, k, v + 1, grid, Terms(4), dropout=rate, backend="tiled")
    inside = out[..., 0].unflatten(-1, (30, 30))[..., 3:-3, 3:-3]
    variance = rate / (1 - rate) / keys
    assert abs(inside.mean().item() - 1) < 5 * (variance / inside.numel()) ** 0.5
    assert inside.var().item() == pytest.approx(variance, rel=0.06)
    flat = (inside - inside.mean()).flatten(3)
    neighbours = (flat[..., 1:] * flat[..., :-1]).mean() / flat.square().mean()
    assert abs(neighbours.item()) < 0.03  # queries side by side draw for themselves,
    again = attention(q, k, v + 1, grid, Terms(4), dropout=rate, backend="tiled")[..., 0].unflatten(-1, (30, 30))
    draws = {
        "images": (flat[0], flat[1]),
        "heads": (flat[:, 0], flat[:, 1]),
        "poses": (flat[:, :, 0], flat[:, :, 1]),
        "calls": (flat, (again[..., 3:-3, 3:-3] - inside.mean()).flatten(3)),
    }
    for name, (one, other) in draws.items():  # and so do these
        assert abs((one * other).mean().item()) < 0.05 * flat.square().mean().item(), name


def test_a_dilation_beyond_the_grid_costs_nothing():
    """Its buffers would have the size of the dilation."""
    (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(5, "square", 10**6), {"spatial", "pose"})
    for query in ("own", "all"):
        got, expected = (
            outputs_and_gradients(backend, (q, k, v), grid, terms, query) for backend in ("tiled", "reference")
        )
        assert_same(got, expected)


def test_holds_a_bounded_piece_of_the_scores(monkeypatch):
    monkeypatch.setattr(tiled, "PIECE", 5000)
    largest = 0
    exp2_ = torch.Tensor.exp2_

    def watched(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return exp2_(tensor)

    monkeypatch.setattr(torch.Tensor, "exp2_", watched)
    tensors, grid, terms = case(2, 2, 2, (12, 12), Window(5), {"spatial", "pose"}, batch=3)
    attention(*tensors, grid, terms, query="own", backend="tiled").sum().backward()
    assert 0 < largest <= 5000


def test_refuses_what_it_cannot_serve():
    tensors, grid, terms = case(2, 2, 2, (3, 3), Window(), {"spatial"})
    with pytest.raises(ValueError, match="backend: 'tiled' cannot serve this call: without a window it needs"):
        attention(*tensors, grid, terms, backend="tiled")


def test_a_batch_of_nothing_is_left_to_others():
    tensors, grid, terms = case(2, 2, 2, (3, 4), Window(3), {"spatial", "pose"}, batch=0)
    assert attention(*tensors, grid, terms, query="all").shape == (0, 2, 2, 12, 3)
    with pytest.raises(ValueError, match="'tiled' cannot serve this call: there are no images"):
        attention(*tensors, grid, terms, backend="tiled")
