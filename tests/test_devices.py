"""Every layer and network on a GPU against the same on the CPU: values, and gradients of weights and coordinates."""

from __future__ import annotations

import copy

import pytest
import torch
from escnn.nn import EquivariantModule
from torch import Tensor, nn

import escnn_attention as ea
from escnn_attention import models
from escnn_attention.functional.registry import Registry
from tests.functional.cuda import choose_as_on_cuda, needs_cuda
from tests.layers import CASES, Case


def test_no_layer_is_left_out():
    def modules(package) -> set[str]:
        values = {name: getattr(package, name) for name in package.__all__}
        return {n for n, v in values.items() if isinstance(v, type) and issubclass(v, EquivariantModule)}

    # These are parts of networks, which are in the table or are tested with published networks.
    parts = {"DenseBlock", "EquivariantClassifier", "InvariantLogits", "PoseMean", "ResidualBlock"}
    parts |= {"PositionSum"}
    parts |= {"GroupCrossAttention"}  # takes two sets, and has tests of its own
    covered = {name.partition(",")[0] for name in CASES}
    assert modules(ea) | modules(models) <= covered | parts | {"SymmetricTensors"}


def computed(case: Case, module: nn.Module, device: str, dtype: torch.dtype, autocast: bool = False) -> list[Tensor]:
    """The output, and the gradients of a loss by the features, the coordinates and the weights."""
    module = copy.deepcopy(module).to(device, dtype)
    inputs = [t.requires_grad_() for t in case.inputs(module, device, dtype)]
    torch.manual_seed(2)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        out = case.output(module, *inputs)
    assert out.device.type == device
    assert autocast or out.dtype == dtype
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weights.to(out)).sum().backward()
    wanted = [*inputs, *module.parameters()]
    return [out, *[torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]]


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_a_gpu(name, dtype, tolerance):
    case = CASES[name]
    module = case.drawn()
    expected = computed(case, module, "cpu", torch.float64)
    for a, b in zip(computed(case, module, "cuda", dtype), expected, strict=True):
        assert (a.detach().double().cpu() - b).norm() <= tolerance * max(b.norm(), 1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_the_same_on_the_way_of_a_gpu(name, monkeypatch):
    """By what "auto" chooses on CUDA, and by kernels that Triton interprets."""
    case = CASES[name]
    module = case.drawn()
    expected = computed(case, module, "cpu", torch.float64)
    choose_as_on_cuda(monkeypatch)
    for a, b in zip(computed(case, module, "cpu", torch.float64), expected, strict=True):
        assert (a - b).norm() <= 1e-10 * max(b.norm(), 1)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("name", [name for name in CASES if name != "HamiltonianNetwork"])
def test_every_precision_is_served_on_the_way_of_a_gpu(name, dtype, autocast, monkeypatch):
    case = CASES[name]
    module = case.drawn().train(case.training)
    choose_as_on_cuda(monkeypatch, run=False)
    for t in computed(case, module, "cpu", dtype, autocast)[1:]:
        assert t.dtype == dtype


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("GroupSelfAttention", "triton"), ("GroupSelfAttention, torus", "triton")),
        *(("GroupSelfAttention, global", "triton"), ("GroupSelfAttention, Fourier", "dense")),
        *(("GroupSelfAttention, rotary", "dense"), ("GroupSelfAttention, stride", "blocked")),
        *(("GroupCrossAttention, coarse keys", "blocked"), ("PointSelfAttention", "triton")),
        *(("PointSelfAttention, rotary", "dense"), ("PointSelfAttention, sums", "linear")),
        *(("PointSelfAttention, kernel", "triton"), ("PointSelfAttention, edges", "triton")),
        *(("PointSelfAttention, cutoff", "neighbours"), ("PointSelfAttention, features of edges", "neighbours")),
    ],
)
def test_what_a_gpu_chooses(name, expected, monkeypatch):
    """As docs/gpu.md says; and "neighbours" where coordinates require a gradient."""
    case, chosen = CASES[name], []
    module = case.drawn().float()
    choose_as_on_cuda(monkeypatch, run=False)
    plan = Registry.plan
    monkeypatch.setattr(Registry, "plan", lambda *call: chosen.append(plan(*call)) or chosen[-1])
    inputs = case.inputs(module, dtype=torch.float32)
    case.output(module, *inputs)
    assert [one.name for one in chosen] == [expected]
    if case.points:
        chosen.clear()
        case.output(module, inputs[0], inputs[1].requires_grad_())
        assert chosen[0].name == (expected if expected == "linear" else "neighbours")


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_mixed_precision_on_a_gpu(name):
    case = CASES[name]
    module = case.drawn()
    expected = computed(case, module, "cpu", torch.float64)[0]
    out, *gradients = computed(case, module, "cuda", torch.float32, autocast=True)
    assert (out.detach().double().cpu() - expected).norm() <= 0.1 * expected.norm()
    assert all(g.isfinite().all() for g in gradients)
