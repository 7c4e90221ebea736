import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import BACKENDS, ON_GRIDS, attention, working_memory
from escnn_attention.functional.grid import dense, native, portable
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, call_of, case, leaves, outcome, outputs_and_gradients

LOOPS = ["blocked", *(["native"] if native.why_not_built(torch.float64) is None else [])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", LOOPS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        (Window(3), {"spatial", "pose"}),
        (Window(3), {"spatial", "pose", "absolute"}),
        (Window(), {"spatial", "pose"}),
        (Window(), {"waves", "pose"}),
        (Window(), {"waves"}),
        (Window(), {"pose"}),
        (Window(), set()),
    ],
)
@pytest.mark.slow
def test_first_and_second_derivatives(monkeypatch, backend, query, window, kinds):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 20)
    tensors, grid, terms = case(2, 2, 2, (2, 2), window, kinds, heads=1, channels=1, batch=1)

    def function(q, k, v, *_):
        return attention(q, k, v, grid, terms, query=query, backend=backend)

    inputs = tuple(leaves(tensors, terms))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("bound", ["of the backend", "of memory"])
def test_holds_a_bounded_chunk_of_the_scores(monkeypatch, bound):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 3000 if bound == "of the backend" else 2**22)
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
        with working_memory(8 * 4 * 3000 if bound == "of memory" else None):
            attention(*tensors, grid, terms, query="own", backend="blocked").sum().backward()
    assert 0 < largest <= 3000


@pytest.mark.parametrize(
    ("backend", "window", "kinds"),
    [("blocked", Window(3), {"spatial", "pose"}), ("dense", Window(), {"waves", "pose"})],
)
def test_dropout_is_the_same_in_the_backward_pass(backend, window, kinds, monkeypatch):
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 200)
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", 1)
    (q, k, v), grid, terms = case(2, 2, 2, (4, 4), window, kinds)

    def function(v, dropout=0.4):
        torch.manual_seed(3)
        return BACKENDS[backend].attention(GridCall(q, k, v, terms, grid, grid, query="all", dropout=dropout))

    # The output is linear in the values with the probabilities that are left: a second draw would break this.
    (gradient,) = torch.autograd.grad(function(v).sum(), v)
    direction = torch.randn_like(v)
    step = function(v + direction).sum() - function(v).sum()
    torch.testing.assert_close((gradient * direction).sum(), step)
    assert not torch.equal(function(v), function(v, 0.0))


@pytest.mark.parametrize("backend", ["reference", *LOOPS])
@pytest.mark.parametrize(("window", "kinds"), [(Window(3), {"spatial"}), (Window(), {"waves"}), (Window(), set())])
@pytest.mark.slow
def test_dropout_drops_probabilities_and_keeps_the_mean(backend, window, kinds):
    tensors, grid, terms = case(1, 1, 1, (2, 2), window, kinds, heads=1, batch=1)
    plain = attention(*tensors, grid, terms, backend="reference")
    draws = torch.stack([attention(*tensors, grid, terms, dropout=0.5, backend=backend).detach() for _ in range(800)])
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


@st.composite
def pairs(draw):
    """Two grids that share their centre, and the terms of attention from one to the other."""
    dim = draw(st.integers(1, 3))
    sides = st.lists(st.integers(1, 4 if dim > 1 else 9), min_size=dim, max_size=dim)
    spacings = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (0, 1), (5, 9)]))
    kernel = draw(st.sampled_from([None, None, 3, 5])) if spacings[0] else None
    window = Window(kernel, draw(st.sampled_from(["square", "disc"]))) if kernel else Window()
    sizes = [tuple(draw(sides)) for _ in range(2)]
    if kernel:  # queries beyond the keys might see none
        covered = zip(*sizes, strict=True)
        sizes[1] = tuple(max(m, -(-n * spacings[0] // spacings[1])) for n, m in covered)
    return *(Grid(size, window, spacing=s) for size, s in zip(sizes, spacings, strict=True)), draw(st.integers(0, 99))


@given(pairs(), st.sampled_from(["spatial", "waves", "rotary", "absolute", "none"]), st.data())
@pytest.mark.slow
def test_two_sets_as_the_reference(grids, kind, data):
    *grids, seed = grids
    poses, key_poses = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    query = data.draw(st.sampled_from(["own", "all"]))
    keys = data.draw(st.sampled_from(["all", "own"])) if key_poses == poses else "all"
    kinds = {kind, "spatial"} if kind == "absolute" else {kind}
    call = call_of(*grids, (poses, key_poses, poses), kinds, channels=4, seed=seed, query=query, keys=keys)
    if data.draw(st.booleans()):  # each image with a measure of its own
        measure = call.v.detach()[0, :, :, 0, 0].unsqueeze(1).requires_grad_()
        call = replace(call, bias=replace(call.bias, log_measure=measure))
    scores, found = data.draw(st.sampled_from([1, 50, 2**19])), {}
    for backend in ("reference", "blocked", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portable, "SCORES_PER_IMAGE", scores)
            patch.setattr(native, "NUMBERS_PER_CHUNK", scores)
            found[backend] = outcome(call, backend)
        with torch.no_grad():  # by the fused kernel
            torch.testing.assert_close(ON_GRIDS.compute(call, backend), found[backend][0])
    assert_same(found["blocked"], found["reference"])
    assert_same(found["auto"], found["reference"])


def test_two_sets_hold_no_scores_of_all_pairs():
    """Of windows the largest tensor grows with the positions, not with their square."""
    sizes = []
    for n in (8, 16):
        window = Window(3)
        blocks = GridPair(Grid((2 * n, 2 * n), window), Grid((n, n), Window(), spacing=2)).blocks(1)
        sizes.append(blocks.queries.numel() * blocks.keys.shape[1])
        assert len(blocks.rows(0, 3)) == 1
    assert sizes[1] == 4 * sizes[0]
