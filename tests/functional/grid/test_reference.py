import itertools

import pytest
import torch

from escnn_attention.functional import ON_GRIDS, PositionalBias, attention, probabilities
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.geometry.windows import Window


def test_probabilities_of_chosen_queries_are_those_of_all():
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


ONE = [Grid((3, 4), window) for window in (Window(), Window(3), Window(3, "disc", 2))]
GRIDS = [
    *zip(ONE, ONE, strict=True),
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
    if window.dilation > 1 and (offset % step).any():
        return False
    if window.shape == "disc" and (offset / step).square().sum() > window.kernel_size**2 // 4:
        return False
    return bool(((offset / step).abs() < window.kernel_size / 2).all())


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("queries", "keys"), GRIDS)
@pytest.mark.parametrize("kind", ["spatial", "rotary", "absolute"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("seen_poses", ["all", "own"])
def test_attention_is_a_loop_over_pairs(queries, keys, kind, query, seen_poses):
    heads, dim, poses, channels = 2, len(queries.shape), 2, 4
    numbers = [queries.num_positions, keys.num_positions]
    q, k, v = (torch.randn(heads, 1, n, poses, channels, dtype=torch.float64) for n in (*numbers, numbers[1]))
    function = torch.randn(heads, poses, dim, channels, dtype=torch.float64)  # of a position or an offset
    rotary = torch.randn(heads, poses, 1, dim, dtype=torch.float64)  # channels are left
    pose = torch.randn(heads, poses, poses, channels, dtype=torch.float64)
    asking, asked = centred(queries), centred(keys)
    unit, step = (asked - asking[:, None]).abs().max().item(), keys.spacing * queries.window.dilation
    if queries.window.kernel_size is not None:
        unit = step * (queries.window.kernel_size // 2)
    terms = {
        "spatial": {"spatial": GridCall(q, k, v, PositionalBias(poses), queries, keys).offsets.offsets @ function},
        "rotary": {"rotary": rotary},
        "absolute": {"spatial": asked @ function, "query_spatial": asking @ function, "absolute": True},
    }[kind]
    call = GridCall(q, k, v, PositionalBias(poses, pose=pose, **terms), queries, keys, query=query, keys=seen_poses)
    expected = torch.zeros(heads, 1, len(asking), poses, channels, dtype=torch.float64)
    for m, x, h in itertools.product(range(heads), range(len(asking)), range(poses)):
        for other in [h] if query == "own" else range(poses):
            scores, values = [], []
            for y, p in itertools.product(range(len(asked)), [other] if seen_poses == "own" else range(poses)):
                offset = asked[y] - asking[x]
                if not seen(queries.window, offset, step):
                    continue
                a, b = q[m, 0, x, other], k[m, 0, y, p] + pose[m, h, p]
                if kind == "spatial":
                    b = b + (offset / unit) @ function[m, h]
                elif kind == "rotary":
                    turn = torch.polar(torch.ones(1, dtype=torch.float64), rotary[m, h] @ (offset / unit))
                    b = torch.cat([torch.view_as_real(torch.complex(b[:1], b[1:2]) * turn).flatten(), b[2:]])
                else:
                    a, b = a + asking[x] @ function[m, h] + pose[m, h, other], b + asked[y] @ function[m, h]
                scores.append(a @ b / 2)
                values.append(v[m, 0, y, p])
            if scores:
                expected[m, 0, x, h] += torch.stack(scores).softmax(0) @ torch.stack(values)
    fused = kind != "spatial" if queries.window.kernel_size is None else keys is queries
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
