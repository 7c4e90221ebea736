"""Every layer and network under gradient checkpointing: the values and gradients of the plain run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from escnn.nn import GeometricTensor
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from escnn_attention import PairKernel, PointSelfAttention
from tests.layers import BACKENDS, CASES, FIELDS, compute_by
from tests.test_modes import served_of

Function = Callable[..., Tensor]


def results(function: Function, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a loss by inputs and weights."""
    torch.manual_seed(2)
    out = function(*inputs)
    for t in (*inputs, *weights):
        t.grad = None
    out.square().sum().backward()  # checkpoints that are reentrant do without torch.autograd.grad
    return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in (*inputs, *weights))]


def check(function: Function, inputs: list[Tensor], weights: list[Tensor]) -> None:
    """Both kinds of checkpoints give what the function does."""
    inputs = [t.requires_grad_() for t in inputs]
    expected = results(function, inputs, weights)
    for reentrant in (False, True):
        found = results(lambda *x, r=reentrant: checkpoint(function, *x, use_reentrant=r), inputs, weights)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("backend", ["auto", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in BACKENDS)])
@pytest.mark.parametrize("name", CASES)
def test_layers_and_networks(name, backend):
    case = CASES[name]
    if backend != "auto" and backend not in served_of(case):
        pytest.skip("it does not serve this layer")
    module = case.drawn()
    compute_by(module, backend)
    check(lambda *inputs: case.output(module, *inputs), case.inputs(module), list(module.parameters()))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_random_numbers_are_drawn_again(name):
    """Dropout, dropped paths and turned samples in training mode, with and without gradients by coordinates."""
    case = replace(CASES[name], training=True)
    module = case.drawn()
    for part in module.modules():
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.3
    features, *coords = case.inputs(module)
    check(lambda x: case.output(module, x, *coords), [features], list(module.parameters()))
    if coords:
        check(lambda *x: case.output(module, *x), [features, *coords], list(module.parameters()))


@pytest.mark.parametrize("options", [{}, {"normalization": "count", "encoding": PairKernel(hidden=4)}])
def test_random_numbers_are_drawn_again_with_gradients_of_a_measure(options):
    layer = PointSelfAttention(FIELDS, FIELDS, 2, dropout=0.3, **options).double()
    x, coords, measure = torch.randn(9, FIELDS.size), torch.randn(9, 2), torch.linspace(1, 2, 9)

    def function(x: Tensor, coords: Tensor, measure: Tensor) -> Tensor:
        # A first pass without gradients does not know that this requires one.
        return layer(GeometricTensor(x, FIELDS, coords), measure=measure.square()).tensor

    check(function, [t.double() for t in (x, coords, measure)], list(layer.parameters()))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in CASES if name != "HamiltonianNetwork"])
def test_exports(name):
    case = CASES[name]
    module = case.drawn()
    inputs, plain = case.inputs(module), copy.deepcopy(module).export()
    check(lambda *x: case.exported(plain, *x), inputs, list(plain.parameters()))
