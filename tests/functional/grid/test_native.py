"""The loop that is compiled for the machine, against the formula."""

import ctypes
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from escnn_attention.functional import ON_GRIDS, PositionalBias, attention, working_memory
from escnn_attention.functional.grid import native
from escnn_attention.functional.native import build as compiled
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window, shape_of
from tests.functional.cases import (
    assert_independent,
    assert_same,
    call_of,
    case,
    doubled,
    in_threads,
    leaves,
    outcome,
    outputs_and_gradients,
    with_leaves,
)
from tests.functional.precise import EXTENDED, errors, exact, mean_ratio

if reason := native.why_not_built(torch.float64):
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((3, 18), Window(5)),
        ((40,), Window(7, "square", 3)),
        ((3, 4, 6), Window(3, "disc")),
        ((3, 37), Window(9)),
        ((4, 17), Window()),
        ((3, 5, 4), Window()),
    ],
    ids=str,
)
@pytest.mark.parametrize(("order", "key_poses", "channels"), [(1, 1, 1), (5, 10, 9), (6, 6, 6), (7, 7, 3)])
@pytest.mark.slow
def test_rows_longer_than_a_vector_and_groups_that_are_not_full(query, shape, window, order, key_poses, channels):
    arguments = (*case(order, key_poses, order, shape, window, {"spatial", "pose"}, channels=channels), query)
    assert_same(outputs_and_gradients("native", *arguments), outputs_and_gradients("reference", *arguments))


@pytest.mark.sampled
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("kinds", [{"waves", "pose"}, {"waves"}, {"pose", "shared"}, set()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_global_attention_in_several_stretches_of_keys(query, kinds, dtype, tolerance, side_by_side):
    """Some of whole vectors of queries and some not, of one key pose and several, of groups that are not full."""
    for order, key_poses, query_poses, shape, channels in (
        (1, 1, 1, (40, 7), 1),
        (5, 10, 5, (37,), 9),
        (4, 4, 4, (8, 8), 17),
        (3, 2, 1, (5, 4, 7), 3),
        (2, 140, 2, (3,), 8),
    ):
        if query_poses < order and (query == "own" or "pose" in kinds):
            continue
        tensors, grid, terms = case(
            order, key_poses, query_poses, shape, Window(), kinds, channels=channels, dtype=dtype
        )
        exact, exact_terms = doubled(tensors, terms)
        if side_by_side:  # positions in memory
            axes = (0, 3, 4, 1, 2)
            tensors = [t.detach().permute(axes).contiguous().permute(axes).requires_grad_() for t in tensors]
        got = outputs_and_gradients("native", tensors, grid, terms, query)
        assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((5, 5), Window(3)),
        ((7,), Window(3, "square", 2)),
        ((3, 3, 2), Window()),
        ((4, 6), Window(3, shape_of("square", circular=True))),
        ((4, 5), Window(3, shape_of("disc", causal=True))),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [4, 9, 12])
def test_small_grids_of_images_side_by_side(query, shape, window, batch):
    """In groups of which the last may have fewer; an image does not see what is not finite in another."""
    (q, k, v), grid, terms = case(3, 3, 3, shape, window, {"spatial", "pose"}, heads=8, channels=2, batch=batch)
    got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, query) for b in ("native", "reference"))
    assert_same(got, expected, 1e-12)
    with torch.no_grad():
        v[:, 1] = torch.nan
        spoilt = attention(q, k, v, grid, terms, query=query, backend="native")
    others = [i for i in range(batch) if i != 1]
    assert spoilt[:, 1].isnan().all()
    assert_same([spoilt[:, others]], [expected[0][:, others]], 1e-12)


@pytest.mark.slow
def test_tables_of_more_keys_than_the_cache_holds():
    """Fewer query poses are taken together."""
    arguments = (*case(5, 5, 5, (1200,), Window(), {"spatial"}, heads=1, channels=1, batch=1), "own")
    assert_same(outputs_and_gradients("native", *arguments), outputs_and_gradients("blocked", *arguments))


