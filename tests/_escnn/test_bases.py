"""Convolutions of escnn in float64."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from escnn import gspaces, nn
from escnn.nn.modules.conv.rd_convolution import _RdConv

from escnn_attention import equivariance_report
from escnn_attention._escnn.bases import elements_of
from escnn_attention.equivariance.report import maps_grid

SPACES = {
    "C4": lambda: gspaces.rot2dOnR2(4),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
    "C8": lambda: gspaces.rot2dOnR2(8),
    "mirror": lambda: gspaces.flip2dOnR2(axis=0.0),
    "octahedral": gspaces.octaOnR3,
}


def convolution_on(space, kernel_size=3, transposed=False):
    """Between irreps of all kinds and, in the plane, regular fields, with a bias."""
    torch.manual_seed(0)
    irreps = [space.trivial_repr, *space.fibergroup.irreps()[-2:]]
    source = nn.FieldType(space, irreps)
    target = nn.FieldType(space, [*irreps, space.regular_repr] if space.dimensionality == 2 else irreps)
    kind = {2: nn.R2ConvTransposed if transposed else nn.R2Conv, 3: nn.R3Conv}[space.dimensionality]
    made = kind(source, target, kernel_size, padding=kernel_size // 2, recompute=True)
    torch.nn.init.normal_(made.bias)
    return made


def error_of(network):
    """The largest change under the elements that keep the grid."""
    shape = (1, network.in_type.size, *network.in_type.gspace.dimensionality * [5])
    return equivariance_report(network, shape, layers=False).relative_error


@pytest.mark.sampled
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.slow
def test_exact_in_float64(space, kernel_size, training):
    made = convolution_on(SPACES[space](), kernel_size).train(training)
    single = made(x := made.in_type(torch.randn(1, made.in_type.size, *made.d * [5]))).tensor
    assert error_of(made.double()) < 1e-13
    torch.testing.assert_close(made(made.in_type(x.tensor.double())).tensor.float(), single, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_transposed_and_linear_maps_are_exact():
    assert error_of(convolution_on(gspaces.rot2dOnR2(4), transposed=True).double()) < 1e-13
    space = gspaces.no_base_space(gspaces.flipRot2dOnR2(5).fibergroup)
    fields = nn.FieldType(space, [space.regular_repr, *space.fibergroup.irreps()])
    linear = nn.Linear(fields, fields, recompute=True).double()
    x = fields(torch.randn(2, fields.size).double())
    for g in space.testing_elements:
        torch.testing.assert_close(linear(x.transform(g)).tensor, linear(x).transform(g).tensor, rtol=0, atol=1e-13)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [lambda: gspaces.flipRot2dOnR2(-1), gspaces.rot3dOnR3], ids=["O(2)", "SO(3)"])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.slow
def test_continuous_groups_are_exact_on_the_grid(make, kernel_size, monkeypatch):
    """Under all elements that map it onto itself; and not by the bases of escnn."""
    space = make()
    fields = nn.FieldType(space, [space.trivial_repr, *space.fibergroup.irreps()[1:3]])
    kind = nn.R2Conv if space.dimensionality == 2 else nn.R3Conv
    made = kind(fields, fields, kernel_size, padding=kernel_size // 2, recompute=True)
    torch.nn.init.normal_(made.bias)
    x = fields(torch.randn(1, fields.size, *made.d * [4]).double())
    elements = [g for g in elements_of(space.fibergroup) if maps_grid(space, g)]
    assert len(elements) == {2: 8, 3: 24}[made.d]

    def error(made):
        y = made(x)
        return max(((made(x.transform(g)).tensor - y.transform(g).tensor).norm() / y.tensor.norm()) for g in elements)

    assert error(copy.deepcopy(made).double()) < 1e-13
    if kernel_size > 1:
        monkeypatch.setattr(_RdConv, "_apply", torch.nn.Module._apply)
        assert error(made.double()) > 1e-9


def test_without_the_projection_it_is_not(monkeypatch):
    monkeypatch.setattr(_RdConv, "_apply", torch.nn.Module._apply)
    assert error_of(convolution_on(gspaces.rot2dOnR2(4)).double()) > 1e-9


def test_float32_and_names_are_left_alone():
    made = convolution_on(gspaces.flipRot2dOnR2(4))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    after = copy.deepcopy(made).to("cpu", torch.float32).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    exact = made.double().state_dict()
    assert {n: v.shape for n, v in exact.items()} == {n: v.shape for n, v in before.items()}


@pytest.mark.parametrize("training", [True, False])
def test_a_float64_network_keeps_its_bases_when_weights_are_loaded(training):
    space = gspaces.rot2dOnR2(4)
    state = convolution_on(space).train(training).state_dict()
    made = convolution_on(space).double().train(training)
    torch.nn.init.zeros_(made.weights)
    made.load_state_dict(state)
    assert torch.equal(made.weights, state["weights"].double())
    assert error_of(made) < 1e-13
    other = {name: 2 * value for name, value in state.items()}
    made.load_state_dict(other)
    block = next(name for name in state if name.endswith("sampled_basis"))
    assert torch.equal(made.state_dict()[block], other[block].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("modes", itertools.product([True, False, None], repeat=2))
def test_states_are_loaded_in_the_other_mode(modes, dtype):
    """True is training mode, None that of a module whose mode was never set."""
    space = gspaces.rot2dOnR2(4)
    point = gspaces.no_base_space(space.fibergroup)
    fields, scalars = (nn.FieldType(point, 2 * [r]) for r in (point.regular_repr, point.trivial_repr))
    linear = functools.partial(nn.Linear, fields, recompute=True)
    for make in (lambda: convolution_on(space), lambda: linear(fields), lambda: linear(scalars)):
        source, target = make().to(dtype), make().to(dtype)
        torch.nn.init.normal_(source.weights)
        for module, mode in zip((source, target), modes, strict=True):
            if mode is not None:
                module.train(mode)
        x = torch.randn(2, source.in_type.size, *source.in_type.gspace.dimensionality * [5], dtype=dtype)
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target(target.in_type(x)).tensor, source(source.in_type(x)).tensor)


def test_of_escnn_alone_they_do_not_fit(monkeypatch):
    monkeypatch.setattr(_RdConv, "_load_from_state_dict", torch.nn.Module._load_from_state_dict)
    convolution = convolution_on(gspaces.rot2dOnR2(4)).eval()
    state = convolution.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*filter"):
        convolution.train().load_state_dict(state)


def test_filters_are_of_the_bases_that_are_loaded():
    """Where these differ from those that are there."""
    state = {name: 2 * value for name, value in convolution_on(gspaces.rot2dOnR2(4)).train().state_dict().items()}
    made = convolution_on(gspaces.rot2dOnR2(4)).eval()
    before = made.filter
    made.load_state_dict(state)
    torch.testing.assert_close(made.filter, 4 * before)
    torch.testing.assert_close(made.train().expand_parameters()[0], 4 * before)
