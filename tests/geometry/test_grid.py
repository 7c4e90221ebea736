import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.geometry.grid import Grid, kept_grid, trimmed
from escnn_attention.geometry.windows import Window, shape_of

windows = st.builds(
    Window,
    st.sampled_from([None, 1, 3, 5, 7, 9]),
    st.sampled_from(["square", "disc"]),
    st.integers(1, 3),
).map(lambda w: Window() if w.kernel_size is None else w)
windows |= st.builds(Window.ball, st.floats(0.1, 4.9))
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


def causal(window: Window) -> Window:
    return Window(window.kernel_size, shape_of(window.shape, causal=True), window.dilation)


grids = st.tuples(shapes, windows) | st.tuples(shapes.filter(len), windows.map(causal))
grids |= st.tuples(
    st.tuples(st.integers(1, 9)), st.builds(Window, st.integers(1, 9), st.just("causal square"), st.integers(1, 3))
)


@st.composite
def some_tori(draw):
    """The shape of a grid, and a window that fits around it where both its ends meet."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    kernel, dilation = draw(st.sampled_from([None, 1, 3, 5])), draw(st.integers(1, 2))
    kernel = None if kernel is not None and dilation * (kernel - 1) >= min(shape) else kernel
    form = draw(st.sampled_from(["square", "disc"])) if kernel else "square"
    return shape, Window(kernel, shape_of(form, causal=draw(st.booleans()), circular=True), dilation if kernel else 1)


tori = some_tori()


def sees(window: Window, query: tuple[int, ...], key: tuple[int, ...]) -> bool:
    """Whether a key is in the window of a query, from the definition."""
    if window.causal and key[0] > query[0]:
        return False
    if window.kernel_size is None:
        return True
    steps = [(b - a) / window.dilation for a, b in zip(query, key, strict=True)]
    if window.causal:
        back = -steps.pop(0)
        if back != int(back) or back >= window.kernel_size:
            return False
    if any(s != int(s) or abs(s) > window.kernel_size // 2 for s in steps):
        return False
    longest = {"square": math.inf, "disc": (window.kernel_size / 2) ** 2}.get(window.form)
    return sum(s * s for s in steps) <= (int(window.form.removeprefix("disc ")) if longest is None else longest)


def offset(window: Window, shape: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...]) -> list[float]:
    """x' - x in units of the reach: x along the last axis, the others against their axes."""
    if window.kernel_size is None:
        reach = max([n - 1 for n in shape], default=0) or 1
    else:
        reach = (window.kernel_size - 1 if window.causal else window.kernel_size // 2) or 1
        reach *= window.dilation
    steps = [(b - a) / reach for a, b in zip(query, key, strict=True)][::-1]
    return [s if i == 0 else -s for i, s in enumerate(steps)]


@given(grids)
def test_rows_lead_to_the_offset_of_every_pair(arguments):
    shape, window = arguments
    grid = Grid(shape, window)
    index = list(itertools.product(*map(range, shape)))
    everything = torch.arange(len(index))
    rows = grid.rows(everything[:, None], everything)
    assert grid.num_positions == len(index)
    for i, j in itertools.product(range(0, len(index), 3), range(len(index))):
        if sees(window, index[i], index[j]):
            expected = torch.tensor(offset(window, shape, index[i], index[j]), dtype=torch.float64)
            torch.testing.assert_close(grid.offsets[rows[i, j]], expected)
        else:
            assert rows[i, j] == -1


@given(grids)
def test_a_trimmed_window_is_the_same_and_stays_on_the_grid(arguments):
    shape, window = arguments
    grid = Grid(shape, window)
    smaller, rows = trimmed(shape, window)
    other = Grid(shape, smaller)
    everything = torch.arange(grid.num_positions)
    expected, found = (g.rows(everything[:, None], everything) for g in (grid, other))
    if rows is not None:
        found = torch.where(found < 0, -1, rows[found.clamp(min=0)])
        assert smaller.dilation * (smaller.kernel_size // 2) < max((1, *shape))
        assert smaller.kernel_size < window.kernel_size
    assert torch.equal(found, expected)


def test_windows_are_trimmed():
    assert trimmed((9, 9), Window(5, "square", 256))[0] == Window(1, "square", 1)
    assert trimmed((4, 3), Window(9, "square"))[0] == Window(7, "square")
    assert trimmed((4, 4), Window(11, "disc"))[0] == Window(7, "square")  # its edge lies off the grid
    assert trimmed((4, 4), Window.ball(4.25))[0] == Window(7, "square")
    for window in (Window(11, "disc"), Window(), Window(9), Window.ball(5.6)):
        assert trimmed((5, 5), window) == (window, None)


def shortest(window: Window, shape: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...]):
    """All shortest offsets on a torus, in steps along the axes."""
    ways = []
    for axis, (n, a, b) in enumerate(zip(shape, query, key, strict=True)):
        around = [b - a] if axis == 0 and window.causal else [b - a - n, b - a, b - a + n]
        ways.append([s for s in around if abs(s) == min(map(abs, around))])
    return list(itertools.product(*ways))


@given(tori)
@pytest.mark.slow
def test_a_torus_has_the_mean_over_the_shortest_offsets(arguments):
    shape, window = arguments
    grid, index = Grid(shape, window), list(itertools.product(*map(range, shape)))
    everything = torch.arange(len(index))
    rows = grid.rows(everything[:, None], everything)

    def function(offsets):
        return torch.cat([offsets.prod(-1, keepdim=True), (2 * offsets).exp(), (offsets - 0.3).abs()], dim=-1)

    table = grid.averaged(function(grid.offsets))
    assert int(rows.max()) < len(table)
    flat = Window(window.kernel_size, shape_of(window.form, causal=window.causal), window.dilation)
    # In a window the unit is its reach, and else the longest offset.
    longest = max(n - 1 if window.causal and axis == 0 else n // 2 for axis, n in enumerate(shape)) or 1
    unit = 1.0 if window.kernel_size else longest / (max(shape) - 1 or 1)
    for i, j in itertools.product(range(0, len(index), 3), range(len(index))):
        ways = shortest(window, shape, index[i], index[j])
        origin = (0,) * len(shape)
        if sees(flat, origin, ways[0]):
            found = torch.tensor([offset(flat, shape, origin, way) for way in ways], dtype=torch.float64) / unit
            torch.testing.assert_close(table[rows[i, j]], function(found).mean(0))
        else:
            assert rows[i, j] == -1


@given(tori)
def test_a_roll_changes_nothing_on_a_torus(arguments):
    shape, window = arguments
    grid = Grid(shape, window)
    everything = torch.arange(grid.num_positions).view(shape)
    for axis, n in enumerate(shape):
        for by in range(1, n):
            moved = everything.roll(by, axis).flatten()
            before, after = (grid.rows(p[:, None], p) for p in (everything.flatten(), moved))
            assert torch.equal(before, after) or (window.causal and axis == 0)


def test_a_window_fits_around_its_torus():
    for window, width in ((Window(5, "circular square"), 5), (Window(3, "circular disc", 2), 5)):
        with pytest.raises(ValueError, match=rf"kernel_size: {window.kernel_size}.*at most 4"):
            Grid((width, 4), window)
        Grid((width, 5), window)
    assert Grid((2, 5), Window(5, "causal circular square")).offsets.shape == (25, 2)


@given(grids | tori, st.integers(1, 50))
def test_blocks_hold_every_query_once_and_all_that_it_sees(arguments, max_queries):
    shape, window = arguments
    grid = Grid(shape, window)
    blocks = grid.blocks(max_queries)
    real = blocks.queries[blocks.queries >= 0]
    assert sorted(real.tolist()) == list(range(grid.num_positions))
    assert torch.equal(blocks.queries.flatten()[blocks.place], torch.arange(grid.num_positions))
    if window.kernel_size is None:
        assert blocks.queries.shape[1] <= max_queries
    rows = blocks.rows(0, len(blocks.queries)).expand(len(blocks.queries), -1, -1)
    keys = blocks.keys.expand(len(blocks.queries), -1)
    everything = torch.arange(grid.num_positions)
    for t, queries in enumerate(blocks.queries.tolist()):
        for i, query in enumerate(queries):
            if query < 0:
                continue
            seen = {k: r for k, r in zip(keys[t].tolist(), rows[t, i].tolist(), strict=True) if k >= 0 and r >= 0}
            expected = grid.rows(torch.tensor(query), everything).tolist()
            assert seen == {k: r for k, r in enumerate(expected) if r >= 0}


@given(shapes, windows)
def test_coordinates_are_centred_and_follow_the_offsets(shape, window):
    grid = Grid(shape, Window())
    torch.testing.assert_close(grid.coordinates.sum(0), torch.zeros(len(shape), dtype=torch.float64))
    assert grid.coordinates.abs().max() <= 1 if shape else grid.coordinates.shape == (1, 0)
    rows = grid.rows(torch.tensor(0), torch.arange(grid.num_positions))
    # Half the extent is the unit of coordinates, all of it that of global offsets.
    torch.testing.assert_close(grid.offsets[rows] * 2, grid.coordinates - grid.coordinates[0])


def test_a_frame_turns_offsets_and_coordinates():
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    plain, turned = Grid((4, 5), Window(3)), Grid((4, 5), Window(3), frame=turn)
    torch.testing.assert_close(turned.offsets, plain.offsets @ turn.T)
    torch.testing.assert_close(turned.coordinates, plain.coordinates @ turn.T)
    everything = torch.arange(20)
    assert torch.equal(turned.rows(everything[:, None], everything), plain.rows(everything[:, None], everything))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_rounded_once(dtype):
    exact, rounded = Grid((6, 7), Window(5)), Grid((6, 7), Window(5), dtype=dtype)
    assert rounded.offsets.dtype == rounded.coordinates.dtype == dtype
    assert torch.equal(rounded.coordinates, exact.coordinates.to(dtype))


def test_a_grid_has_positions():
    for shape, name in (((0,), "0"), ((3, 0), "3×0")):
        with pytest.raises(ValueError, match=f"^input: .*{name} .*at least one"):
            Grid(shape, Window(3))
    assert Grid((), Window()).num_positions == 1


def test_small_grids_are_made_once():
    def grid(*shape):
        return kept_grid(torch.Size(shape), Window(3), torch.float32, torch.device("cpu"))

    assert grid(5, 4) is grid(5, 4)
    assert grid(5, 4) is not grid(4, 5)
    assert grid(2**17) is not grid(2**17)
    for n in range(1, 80):
        grid(n)
    assert grid(5, 4).shape == (5, 4)
