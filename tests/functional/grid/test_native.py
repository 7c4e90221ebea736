"""The loop that is compiled for the machine, against the formula."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import PositionalBias, Waves, attention, working_memory
from escnn_attention.functional.grid import native
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.functional.native import build as compiled
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, cases, doubled, outputs_and_gradients, refusal
from tests.functional.precise import EXTENDED, errors, exact, mean_ratio

if reason := native.why_not_built(torch.float64):
    pytest.skip(reason, allow_module_level=True)


@given(cases(), st.sampled_from([1, 3000, 2**19]))
def test_agrees_with_the_reference_in_bands_of_any_size(arguments, chunk):
    if refusal("native", *arguments) is not None:
        assert not arguments[1].shape
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "NUMBERS_PER_CHUNK", chunk)
        got = outputs_and_gradients("native", *arguments)
    assert_same(got, outputs_and_gradients("reference", *arguments))


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
def test_rows_longer_than_a_vector_and_groups_that_are_not_full(query, shape, window, order, key_poses, channels):
    arguments = (*case(order, key_poses, order, shape, window, {"spatial", "pose"}, channels=channels), query)
    assert_same(outputs_and_gradients("native", *arguments), outputs_and_gradients("reference", *arguments))


@pytest.mark.sampled
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("kinds", [{"waves", "pose"}, {"waves"}, {"pose", "shared"}, set()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_global_attention_in_several_stretches_of_keys(query, kinds, dtype, tolerance):
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
        got = outputs_and_gradients("native", tensors, grid, terms, query)
        assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), tolerance)


@pytest.mark.parametrize("query", ["own", "all"])
def test_a_later_stretch_of_keys_may_have_any_larger_scores(query):
    """Scores grow along the keys, beyond what exponentials hold."""
    (q, k, v), grid, terms = case(2, 2, 2, (300,), Window(), {"waves", "pose"})
    growing = torch.linspace(0, 3000, 300, dtype=torch.float64)[:, None, None]
    k = (k.detach() * growing).requires_grad_()
    got, expected = (outputs_and_gradients(b, (q, k, v), grid, terms, query) for b in ("native", "reference"))
    assert_same(got, expected, 1e-8)


@pytest.mark.parametrize("query", ["own", "all"])
def test_dropout_is_the_same_in_the_backward_pass_of_global_attention(query):
    (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(), {"waves", "pose"})

    def function(*leaves):
        torch.manual_seed(3)
        q, k, v, pose, frequencies, readout = leaves
        bias = PositionalBias(2, pose=pose, waves=Waves(frequencies, readout))
        return attention(q, k, v, grid, bias, query=query, dropout=0.4, backend="native")

    inputs = (q, k, v, terms.pose, terms.waves.frequencies, terms.waves.readout)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert not torch.allclose(
        function(*inputs), attention(q, k, v, grid, terms, query=query, backend="native"), rtol=1e-3
    )


@pytest.mark.parametrize("query", ["own", "all"])
def test_dropout_is_the_same_in_the_backward_pass_and_in_bands_of_any_size(query):
    (q, k, v), grid, terms = case(2, 2, 2, (5, 4), Window(3), {"spatial", "pose"})

    def function(*leaves):
        torch.manual_seed(3)
        q, k, v, spatial, pose = leaves
        return attention(q, k, v, grid, PositionalBias(2, spatial, pose), query=query, dropout=0.4, backend="native")

    inputs = (q, k, v, terms.spatial, terms.pose)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    whole = function(*inputs)
    with working_memory(1):
        torch.testing.assert_close(function(*inputs), whole)


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds"), [(Window(3), {"spatial", "pose", "shared"}), (Window(), {"waves", "pose", "shared"})]
)
def test_any_number_of_threads_gives_the_same_bits(query, window, kinds):
    arguments = (*case(4, 4, 4, (9, 9), window, kinds, batch=11, heads=3), query)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(outputs_and_gradients("native", *arguments))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_is_one_node_for_compilers():
    (q, k, v), grid, terms = case(2, 2, 2, (4, 5), Window(3), {"spatial", "pose"})

    def function(q, k, v):
        return attention(q, k, v, grid, terms, backend="native")

    compiled_function = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same([compiled_function(q, k, v)], [function(q, k, v)])


def test_holds_a_bounded_chunk_of_an_image():
    """Its threads lay out bands of rows, as many as fit."""
    grid, call = (200, 100), None

    def watched(arguments):
        nonlocal call
        call = arguments
        return native._forward_pass(arguments)

    loop = native.GridLoop("native_watched", watched, native._backward_pass, native._empty_sums)
    tensors, positions, terms = case(4, 4, 4, grid, Window(5), {"spatial"}, heads=1, batch=1, dtype=torch.float32)
    for chunk in (2**14, 2**18):
        loop(GridCall(*tensors, terms, positions, positions), chunk)
        rows, row = native._rows(call, pad=2, reach=2), 102
        held = row * (rows * (2 + 1) * 4 * 3 + rows * 4 + (rows + 4) * 4 * 4 * 3)
        assert rows == 1 or 0.5 * chunk < held <= chunk
        assert rows > 1 or chunk == 2**14


def test_refuses_what_it_cannot_serve(monkeypatch):
    tensors, grid, terms = case(2, 2, 2, (), Window(), {"spatial"})
    with pytest.raises(ValueError, match="'native' cannot serve this call: there is no base space for a table"):
        attention(*tensors, grid, terms, backend="native")
    monkeypatch.setattr(native, "_MOST_KEYS", 49)
    tensors, grid, terms = case(2, 2, 2, (3, 3), Window(), {"spatial"})
    with pytest.raises(ValueError, match="without a window it serves at most 49 offsets and poses"):
        attention(*tensors, grid, terms, backend="native")
    tensors, grid, terms = case(2, 2, 2, (3, 4), Window(3), {"spatial"}, batch=0)
    assert attention(*tensors, grid, terms, query="all").shape == (2, 0, 12, 2, 3)
    assert attention(*tensors, grid, terms, backend="native").shape == (2, 0, 12, 2, 3)


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
        assert (a.double() - e).abs().max() <= 1.2e-6 * e.abs().max()
