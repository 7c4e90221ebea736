import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import ON_GRIDS, PositionalBias, attention
from escnn_attention.functional.grid import standard
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, cases, leaves, outputs_and_gradients


def run(tensors, grid, terms, query="own", keys="all"):
    call, unfold = ON_GRIDS.fold(GridCall(*tensors, terms, grid, grid, query=query, keys=keys))
    out = standard.attention(call)
    return out if unfold is None else unfold(out)


@given(cases(), st.sampled_from([1, 50, 1000, standard.SCORES_PER_IMAGE]))
def test_agrees_with_the_reference_in_chunks_of_any_size(arguments, scores):
    tensors, grid, terms, query, keys = arguments
    if keys == "own" and tensors[1].shape[3] == 1:
        keys = "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard, "SCORES_PER_IMAGE", scores)
        out = run(tensors, grid, terms, query, keys)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = [out, *torch.autograd.grad((out * weight).sum(), leaves(tensors, terms), allow_unused=True)]
    assert_same(got, outputs_and_gradients("reference", tensors, grid, terms, query, keys))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_agrees_with_the_reference_in_lower_precision(dtype, tolerance):
    tensors, grid, terms = case(4, 4, 4, (6, 5), Window(3), {"spatial", "pose"}, dtype=dtype)
    got = run(tensors, grid, terms)
    exact = [t.detach().double() for t in (*tensors, terms.spatial, terms.pose)]
    expected = attention(*exact[:3], grid, PositionalBias(4, *exact[3:]), backend="reference")
    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("window", [Window(), Window(5)], ids=["global", "window"])
def test_holds_a_bounded_number_of_scores_for_an_image(monkeypatch, window):
    monkeypatch.setattr(standard, "SCORES_PER_IMAGE", 3000)
    largest = 0
    fused = torch.nn.functional.scaled_dot_product_attention

    def watch(q, k, v, **options):
        nonlocal largest
        largest = max(largest, math.prod(q.shape[:3]) * k.shape[2] // 3)
        return fused(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    tensors, grid, terms = case(2, 2, 2, (12, 12), window, {"spatial", "pose"}, batch=3)
    run(tensors, grid, terms)
    assert 1000 < largest <= 3000


def test_some_tiles_with_as_many_places_as_the_grid_has_positions(monkeypatch):
    """Two tiles of four places on a grid of four: half of each only fills up."""
    monkeypatch.setattr(standard, "SCORES_PER_IMAGE", 1)
    tensors, grid, terms = case(2, 2, 2, (4, 1), Window(5), {"spatial"})
    assert_same([run(tensors, grid, terms)], outputs_and_gradients("reference", tensors, grid, terms, "own", "all")[:1])
