"""Calls that are made on the CPU and computed on a CUDA device."""

from dataclasses import replace

import pytest
import torch

from escnn_attention.functional import BACKENDS, Backend, Waves
from escnn_attention.geometry.grid import Grid


def needs_cuda(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def on_cuda(backend):
    """The same backend between copies of the arguments to the device and of the output from it."""

    def move(t):
        return None if t is None else t.cuda()

    def attention(call):
        grid, terms = call.query_grid, call.bias
        grid = Grid(grid.shape, grid.window, dtype=grid.offsets.dtype, device="cuda")
        waves = terms.waves and Waves(move(terms.waves.frequencies), move(terms.waves.readout))
        terms = replace(terms, spatial=move(terms.spatial), pose=move(terms.pose), waves=waves)
        moved = replace(call, q=move(call.q), k=move(call.k), v=move(call.v), bias=terms)
        moved = replace(moved, query_grid=grid, key_grid=grid)
        assert BACKENDS[backend].why_unsupported(moved) is None
        return BACKENDS[backend].attention(moved).cpu()

    return Backend(attention)
