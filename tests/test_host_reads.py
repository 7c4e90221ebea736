"""Layers and networks do not wait for a device: nothing that they do reads numbers of tensors on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escnn_attention.nn.cuda_graphs import HostReads
from tests.layers import CASES


class Refused(HostReads):
    """All reads are from a device, as far as a CPU can tell."""

    @staticmethod
    def waits_for(t: torch.Tensor) -> bool:
        return t.dim() > 0 or t.is_floating_point()


GRIDS = [name for name, case in CASES.items() if case.on_grids and name != "HamiltonianNetwork"]


def reads_of(module: torch.nn.Module, name: str, backend: str) -> set[int]:
    """What the host reads in a step, after one that makes tables."""
    case = CASES[name]
    case = replace(case, arguments=case.named(case.inputs(module)[0]))
    for part in module.modules():
        if getattr(part, "backend", None) == "auto":
            part.backend = backend
    inputs = [t.requires_grad_() for t in case.inputs(module)]
    case.output(module, *inputs).sum().backward()
    with Refused() as reads:
        case.output(module, *inputs).sum().backward()
    return reads.places


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_not_read(name):
    assert not reads_of(CASES[name].drawn(), name, "blocked")


@pytest.mark.parametrize(("encoding", "backend"), [("rotary", "dense"), ("Fourier", "dense"), ("all", "neighbours")])
def test_clouds_that_were_seen_are_not_read(encoding, backend):
    name = f"PointSelfAttention, {encoding}"
    assert not reads_of(CASES[name].drawn(), name, backend)


def test_what_is_read_is_found():
    class Reading(torch.nn.Module):
        in_type = CASES["Crop"].drawn().in_type

        def forward(self, x):
            return x.tensor * x.tensor.max().item()

    assert reads_of(Reading(), "Crop", "blocked")
