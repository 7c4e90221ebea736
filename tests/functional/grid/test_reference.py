import itertools
import math

import pytest
import torch

from escnn_attention.functional import PositionalBias, attention, probabilities
from escnn_attention.functional.grid.call import Call
from escnn_attention.geometry.grid import Grid
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
    call = Call(q, k, k, grid, terms, "all")
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
