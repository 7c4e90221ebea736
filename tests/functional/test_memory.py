"""Bounds on memory, and what is said when they are reached."""

import pytest
import torch

from escnn_attention.functional import BACKENDS, Backend, attention, memory, working_memory
from escnn_attention.functional.grid import portable
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, outputs_and_gradients


@pytest.fixture(autouse=True)
def _restore():
    yield
    working_memory(None)


def test_holds_inside_a_with_statement_or_until_it_is_set_again():
    assert memory.chunk_size(1000, 4, copies=2) == 1000
    with working_memory(800):
        assert memory.chunk_size(1000, 4, copies=2) == 100
        with working_memory(80_000):
            assert memory.chunk_size(1000, 4, copies=2) == 1000
        assert memory.chunk_size(1000, 8, copies=2) == 50
    assert memory.chunk_size(1000, 4, copies=2) == 1000
    working_memory(1)
    assert memory.chunk_size(1000, 4, copies=2) == 1


@pytest.mark.parametrize("value", [0, -5])
def test_needs_a_positive_number(value):
    with pytest.raises(ValueError, match=r"num_bytes: .*positive number"):
        working_memory(value)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["blocked", "native", "dense"])
@pytest.mark.parametrize("window", [Window(), Window(3)], ids=["global", "local"])
@pytest.mark.parametrize("query", ["own", "all"])
def test_results_are_the_same_also_when_the_bound_ends_before_the_backward_pass(backend, window, query):
    arguments = (*case(2, 2, 2, (5, 6), window, {"waves", "pose"}), query)
    expected = outputs_and_gradients("reference", *arguments)
    with working_memory(20_000):
        got = outputs_and_gradients(backend, *arguments)
    assert_same(got, expected)
    tensors, grid, terms, _ = arguments
    with working_memory(20_000):
        out = attention(*tensors, grid, terms, query=query, backend=backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_same(torch.autograd.grad((out * weight).sum(), tensors), expected[1:4])


def test_bounds_the_chunks(monkeypatch):
    sizes = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda t, *a, **k: (sizes.append(t.numel()), softmax(t, *a, **k))[1])
    tensors, grid, terms = case(2, 2, 2, (12, 12), Window(3), {"spatial"})
    with working_memory(8 * 4 * 3000):
        attention(*tensors, grid, terms, backend="blocked")
    assert 0 < max(sizes) <= 3000 < portable.SCORES_PER_CHUNK


def test_what_cannot_be_allocated_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(memory, "_physical_memory", lambda: 10**5)
    tensors, grid, terms = case(2, 2, 2, (8, 8), Window(3), {"spatial"})
    with pytest.raises(
        MemoryError, match=r"backend 'reference'.*are 1.05 MB.*backend=\"auto\".*query=\"own\".*one image"
    ):
        attention(*tensors, grid, terms, query="all", backend="reference")
    attention(*tensors, grid, terms, query="all")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), MemoryError),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
    ],
)
def test_a_failed_allocation_says_what_would_fit(monkeypatch, error, expected):
    def fail(*_, **__):
        raise error

    monkeypatch.setitem(BACKENDS, "hungry", Backend(fail))
    tensors, grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial"})
    with pytest.raises(expected, match=r"out of memory with backend 'hungry'.*working_memory(.|\n)*memory") as raised:
        attention(*tensors, grid, terms, backend="hungry")
    assert raised.value.__cause__ is error


def test_other_errors_are_left_alone(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setitem(BACKENDS, "broken", Backend(fail))
    tensors, grid, terms = case(2, 2, 2, (4, 4), Window(3), {"spatial"})
    with pytest.raises(RuntimeError, match=r"^something else$"):
        attention(*tensors, grid, terms, backend="broken")
