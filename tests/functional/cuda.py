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

    def attention(q, k, v, grid, terms, *, query, dropout):
        grid = Grid(grid.shape, grid.window, dtype=grid.offsets.dtype, device="cuda")
        waves = terms.waves and Waves(move(terms.waves.frequencies), move(terms.waves.readout))
        terms = replace(terms, spatial=move(terms.spatial), pose=move(terms.pose), waves=waves)
        q, k, v = move(q), move(k), move(v)
        assert BACKENDS[backend].refuses(q, grid, terms, query, dropout) is None
        return BACKENDS[backend].attention(q, k, v, grid, terms, query=query, dropout=dropout).cpu()

    return Backend(attention)
