import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import PositionalBias, attention
from escnn_attention.functional.grid import portable
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, cases, outputs_and_gradients


@given(cases(), st.sampled_from([1, 50, 1000, 2**22]), st.sampled_from([1, 50, 1000, 2**19]))
def test_agrees_with_the_reference_in_chunks_of_any_size(arguments, scores, of_image):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "SCORES_PER_CHUNK", scores)
        patch.setattr(portable, "SCORES_PER_IMAGE", of_image)
        got = outputs_and_gradients("blocked", *arguments)
    expected = outputs_and_gradients("reference", *arguments)
    for a, b in zip(got, expected, strict=True):
        if b is None or a is None:
            # A term that cannot change the output may be left out of the graph.
            assert all(t is None or t.abs().max() < 1e-12 for t in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("query", ["own", "all"])
def test_agrees_with_the_reference_in_lower_precision(dtype, tolerance, query):
    arguments = (4, 4, 4, (6, 5), Window(3), {"spatial", "pose"})
    tensors, grid, terms = case(*arguments, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (*tensors, terms.spatial, terms.pose)]
    got = outputs_and_gradients("blocked", tensors, grid, terms, query)
    expected = outputs_and_gradients("reference", exact[:3], grid, PositionalBias(4, *exact[3:]), query)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("terms", [{"spatial", "pose"}, {"spatial", "pose", "absolute"}], ids=["relative", "absolute"])
def test_gradients_numerically(monkeypatch, query, terms):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 20)
    (q, k, v), grid, terms = case(2, 2, 2, (2, 2), Window(3), terms, heads=1, channels=1, batch=1)

    def function(q, k, v, spatial, pose):
        return attention(
            q, k, v, grid, PositionalBias(2, spatial, pose, terms.absolute), query=query, backend="blocked"
        )

    assert torch.autograd.gradcheck(function, (q, k, v, terms.spatial, terms.pose))


def test_holds_a_bounded_chunk_of_the_scores(monkeypatch):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 3000)
    largest = 0

    def watch(method):
        def watched(tensor, *args, **kwargs):
            nonlocal largest
            largest = max(largest, tensor.numel())
            return method(tensor, *args, **kwargs)

        return watched

    # The scores, and the products with the table of offsets.
    monkeypatch.setattr(torch.Tensor, "softmax", watch(torch.Tensor.softmax))
    monkeypatch.setattr(torch.Tensor, "gather", watch(torch.Tensor.gather))
    for window in (Window(), Window(5)):
        tensors, grid, terms = case(2, 2, 2, (8, 8), window, {"spatial", "pose"})
        attention(*tensors, grid, terms, query="own", backend="blocked").sum().backward()
    assert 0 < largest <= 3000


@pytest.mark.parametrize("query", ["own", "all"])
def test_second_derivatives(query):
    (q, k, v), grid, terms = case(2, 2, 2, (2, 2), Window(3), {"spatial"}, heads=1, channels=1, batch=1)

    def function(q, k, v):
        return attention(q, k, v, grid, terms, query=query, backend="blocked")

    assert torch.autograd.gradgradcheck(function, (q, k, v))


def test_dropout_is_the_same_in_the_backward_pass(monkeypatch):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 200)
    (q, k, v), grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial", "pose"})

    def function(v):
        torch.manual_seed(3)
        return attention(q, k, v, grid, terms, query="all", dropout=0.4, backend="blocked")

    # The output is linear in the values with the probabilities that are left: a second draw would break this.
    (gradient,) = torch.autograd.grad(function(v).sum(), v)
    direction = torch.randn_like(v)
    step = function(v + direction).sum() - function(v).sum()
    torch.testing.assert_close((gradient * direction).sum(), step)


def test_dropout_drops_probabilities_and_keeps_the_mean():
    torch.manual_seed(0)
    (q, k, v), grid, terms = case(1, 1, 1, (2, 2), Window(), {"spatial"}, heads=1, batch=1)
    plain = attention(q, k, v, grid, terms, backend="reference")
    for backend in ("blocked", "reference"):
        draws = torch.stack(
            [attention(q, k, v, grid, terms, dropout=0.5, backend=backend).detach() for _ in range(800)]
        )
        assert draws.std(0).min() > 0
        torch.testing.assert_close(draws.mean(0), plain.detach(), atol=0.3, rtol=0)


@pytest.mark.parametrize("window", [Window(), Window(5)], ids=["global", "window"])
def test_holds_a_bounded_number_of_scores_for_an_image(monkeypatch, window):
    monkeypatch.setattr(portable, "SCORES_PER_IMAGE", 3000)
    largest = 0
    fused = torch.nn.functional.scaled_dot_product_attention

    def watch(q, k, v, **options):
        nonlocal largest
        largest = max(largest, math.prod(q.shape[:3]) * k.shape[2] // 3)
        return fused(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    tensors, grid, terms = case(2, 2, 2, (12, 12), window, {"spatial", "pose"}, batch=3)
    with torch.no_grad():
        attention(*tensors, grid, terms, backend="blocked")
    assert 1000 < largest <= 3000


def test_some_tiles_with_as_many_places_as_the_grid_has_positions(monkeypatch):
    """Two tiles of four places on a grid of four: half of each only fills up."""
    monkeypatch.setattr(portable, "SCORES_PER_IMAGE", 1)
    tensors, grid, terms = case(2, 2, 2, (4, 1), Window(5), {"spatial"})
    assert_same(
        [attention(*tensors, grid, terms, backend="blocked")],
        outputs_and_gradients("reference", tensors, grid, terms, "own", "all")[:1],
    )
