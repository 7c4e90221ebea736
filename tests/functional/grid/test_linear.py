"""Attention without a softmax, at linear cost."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.grid import linear
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import call_of, outcome

TERMS = {
    "nothing": (),
    "waves": ("waves", "pose", "shared"),
    "rotary": ("rotary", "pose"),
    "absolute": ("absolute", "spatial", "pose"),
    "measure": ("waves", "measure", "pose"),
    "rotary, measure": ("rotary", "measure", "shared"),
}


def call_by(terms, query="own", keys="all", shape=(3, 4), channels=4):
    grid = Grid(shape, Window())
    return call_of(grid, grid, (3, 3, 3), terms, channels=channels, query=query, keys=keys, normalization="count")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rotates_values", [False, True])
@pytest.mark.parametrize("keys", ["all", "own"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("terms", TERMS)
def test_it_is_the_formula(terms, query, keys, rotates_values):
    call = call_by(TERMS[terms], query, keys)
    call = replace(call, bias=replace(call.bias, rotates_values=rotates_values))
    got, expected = outcome(call, "auto"), outcome(call, "reference")
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    softmax = ON_GRIDS.compute(replace(call, normalization="softmax"))
    assert (softmax - got[0]).abs().max() > 1e-3


def test_the_formula_written_out():
    call = call_by(("waves", "pose", "measure"))
    q, k, v = call.q, call.k, call.v
    table, rows = call.bias.waves.table(call.query_grid.offsets), torch.arange(12)
    rho = table[:, :, call.query_grid.rows(rows[:, None], rows)][:, :, :, :, None] + call.bias.pose[:, :, None, None]
    scores = torch.einsum("mbnhc,mbnhkpc->mbnhkp", q, k[:, :, None, None] + rho.transpose(1, 2)[:, None])
    mu = call.bias.log_measure.exp().T
    expected = torch.einsum("mbnhkp,kp,mbkpc->mbnhc", scores, mu / mu.sum(), v) / math.sqrt(4)
    for backend in ("linear", "reference"):
        torch.testing.assert_close(ON_GRIDS.compute(call, backend), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("terms", ["waves", "rotary"])
def test_operations_are_proportional_to_the_positions(terms):
    def operations(backend, side):
        with FlopCounterMode(display=False) as counter:
            ON_GRIDS.compute(call_by(TERMS[terms], shape=(side, side)), backend)
        return counter.get_total_flops()

    assert operations("linear", 12) <= 4 * operations("linear", 6)
    assert operations("reference", 12) > 12 * operations("reference", 6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalization": "softmax"}, "count"),
        ({"dropout": 0.1}, "drop"),
        ({"query_grid": Grid((3, 4), Window(3))}, "global"),
    ],
)
def test_what_it_does_not_serve(changes, reason):
    call = call_by(())
    assert reason in linear.why_unsupported(replace(call, **changes))
    assert "factorises" in linear.why_unsupported(call_by(("spatial",)))
    with pytest.raises(ValueError, match=r"backend: 'blocked' .* softmax"):
        ON_GRIDS.compute(call, "blocked")
