import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import BACKENDS, Backend, Terms, attention
from escnn_attention.functional.backends import flex
from escnn_attention.geometry.grid import Grid, Window
from tests.functional.cases import assert_same, case, cases, doubled, outputs_and_gradients, refusal
from tests.functional.cuda import needs_cuda, on_cuda

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def written_out(q, k, v, *, score_mod, block_mask, scale, enable_gqa, kernel_options):
    """What the kernel computes, with gradients, and with the blocks that it skips."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    score = scale * q @ k.transpose(-1, -2)
    b, h, i, j = (
        torch.arange(n).view([-1 if axis == other else 1 for other in range(4)]) for axis, n in enumerate(score.shape)
    )
    if score_mod is not None:
        score = score_mod(score, b, h, i, j)
    if block_mask is not None:
        seen = block_mask.mask_mod(b, h, i, j)
        blocks = block_mask.to_dense().bool()[:, :, i // block_mask.BLOCK_SIZE[0], j // block_mask.BLOCK_SIZE[1]]
        assert not (seen & ~blocks[:, :, 0, 0]).any()
        score = score.masked_fill(~seen, -torch.inf)
    return score.softmax(-1) @ v


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    flex._cached_tables.cache_clear()
    yield
    flex._cached_tables.cache_clear()


@given(cases(), st.sampled_from([0, 128]))
def test_agrees_with_the_reference(arguments, narrow):
    *arguments, query, keys = arguments
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex, "NARROW", narrow)
        assert refusal("flex", *arguments, query, keys) is None
        tensors, grid, terms = arguments
        got, expected = (
            attention(*tensors, grid, terms, query=query, keys=keys, backend=b) for b in ("flex", "reference")
        )
    assert_same([got], [expected])


@given(cases(), st.sampled_from([0, 128]), st.sampled_from([1, 2, 8, 128]))
def test_score_and_mask_have_the_gradients_of_the_reference(arguments, narrow, block):
    flex._cached_tables.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "NARROW", narrow)
        patch.setattr(flex, "_BLOCK", block)
        patch.setattr(flex, "_kernel", lambda device: written_out)
        patch.setitem(BACKENDS, "written out", Backend(flex.attention))
        got = outputs_and_gradients("written out", *arguments)
    assert_same(got, outputs_and_gradients("reference", *arguments))


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(("window", "narrow"), [(Window(3), 128), (Window(3), 0), (Window(), 128)])
def test_flex_attention_differentiates_the_score(monkeypatch, query, window, narrow):
    # On CPU it has a backward pass, written out and for tests, but refuses to run it.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "NARROW", narrow)
    monkeypatch.setitem(BACKENDS, "flex", Backend(flex.attention))
    arguments = *case(2, 2, 2, (4, 3), window, {"spatial", "pose"}), query
    assert_same(outputs_and_gradients("flex", *arguments), outputs_and_gradients("reference", *arguments))


def blocks_seen(shape, window, query_poses, key_poses):
    """The share of the blocks that are not skipped."""
    layout = flex._Layout.of(Grid(shape, window), query_poses, key_poses, torch.device("cpu"))
    number, which = layout.blocks[:2]
    return int(number.sum()) / which.numel()


def test_lists_of_blocks_are_those_of_pytorch():
    layout = flex._Layout.of(Grid((30, 20), Window(5)), 1, 4, torch.device("cpu"))
    mask = layout.block_mask()
    assert mask.shape == (1, 1, 600, 2400)
    expected = type(mask).from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, seq_lengths=mask.seq_lengths)
    for name in ("q_num_blocks", "q_indices"):
        got = getattr(mask, name)
        assert torch.equal(got, getattr(expected, name))
        assert got.dtype == torch.int32
    assert all(t.is_contiguous() for t in layout.blocks)


def test_skips_blocks():
    assert blocks_seen((96, 96), Window(5), 1, 4) < 0.06
    assert blocks_seen((96, 96), Window(9), 4, 4) < 0.04
    assert blocks_seen((24, 24), Window(5), 4, 4) < 0.3
    assert blocks_seen((96, 96), Window(5, dilation=4), 4, 4) < 0.04
    assert blocks_seen((16, 16, 16), Window(3), 1, 24) < 0.11


def test_poses_that_fill_several_blocks(monkeypatch):
    monkeypatch.setattr(flex, "_BLOCK", 4)
    monkeypatch.setattr(flex, "_kernel", lambda device: written_out)
    arguments = *case(11, 11, 11, (5,), Window(3), {"spatial"}, heads=1, batch=1), "all"
    with torch.no_grad():
        tensors, grid, terms, query = arguments
        got, expected = (attention(*tensors, grid, terms, query=query, backend=b) for b in ("flex", "reference"))
    assert_same([got], [expected])


@pytest.mark.parametrize(("window", "narrow"), [(Window(3), 128), (Window(3), 0), (Window(), 128)])
def test_compiles_in_one_graph(monkeypatch, window, narrow):
    monkeypatch.setattr(flex, "NARROW", narrow)
    tensors, grid, terms = case(2, 2, 2, (4, 3), window, {"spatial", "pose"})

    def function(q, k, v):
        return attention(q, k, v, grid, terms, query="all", backend="flex")

    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors), function(*tensors))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_refuses_gradients_on_cpu(missing):
    (q, k, v), grid, terms = case(2, 2, 2, (4,), Window(3), {"spatial"})
    (q, k, v), terms = (t.detach() for t in (q, k, v)), [terms, Terms(2), Terms(2)][missing]
    if missing == 2:
        assert attention(q, k, v, grid, terms, backend="flex").shape == q.shape
    else:
        q = q.requires_grad_() if missing else q
        with pytest.raises(
            ValueError, match="'flex' cannot serve this call: FlexAttention has no backward pass on CPU"
        ):
            attention(q, k, v, grid, terms, backend="flex")


def test_refuses(monkeypatch):
    q = torch.empty(1, 1, 1, 4, 2)
    grid, terms = Grid((4,), Window(3)), Terms(1)
    assert flex.refuses(q, grid, terms, "own", 0.1) == "it has no dropout"
    assert flex.refuses(q, object(), terms, "own", 0.0) == "it needs positions on a grid, got object"
    assert flex.refuses(q.to("meta"), grid, terms, "own", 0.0) == "it needs CUDA, got meta"
    monkeypatch.setattr(flex, "MAX_PRODUCTS", 20)
    table = Terms(1, torch.empty(1, 1, 7, 2))
    assert flex.refuses(q, grid, table, "own", 0.0) is None
    reason = "it would hold 28 products of queries with the table of offsets, at most 20"
    assert flex.refuses(q, Grid((4,), Window()), table, "own", 0.0) == reason


CALLS = [
    ((12, 9), Window(5), {"spatial", "pose"}),  # the window as channels
    ((12, 9), Window(5, "disc", 2), {"waves", "pose"}),
    ((12, 9), Window(5), {"rotary"}),
    ((12, 9), Window(5), set()),
    ((9, 8), Window(), {"spatial", "pose"}),  # the products with a table
    ((24, 24), Window(13), {"spatial"}),
    ((5, 5, 5), Window(3), {"spatial", "pose"}),
    ((3, 2), Window(3), {"spatial"}),  # few tokens
]


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(("shape", "window", "terms"), CALLS)
def test_on_cuda(monkeypatch, dtype, tolerance, query, shape, window, terms):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("flex"))
    tensors, grid, terms = case(4, 4, 4, shape, window, terms, channels=10, dtype=dtype)
    exact, exact_terms = doubled(tensors, terms)
    got = outputs_and_gradients("there", tensors, grid, terms, query)
    assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), tolerance)


@needs_cuda
def test_lifting_on_cuda(monkeypatch):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("flex"))
    arguments = *case(4, 1, 1, (12, 9), Window(5), {"spatial"}, channels=10, dtype=torch.float32), "all"
    tensors, grid, terms, query = arguments
    exact, exact_terms = doubled(tensors, terms)
    got = outputs_and_gradients("there", *arguments)
    assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), 1e-5)


@needs_cuda
def test_a_key_that_is_not_finite_reaches_those_who_see_it_and_no_others_on_cuda(monkeypatch):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("flex"))
    (q, k, v), grid, terms = case(2, 2, 2, (6, 6), Window(3), {"spatial"}, dtype=torch.float32)
    clean = attention(q, k, v, grid, terms, query="all", backend="there")
    k = k.detach().clone()
    k[0, 1, 1, 14, 0] = torch.nan
    out = attention(q, k, v, grid, terms, query="all", backend="there")
    reached = grid.rows(torch.arange(36), torch.tensor(14)) >= 0
    assert out[0, 1][:, reached].isnan().all()
    assert torch.equal(out[0, 1][:, ~reached], clean[0, 1][:, ~reached])


@needs_cuda
def test_many_sizes_on_cuda_are_all_compiled(monkeypatch):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("flex"))
    # More than PyTorch compiles by default. What is not compiled warns.
    for n in range(8, 20):
        arguments = *case(2, 2, 2, (n, n), Window(3), {"spatial"}, dtype=torch.float32), "own"
        tensors, grid, terms, query = arguments
        exact, exact_terms = doubled(tensors, terms)
        got = outputs_and_gradients("there", *arguments)
        assert_same(got, outputs_and_gradients("reference", exact, grid, exact_terms, query), 1e-5)


@needs_cuda
def test_on_cuda_it_refuses_double_precision():
    q = torch.empty(1, 1, 1, 4, 2, device="cuda", dtype=torch.float64)
    assert flex.refuses(q, Grid((4,), Window(3), device="cuda"), Terms(1), "own", 0.0) == "on CUDA it has no float64"
