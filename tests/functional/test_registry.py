"""The backends, the choice among them, and bounds on their memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from escnn_attention.functional import BACKENDS, ON_GRIDS, Backend, PositionalBias, attention, registry, working_memory
from escnn_attention.functional.grid import dense, triton
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, changed, leaves, outputs_and_gradients


@pytest.fixture(autouse=True)
def _restore():
    yield
    working_memory(None)


def arguments(n=5, window=None):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, n, 1, 2, dtype=torch.float64)
    grid = Grid((n,), window or Window(3))
    return q, k, v, grid, PositionalBias(1, torch.randn(1, 1, len(grid.offsets), 2, dtype=torch.float64))


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend: got 'fast'.*'auto'.*'reference'.*'blocked'"):
        attention(*arguments(), backend="fast")


def test_a_backend_that_refuses_says_why_and_auto_passes_it_over(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("called all the same")

    monkeypatch.setitem(BACKENDS, "picky", Backend(fail, lambda *_: "there is no Tuesday in the input"))
    monkeypatch.setattr(ON_GRIDS, "preference", lambda _: ("picky", "blocked"))
    with pytest.raises(ValueError, match=r"backend: .*no Tuesday"):
        attention(*arguments(), backend="picky")
    torch.testing.assert_close(attention(*arguments()), attention(*arguments(), backend="reference"))


def test_own_poses_are_those_of_the_output():
    q, k, v, grid, _ = arguments()
    with pytest.raises(ValueError, match=r"query: .*needed the 3"):
        attention(q, k, v, grid, PositionalBias(3))
    assert attention(q, k, v, grid, PositionalBias(3), query="all").shape[3] == 3


@pytest.mark.parametrize(
    ("device", "names"),
    [("cpu", ("native", "blocked")), ("cuda", ("triton", "dense", "blocked")), ("mps", ("blocked",))],
)
def test_what_is_tried_first_on_a_device(device, names):
    assert ON_GRIDS.preference(device) == (*names, "linear")


def test_a_backend_is_chosen_once_for_calls_of_a_kind(monkeypatch):
    asked = []
    watched = replace(BACKENDS["blocked"], why_unsupported=lambda call: asked.append(call.q.shape))
    monkeypatch.setitem(BACKENDS, "blocked", watched)
    for n in (5, 5, 6, 5):
        attention(*arguments(n), backend="blocked")
    assert [shape[2] for shape in asked] == [5, 6]
    with torch.no_grad():
        attention(*arguments(), backend="blocked")
    assert len(asked) == 3
    monkeypatch.setitem(BACKENDS, "blocked", replace(watched, why_unsupported=lambda _: "it is closed"))
    with pytest.raises(ValueError, match="it is closed"):
        attention(*arguments(), backend="blocked")


def test_a_backend_is_chosen_within_a_checkpoint():
    """Whose second pass, which knows the backend, saves as many tensors as the first."""
    tensors, grid, terms = case(4, 4, 4, (3, 3), Window(), {"rotary"})

    def outcome(*tensors):
        return attention(*tensors, grid, terms, backend="blocked").square().sum()

    ON_GRIDS.forget()
    got = torch.autograd.grad(checkpoint(outcome, *tensors, use_reentrant=False), leaves(tensors, terms))
    expected = torch.autograd.grad(outcome(*tensors), leaves(tensors, terms))
    assert_same(got, expected)
    ON_GRIDS.forget()
    with torch.autograd.graph.disable_saved_tensors_hooks("there are none here"):
        assert_same(torch.autograd.grad(outcome(*tensors), leaves(tensors, terms)), expected)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", sorted(set(ON_GRIDS.backends) - {"linear"}))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_values_that_are_not_finite_reach_those_who_see_them_and_no_others(backend, value, which):
    (q, k, v), grid, terms = case(2, 2, 2, (7,), Window(3), {"spatial", "pose"}, channels=2)
    clean = attention(q, k, v, grid, terms, backend=backend)
    tensors = {name: t.detach().clone() for name, t in (("q", q), ("k", k), ("v", v))}
    tensors[which][1, 0, 2, 0, 0] = value
    out = attention(*tensors.values(), grid, terms, backend=backend)
    reached = torch.zeros(2, 2, 7, dtype=torch.bool)
    reached[1, 0, 2 if which == "q" else slice(1, 4)] = True
    torch.testing.assert_close(out[~reached], clean[~reached], rtol=1e-12, atol=0)
    if which == "v" or value != value:
        assert not out[reached].isfinite().flatten(1).all(1).any()


@pytest.mark.sampled(1, of="compiled graphs")
@pytest.mark.parametrize(
    ("backend", "window", "kinds"),
    [
        ("native", Window(3), {"spatial", "pose"}),
        ("triton", Window(3), {"spatial", "pose"}),
        ("tiles", Window(3), {"spatial", "pose"}),
        ("dense", Window(), {"waves", "pose"}),
        ("dense", Window(3), {"waves", "pose"}),
    ],
)
def test_compiles_in_one_graph(monkeypatch, backend, window, kinds):
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", 1)
    if backend == "tiles":
        monkeypatch.setattr(triton, "tiled", lambda *_: True)
    tensors, grid, terms = case(2, 2, 2, (3, 4), window, kinds, batch=1)
    # Tables come from the encodings in any order in memory.
    terms = changed(terms, lambda t: t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_())

    def function(q, k, v):
        return attention(q, k, v, grid, terms, backend="triton" if backend == "tiles" else backend)

    torch._dynamo.reset()
    results = []
    for f in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        out = f(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves(tensors, terms))])
    assert_same(*results)


@pytest.mark.parametrize("backend", sorted(set(ON_GRIDS.backends) - {"linear"}))
def test_one_position(backend):
    q, k, v, grid, terms = arguments(1, Window(9))
    torch.testing.assert_close(attention(q, k, v, grid, terms, backend=backend), v)


def test_holds_inside_a_with_statement_or_until_it_is_set_again():
    assert registry.chunk_size(1000, 4, copies=2) == 1000
    with working_memory(800):
        assert registry.chunk_size(1000, 4, copies=2) == 100
        with working_memory(80_000):
            assert registry.chunk_size(1000, 4, copies=2) == 1000
        assert registry.chunk_size(1000, 8, copies=2) == 50
    assert registry.chunk_size(1000, 4, copies=2) == 1000
    working_memory(1)
    assert registry.chunk_size(1000, 4, copies=2) == 1


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


def test_what_cannot_be_allocated_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(registry, "_physical_memory", lambda: 10**5)
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
