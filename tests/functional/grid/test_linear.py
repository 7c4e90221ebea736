"""Attention without a softmax, at linear cost."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from escnn_attention.functional import ON_GRIDS, GridCall
from escnn_attention.functional.grid import linear
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import case, leaves

TERMS = {
    "nothing": (),
    "waves": ("waves", "pose", "shared"),
    "rotary": ("rotary", "pose"),
    "absolute": ("absolute", "spatial", "pose"),
    "measure": ("waves", "measure", "pose"),
    "rotary, measure": ("rotary", "measure", "shared"),
}


def calls(terms, query="own", keys="all", shape=(3, 4), channels=4):
    tensors, grid, bias = case(3, 3, 3, shape, Window(), terms, channels=channels)
    return GridCall(*tensors, bias, grid, grid, query=query, keys=keys, normalization="count"), leaves(tensors, bias)


def outcome(call, wanted, backend):
    out = ON_GRIDS.compute(call, backend)
    return [out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rotates_values", [False, True])
@pytest.mark.parametrize("keys", ["all", "own"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("terms", TERMS)
def test_it_is_the_formula(terms, query, keys, rotates_values):
    call, wanted = calls(TERMS[terms], query, keys)
    call = replace(call, bias=replace(call.bias, rotates_values=rotates_values))
    got, expected = outcome(call, wanted, "auto"), outcome(call, wanted, "reference")
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    softmax = ON_GRIDS.compute(replace(call, normalization="softmax"))
    assert (softmax - got[0]).abs().max() > 1e-3


def test_the_formula_written_out():
    call, _ = calls(("waves", "pose", "measure"))
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
            ON_GRIDS.compute(calls(TERMS[terms], shape=(side, side))[0], backend)
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
    call, _ = calls(())
    assert reason in linear.why_unsupported(replace(call, **changes))
    assert "factorises" in linear.why_unsupported(calls(("spatial",))[0])
    with pytest.raises(ValueError, match=r"backend: 'blocked' .* softmax"):
        ON_GRIDS.compute(call, "blocked")