@pytest.mark.parametrize("size", [1, 300])
def test_largest_terms_of_a_score_need_not_meet_in_one_key(size):
    """Exponentials of scores are products of those of their terms, unless all products are too small."""
    (q, k, v), grid, terms = case(3, 3, 3, (4, 19), Window(5), {"spatial", "pose"})
    tables = [(size * t.detach()).requires_grad_() for t in (terms.spatial, terms.pose)]
    terms = replace(terms, spatial=tables[0], pose=tables[1])
    got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, "all") for b in ("native", "reference"))
    assert all(t.isfinite().all() for t in got)
    assert_same(got, expected, 1e-8)


@pytest.mark.parametrize("query", ["own", "all"])
def test_a_later_stretch_of_keys_may_have_any_larger_scores(query):
    """Scores grow along the keys, beyond what exponentials hold."""
    (q, k, v), grid, terms = case(2, 2, 2, (300,), Window(), {"waves", "pose"})
    growing = torch.linspace(0, 3000, 300, dtype=torch.float64)[:, None, None]
    k = (k.detach() * growing).requires_grad_()
    got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, query) for b in ("native", "reference"))
    assert_same(got, expected, 1e-8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds"), [(Window(3), {"spatial", "pose", "shared"}), (Window(), {"waves", "pose", "shared"})]
)
def test_any_number_of_threads_gives_the_same_bits(query, window, kinds):
    arguments = (*case(4, 4, 4, (9, 9), window, kinds, batch=15, heads=4), query)
    first, *others = in_threads((1, 2, 5), lambda: outputs_and_gradients("native", *arguments))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(("channels", "fused"), [(16, True), (15, False)])
def test_wide_heads_without_gradients_are_fused_in_any_number_of_threads(monkeypatch, query, channels, fused):
    arguments = (*case(3, 4, 3, (3, 37), Window(), set(), channels=channels, heads=1, batch=1), query)
    expected, seen, whole = outputs_and_gradients("reference", *arguments), [], native.F.scaled_dot_product_attention
    monkeypatch.setattr(native.F, "scaled_dot_product_attention", lambda *x: seen.append(1) or whole(*x))
    assert_same(outputs_and_gradients("native", *arguments), expected)
    assert not seen  # gradients are those of the loop
    with torch.no_grad():
        found = in_threads((1, 3), lambda: attention(*arguments[0], *arguments[1:3], query=query, backend="native"))
    assert len(seen) == (2 if fused else 0)
    assert_same(found[:1], expected[:1])
    assert torch.equal(*found)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory cannot be reset")
def test_holds_a_bounded_chunk_of_an_image():
    """Its threads lay out bands of rows, as many as fit."""
    call, held = between((400, 400), (200, 200), (1, 2), Window(3), 1, 1, 1, heads=1, batch=1), {}
    call = replace(call, bias=PositionalBias(1))
    with torch.no_grad():
        native._loop(call, 2**12)
        for chunk in (2**12, 2**24):  # all of the image at once takes about 10 MB
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = _megabytes("VmRSS")
            native._loop(call, chunk)
            held[chunk] = _megabytes("VmHWM") - before
    assert held[2**12] + 4 < held[2**24] < 30


