"""Layers and networks do not wait for a device, as the host reads no numbers, and all that they do has one order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from escnn.nn.modules.basismanager import BlocksBasisExpansion
from torch.utils._pytree import tree_leaves

from escnn_attention.nn.cuda_graphs import HostReads
from tests.functional.cuda import choose_as_on_cuda
from tests.layers import CASES


class Refused(HostReads):
    """All reads are from a device, as far as a CPU can tell."""

    @staticmethod
    def waits_for(t: torch.Tensor) -> bool:
        return t.dim() > 0 or t.is_floating_point()


# Those that PyTorch refuses on CUDA under ``torch.use_deterministic_algorithms(True)``.
REFUSED = (
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("upsample_linear1d_backward", "upsample_bicubic2d_backward", "grid_sampler_2d_backward", "put", "put_"),
    *("adaptive_max_pool2d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward", "nll_loss2d_forward"),
    *("reflection_pad3d_backward", "grid_sampler_3d_backward", "histc", "median", "kthvalue"),
)


class Counted(HostReads):
    """All reads are from a device; operations that have no deterministic form on CUDA are noted, too."""

    def __init__(self):
        super().__init__()
        self.refused = set()

    @staticmethod
    def waits_for(t: torch.Tensor) -> bool:
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        of_numbers = name == "cumsum" and (kwargs or {}).get("dtype", args[0].dtype).is_floating_point
        weighted = name == "bincount" and len(args) > 1 and args[1] is not None
        if name in REFUSED or of_numbers or weighted:
            self.refused.add(name)
        return super().__torch_dispatch__(function, types, args, kwargs)


def reads_of(module: torch.nn.Module, name: str, move: bool = False) -> set[Any]:
    """What the host reads in a step, after one that makes tables, but for integers of escnn's modules.

    And the operations that have no deterministic form.
    """
    case = CASES[name]
    case = replace(case, arguments=case.named(case.inputs(module)[0]))
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    case.output(module, *inputs).sum().backward()
    if move:
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
    with Counted() as reads:
        case.output(module, *inputs).sum().backward()
    return (reads.places - of_escnn(module)) | reads.refused


def of_escnn(module: torch.nn.Module) -> set[int]:
    """The integers by which escnn's convolutions take parts of their filters: buffers, or on the host in any case."""
    attributes = [
        value for part in module.modules() if isinstance(part, BlocksBasisExpansion) for value in vars(part).values()
    ]
    tensors = [*module.buffers(), *tree_leaves(attributes)]
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor) and t.dtype == torch.long}


# Points that a mask shows, which are checked; how many neighbours of them, or in another set, there are within a
# radius, and which queries have any; and random numbers that are drawn on the CPU.
READING = (
    *(f"PointSelfAttention, {name}" for name in ("radius", "cutoff", "period")),
    *(f"GroupCrossAttention, {name}" for name in ("points", "points to grid", "grid to points")),
    *("PointTransformer", *(f"PointTransformer, {name}" for name in ("features of edges", "even", "spectrum"))),
    *("PointTransformerBlock, condition", "LieTransformer", "LieTransformer, lifts", "LieTransformer, nearest lifts"),
    "GroupSelfAttention, turned",
)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [name for name in CASES if name not in READING and name != "HamiltonianNetwork"])
def test_nothing_is_read_on_the_way_of_a_gpu(name, monkeypatch):
    choose_as_on_cuda(monkeypatch, run=False)
    assert not reads_of(CASES[name].drawn(), name)


@pytest.mark.parametrize("name", READING)
def test_what_is_read(name, monkeypatch):
    choose_as_on_cuda(monkeypatch, run=False)
    found = reads_of(CASES[name].drawn(), name)
    assert found
    assert not found & {*REFUSED, "cumsum", "bincount"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.on_grids and name not in READING])
def test_grids_are_not_read_where_there_is_no_triton(name):
    module = CASES[name].drawn()
    for part in module.modules():
        if getattr(part, "backend", None) == "auto":
            part.backend = "blocked"
    assert not reads_of(module, name)


def test_new_points_are_checked(monkeypatch):
    choose_as_on_cuda(monkeypatch, run=False)
    assert reads_of(CASES["PointSelfAttention"].drawn(), "PointSelfAttention", move=True)


@pytest.mark.parametrize(
    "function", [lambda x: x * x.max().item(), lambda x: x.cumsum(0), lambda x: F.interpolate(x, 7, mode="bicubic")]
)
def test_what_is_read_or_refused_is_found(function):
    class Reading(torch.nn.Module):
        in_type = CASES["Crop"].drawn().in_type

        def forward(self, x):
            return function(x.tensor)

    assert reads_of(Reading(), "Crop")
