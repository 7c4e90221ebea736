"""Tiles on the CPU, against the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import attention
from escnn_attention.functional.backends import tiled
from escnn_attention.geometry.positions import Window
from tests.functional.cases import assert_same, case, cases, outputs_and_gradients, refusal


@given(cases(), st.sampled_from([1, 300, 2**20]))
def test_agrees_with_the_reference_in_pieces_of_any_size(arguments, piece):
    if refusal("tiled", *arguments) is not None:
        assert arguments[1].complete or not arguments[1].shape
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "SCORES_PER_CHUNK", piece)
        got = outputs_and_gradients("tiled", *arguments)
    assert_same(got, outputs_and_gradients("reference", *arguments))


@pytest.mark.parametrize("query", ["own", "all"])
def test_dropout_is_the_same_in_the_backward_pass(monkeypatch, query):
    monkeypatch.setattr(tiled, "SCORES_PER_CHUNK", 200)
    (q, k, v), grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial", "pose"})

    def function(*leaves):
        torch.manual_seed(3)
        q, k, v, spatial, pose = leaves
        return attention(q, k, v, grid, type(terms)(2, spatial, pose), query=query, dropout=0.4, backend="tiled")

    assert torch.autograd.gradcheck(function, (q, k, v, terms.spatial, terms.pose))


def test_holds_a_bounded_piece_of_the_scores(monkeypatch):
    monkeypatch.setattr(tiled, "SCORES_PER_CHUNK", 5000)
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
    assert attention(*tensors, grid, terms, query="all").shape == (2, 0, 12, 2, 3)
    with pytest.raises(ValueError, match="'tiled' cannot serve this call: there are no images"):
        attention(*tensors, grid, terms, backend="tiled")
