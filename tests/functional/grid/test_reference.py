import itertools
import math

import pytest
import torch

from escnn_attention.functional import ON_GRIDS, PositionalBias, attention, probabilities
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.functional.rotate import rotate
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window


def loops(q, k, v, grid, terms, query):
    """The formula, one number at a time, with a Cayley table of nothing: the terms come as they are."""
    heads, batch, n, poses, channels = q.shape
    out = torch.zeros(heads, batch, n, terms.num_poses, channels, dtype=q.dtype)
    rows = grid.rows(*torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")).tolist()
    # Numbers of Python: with tensors each of these additions takes a hundred times as long.
    q, k, v, spatial, pose = (t.tolist() for t in (q, k, v, terms.spatial, terms.pose))
    for b, m, h, x in itertools.product(range(batch), range(heads), range(terms.num_poses), range(n)):
        for own in [h] if query == "own" else range(poses):
            scores, values = [], []
            for y, p in itertools.product(range(n), range(poses)):
                if rows[x][y] < 0:
                    continue
                left, right = q[m][b][x][own], k[m][b][y][p]
                if terms.absolute:
                    left = added(left, spatial[m][h][x], pose[m][h][own])
                    right = added(right, spatial[m][h][y], pose[m][h][p])
                else:
                    right = added(right, spatial[m][h][rows[x][y]], pose[m][h][p])
                scores.append(sum(a * c for a, c in zip(left, right, strict=True)) / math.sqrt(channels))
                values.append(v[m][b][y][p])
            weights = [math.exp(s) for s in scores]
            for c in range(channels):
                total = sum(weight * value[c] for weight, value in zip(weights, values, strict=True))
                out[m, b, x, h, c] += total / sum(weights)
    return out


def added(*vectors):
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
@pytest.mark.parametrize("window", [Window(), Window(3), Window(3, "disc", 2)], ids=["global", "local", "dilated"])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_agrees_with_plain_loops(query, absolute, window, backend):
    torch.manual_seed(0)
    grid = Grid((3, 4), window)
    q, k, v = torch.randn(3, 2, 1, 12, 3, 2, dtype=torch.float64)
    rows = 12 if absolute else len(grid.offsets)
    terms = PositionalBias(
        3,
        torch.randn(2, 3, rows, 2, dtype=torch.float64),
        torch.randn(2, 3, 3, 2, dtype=torch.float64),
        absolute=absolute,
    )
    got = attention(q, k, v, grid, terms, query=query, backend=backend)
    torch.testing.assert_close(got, loops(q, k, v, grid, terms, query), rtol=1e-12, atol=1e-13)


def test_probabilities_of_chosen_queries_are_those_of_all():
    torch.manual_seed(0)
    grid = Grid((4, 4), Window(3))
    q, k = torch.randn(2, 2, 1, 16, 3, 2, dtype=torch.float64)
    terms = PositionalBias(3, torch.randn(1, 3, 9, 2, dtype=torch.float64))
    call = GridCall(q, k, k, terms, grid, grid, query="all")
    everything = probabilities(call)
    chosen = probabilities(call, queries=torch.tensor([5, 0]), poses=torch.tensor([2]))
    torch.testing.assert_close(chosen, everything[:, :, [5, 0]][:, :, :, [2]])
    torch.testing.assert_close(everything.sum((-2, -1)), torch.ones(2, 1, 16, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("query", ["own", "all"])
def test_queries_whose_keys_are_all_hidden(query):
    """A mask of everything, and one that leaves some windows empty: finite gradients, those of other backends."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 25, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    measure = torch.zeros(2, 1, 25, dtype=torch.float64)
    measure[0], measure[1, :, 5:] = -torch.inf, -torch.inf
    bias = PositionalBias(num_poses=4, log_measure=measure.requires_grad_())
    found = []
    for backend in ("reference", "blocked"):
        y = attention(q, k, v, Grid((5, 5), Window(3)), bias, query=query, backend=backend)
        shown = torch.cat([y[:, 0] * 0, y[:, 1]]).square().sum()  # as layers leave out what a mask hides
        found.append((y.detach(), *torch.autograd.grad(shown, (q, k, v, measure))))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


GRIDS = [
    (Grid((5, 4), Window(3)), Grid((3, 2), Window(), spacing=2)),
    (Grid((2, 3), Window(5, "disc"), spacing=2), Grid((5, 4), Window())),
    (Grid((4,), Window()), Grid((3,), Window())),
]


def centred(grid):
    """The positions ``(N, d)`` in space, in units that two grids share."""
    places = torch.tensor(list(itertools.product(*map(range, grid.shape))), dtype=torch.float64)
    places = grid.spacing * (places - (torch.tensor(grid.shape) - 1) / 2)
    return places.flip(1) * torch.tensor([1.0, -1.0, -1.0])[: len(grid.shape)]


def seen(window, offset, step):
    """Whether an offset in space is in a window of steps."""
    if window.kernel_size is None:
        return True
    if window.shape == "disc" and (offset / step).square().sum() > window.kernel_size**2 // 4:
        return False
    return bool(((offset / step).abs() < window.kernel_size / 2).all())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("kind", ["spatial", "rotary", "absolute"])
@pytest.mark.parametrize("query", ["own", "all"])
def test_attention_from_one_grid_to_another_is_a_loop_over_pairs(queries, keys, kind, query):
    torch.manual_seed(0)
    dim, poses, channels = len(queries.shape), 2, 4
    q, k, v = (
        torch.randn(1, 1, n, poses, channels, dtype=torch.float64)
        for n in (queries.num_positions, keys.num_positions, keys.num_positions)
    )
    function = torch.randn(poses, dim, channels, dtype=torch.float64)  # of a position or an offset, from every pose
    rotary = torch.randn(1, poses, 2, dim, dtype=torch.float64)
    pose = torch.randn(1, poses, poses, channels, dtype=torch.float64)
    asking, asked = centred(queries), centred(keys)
    pair = GridPair(queries, keys)
    unit = (asked - asking[:, None]).abs().max().item()
    if queries.window.kernel_size is not None:
        unit = keys.spacing * (queries.window.kernel_size // 2)
    terms = {
        "spatial": PositionalBias(poses, spatial=(pair.offsets @ function).unsqueeze(0), pose=pose),
        "rotary": PositionalBias(poses, rotary=rotary, pose=pose),
        "absolute": PositionalBias(
            poses,
            spatial=(asked @ function).unsqueeze(0),
            query_spatial=(asking @ function).unsqueeze(0),
            pose=pose,
            absolute=True,
        ),
    }[kind]
    call = GridCall(q, k, v, terms, queries, keys, query=query)
    assert not call.one_set
    expected = torch.zeros(1, 1, len(asking), poses, channels, dtype=torch.float64)
    for x, h in itertools.product(range(len(asking)), range(poses)):
        for other in [h] if query == "own" else range(poses):
            scores, values = [], []
            for y, p in itertools.product(range(len(asked)), range(poses)):
                offset = asked[y] - asking[x]
                if not seen(queries.window, offset, keys.spacing):
                    continue
                a, b = q[0, 0, x, other], k[0, 0, y, p] + pose[0, h, p]
                if kind == "spatial":
                    b = b + (offset / unit) @ function[h]
                elif kind == "rotary":
                    b = rotate(b, rotary[0, h] @ (offset / unit))
                else:
                    a, b = a + asking[x] @ function[h] + pose[0, h, other], b + asked[y] @ function[h]
                scores.append(a @ b / 2)
                values.append(v[0, 0, y, p])
            if scores:
                expected[0, 0, x, h] += torch.stack(scores).softmax(0) @ torch.stack(values)
    fused = queries.window.kernel_size is None and kind != "spatial"
    for backend in ("reference", "blocked", "auto", *(["dense"] if fused else [])):
        torch.testing.assert_close(ON_GRIDS.compute(call, backend), expected, rtol=1e-12, atol=1e-12)
    if not fused:
        with pytest.raises(ValueError, match=r"'dense' .*(windows of keys|factorises)"):
            ON_GRIDS.compute(call, "dense")


@pytest.mark.parametrize("window", [Window(), Window(3), Window(5, "disc")])
def test_two_grids_that_are_the_same_have_the_offsets_of_one(window):
    one, index = Grid((4, 5), window), torch.arange(20)
    pair = GridPair(one, Grid((4, 5), Window()))
    rows, own = pair.rows(index[:, None], index), one.rows(index[:, None], index)
    assert torch.equal(rows < 0, own < 0)
    torch.testing.assert_close(pair.offsets[rows[rows >= 0]], one.offsets[own[own >= 0]])


def test_grids_that_do_not_fit():
    with pytest.raises(ValueError, match=r"key_grid: got shape \(3,\), needed 2 axes"):
        GridPair(Grid((3, 3), Window()), Grid((3,), Window()))
    with pytest.raises(ValueError, match="dilation: got 2"):
        GridPair(Grid((3,), Window(3, "square", 2)), Grid((3,), Window()))