def _megabytes(name):
    return int(re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def test_refuses_what_it_cannot_serve(monkeypatch):
    tensors, grid, terms = case(2, 2, 2, (), Window(), {"spatial"})
    with pytest.raises(ValueError, match="'native' cannot serve this call: there is no base space for a table"):
        attention(*tensors, grid, terms, backend="native")
    monkeypatch.setattr(native, "_MOST_KEYS", 49)
    tensors, grid, terms = case(2, 2, 2, (3, 3), Window(), {"spatial"})
    with pytest.raises(ValueError, match="without a window it serves at most 49 offsets and poses"):
        attention(*tensors, grid, terms, backend="native")


def test_without_a_compiler_others_serve(monkeypatch, caplog):
    tries = []

    def none(*_):
        tries.append(_)
        raise compiled.NotBuilt("there is no C++ compiler")

    monkeypatch.setattr(compiled, "library", none)
    monkeypatch.setattr(native.KERNEL, "_found", {})
    arguments = (*case(2, 2, 2, (3, 4), Window(3), {"spatial", "pose"}), "all")
    assert_same(outputs_and_gradients("auto", *arguments), outputs_and_gradients("reference", *arguments))
    with pytest.raises(ValueError, match="'native' cannot serve this call: there is no C\\+\\+ compiler"):
        outputs_and_gradients("native", *arguments)
    assert len(tries) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes several times longer on the CPU: there is no C++ compiler" in caplog.text


def test_memory_that_is_not_there_says_what_would_fit(monkeypatch):
    monkeypatch.setattr(native.KERNEL, "_found", {torch.float64: lambda _: 1})
    tensors, grid, terms = case(2, 2, 2, (3, 4), Window(3), {"spatial"})
    with pytest.raises(MemoryError, match=r"out of memory with backend 'native'.*working_memory"):
        attention(*tensors, grid, terms, backend="native")


@pytest.mark.sampled(4)
@pytest.mark.skipif(not EXTENDED, reason="there is no precision beyond float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("window", [Window(3), Window()], ids=["local", "global"])
@pytest.mark.parametrize("terms", [{"spatial", "pose"}, {"pose"}], ids=["table", "no-table"])
def test_is_as_exact_as_blocked_however_large_scores_are(dtype, query, window, terms):
    """A maximum and a sum in one number would lose what a dominating score needs."""
    results = {"native": [], "blocked": []}
    for scale, seed in itertools.product((1, 10, 30, 100, 1000), range(3)):
        tensors, grid, bias = case(3, 3, 3, (5, 4), window, terms, 1, 8, 1, dtype, seed)
        tensors = tuple((scale * t.detach()).requires_grad_() for t in tensors)
        weight = torch.randn(1, 1, 20, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        everywhere = torch.arange(20)
        rows = grid.rows(everywhere[:, None], everywhere)
        table = torch.zeros(3, len(grid.offsets), 8) if bias.spatial is None else bias.spatial[0]
        q, k, v, grad = (t[0, 0] for t in (*tensors, weight.to(dtype)))
        expected = exact(q, k, v, grad, query == "own", (table, rows), bias.pose[0])
        if bias.spatial is None:
            del expected[4]
        for backend, found in results.items():
            got = outputs_and_gradients(backend, tensors, grid, bias, query)
            found.append(errors([t[0, 0] for t in got[:4]] + [t[0] for t in got[4:]], expected))
    assert mean_ratio(*results.values(), dtype) < 2


@pytest.mark.parametrize(
    ("window", "kinds"), [(Window(), {"waves", "pose"}), (Window(), {"spatial"})], ids=["factorises", "table"]
)
def test_errors_do_not_grow_with_the_number_of_keys(window, kinds):
    """Sums of thousands are sums of sums."""
    tensors, grid, terms = case(4, 4, 4, (20, 20), window, kinds, 1, 8, 1, torch.float32)
    in_double, of_double = doubled(tensors, terms)
    exactly = outputs_and_gradients("native", in_double, grid, of_double, "own")
    found, others = (outputs_and_gradients(backend, tensors, grid, terms, "own") for backend in ("native", "blocked"))
    for a, b, e in zip(found, others, exactly, strict=True):
        # Of all numbers together: which one is the worst is chance.
        ours, theirs = (((t.double() - e).norm() / e.norm()).item() for t in (a, b))
        assert ours <= 2 * max(theirs, 2e-7)
        # The gradient of waves is a product of PyTorch's, whose sums differ between processors.
        largest = max(1.2e-6 * e.abs().max().item(), 1.1 * (b.double() - e).abs().max().item())
        assert (a.double() - e).abs().max() <= largest


PAIRS = [
    ((8, 8), (4, 4), (1, 2), Window(5)),
    ((4, 6), (8, 12), (2, 1), Window(5, "disc")),
    ((9, 7), (5, 4), (1, 2), Window(3)),  # what a stride of 2 leaves of an odd grid
    ((40,), (60,), (3, 2), Window(7)),
    ((12,), (3,), (1, 4), Window(1)),
    ((6, 4, 2), (3, 2, 1), (1, 2), Window(3)),
    ((4, 2), (6, 3), (3, 2), Window()),
    ((3, 3), (9, 9), (3, 1), Window()),
    ((5, 6), (2, 9), (2, 4), Window()),  # of other extents
]
"""The shapes of two grids, their spacings, and the window."""


def between(shape, key_shape, spacings, window, order=3, key_poses=4, channels=3, heads=2, batch=2, query="own"):
    """A call with a table of offsets between two grids."""
    grids = Grid(shape, window, spacing=spacings[0]), Grid(key_shape, Window(), spacing=spacings[1])
    return call_of(*grids, (order, key_poses, order), {"spatial", "pose"}, heads, channels, batch, query=query)


@pytest.mark.sampled
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize(("order", "key_poses", "channels"), [(1, 1, 1), (5, 6, 9), (3, 3, 4)])
def test_two_grids_as_the_reference(pair, query, order, key_poses, channels):
    call = between(*pair, order, key_poses, channels, query=query)
    expected = outcome(call, "reference")
    for memory in (1, 2**26):  # bands of few rows, and of all
        with working_memory(memory):
            assert_same(outcome(call, "native"), expected, 1e-12)
    (q, k, v), bias = doubled((call.q, call.k, call.v), call.bias, torch.float32)
    single = {b: outcome(replace(call, q=q, k=k, v=v, bias=bias), b) for b in ("native", "blocked")}
    for ours, theirs, exactly in zip(single["native"], single["blocked"], expected, strict=True):
        error, other = ((t.double() - exactly).norm() for t in (ours, theirs))
        assert error <= 2 * max(other, 2e-7 * exactly.norm()) + 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("batch", [4, 9, 12])
def test_two_small_grids_of_images_side_by_side(pair, batch):
    call = between(*pair, 3, 6, 2, heads=8, batch=batch)
    assert_same(outcome(call, "native"), outcome(call, "reference"), 1e-12)


@pytest.mark.parametrize("pair", [PAIRS[2], PAIRS[6]], ids=str)
def test_two_grids_in_any_number_of_threads(pair):
    call = between(*pair, batch=5)
    found = in_threads((1, 3), lambda: outcome(call, "native"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds", "two_grids"),
    [
        (Window(), {"waves", "pose"}, False),
        (Window(3), {"spatial", "pose"}, False),
        (Window(3), {"spatial", "pose"}, True),
    ],
)
def test_dropout_is_the_same_in_the_backward_pass_and_in_bands_of_any_size(window, kinds, two_grids, query):
    grid = Grid((6, 4), window)
    keys = Grid((3, 2), Window(), spacing=2) if two_grids else grid
    call = call_of(grid, keys, (2, 2, 2), kinds, query=query, dropout=0.4)

    def function(*tensors):
        torch.manual_seed(3)
        return ON_GRIDS.compute(with_leaves(call, tensors), "native")

    inputs = leaves((call.q, call.k, call.v), call.bias)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    whole = function(*inputs)
    assert not torch.allclose(whole, ON_GRIDS.compute(replace(call, dropout=0.0), "native"), rtol=1e-3)
    with working_memory(1):
        torch.testing.assert_close(function(*inputs), whole)


@pytest.mark.parametrize("backend", ["native", "blocked"])
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], ((8, 8), (32, 32), (4, 1), Window(3))], ids=str)
def test_what_is_not_finite_stays_in_its_window_between_two_grids(pair, backend):
    call = between(*pair, order=2, key_poses=2, batch=1)
    with torch.no_grad():
        call.v[:, 0, 0, 0, 0], call.k[:, 0, -1, 1, 2] = torch.inf, torch.nan
        out = ON_GRIDS.compute(call, backend)
    queries, keys = torch.arange(call.q.shape[2])[:, None], torch.tensor([0, call.k.shape[2] - 1])
    seen = (call.offsets.rows(queries, keys) >= 0).any(1)
    assert torch.equal(out.isfinite().all(-1).all(-1)[0, 0], ~seen)
    assert seen.sum() < len(seen)


def test_two_spaces_have_no_table():
    call = between((5,), (4,), (0, 1), Window())
    with pytest.raises(ValueError, match="queries and keys of different spaces"):
        ON_GRIDS.compute(call, "native")
    assert_same(outcome(call, "auto"), outcome(call, "reference"))


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_independently(rate, query, dtype):
    assert_independent("native", Grid((30, 30), Window(7)), 4, 3, query, rate, dtype, of_neighbours=0.03)


def test_a_dilation_beyond_the_grid_costs_nothing():
    """Its buffers would have the size of the dilation."""
    (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(5, "square", 10**6), {"spatial", "pose"})
    for query in ("own", "all"):
        got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, query) for b in ("native", "reference"))
        assert_same(got, expected)
