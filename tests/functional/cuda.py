"""Calls that are made on the CPU and computed on a CUDA device, or as they are on one."""

from dataclasses import replace

import pytest
import torch

from escnn_attention.functional import BACKENDS, BETWEEN_POINTS, ON_GRIDS, Backend, launch
from escnn_attention.functional.grid import dense
from escnn_attention.functional.points import call as points_call
from escnn_attention.functional.points import dense as points_dense
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.neighbours import Neighbourhood
from tests.functional.cases import changed


def needs_cuda(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def on_cuda(backend):
    """The same backend between copies of the arguments to the device and of the output from it."""

    def attention(call):
        given, terms = call.query_grid, changed(call.bias, torch.Tensor.cuda)
        grid = Grid(given.shape, given.window, dtype=given.offsets.dtype, device="cuda")
        q, k, v = (t.cuda() for t in (call.q, call.k, call.v))
        moved = replace(call, q=q, k=k, v=v, bias=terms, query_grid=grid, key_grid=grid)
        assert BACKENDS[backend].why_unsupported(moved) is None
        return BACKENDS[backend].attention(moved).cpu()

    return Backend(attention)


def choose_as_on_cuda(patches, run=True):
    """Have layers do on the CPU what they do on CUDA, by kernels that Triton interprets, or only launches.

    Kernels that are only launched leave their outputs as they are.
    """
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from tests.functional.interpreter import hasten

    hasten()
    if not launch.interpreted():
        pytest.skip("kernels are compiled")
    found = dense.why_no_kernel

    def why_no_kernel(q, dropout):
        return "on CUDA there is no fused kernel for float64" if q.dtype == torch.float64 else found(q, 0.0)

    patches.setattr(launch, "DEVICES", frozenset({"cpu", "cuda"}))
    for registry in (ON_GRIDS, BETWEEN_POINTS):
        patches.setattr(registry, "preference", lambda _, given=registry.preference: given("cuda"))
        registry.forget()
    for module in (dense, points_dense):
        patches.setattr(module, "why_no_kernel", why_no_kernel)
    patches.setattr(points_call, "MANY", 0)
    patches.setitem(points_dense._SLACK, "cpu", points_dense._SLACK["cuda"])
    patches.setattr(Neighbourhood, "_by_tree_on", lambda self, x: False)
    if not run:
        patches.setattr(InterpretedFunction, "run", lambda *_, **__: None)
