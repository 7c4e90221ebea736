"""Attention on responses, in chunks, against the formula written out."""

import pytest
import torch

from escnn_attention.functional import working_memory
from escnn_attention.functional.responses import attentive
from escnn_attention.functional.responses.attentive import Geometry, attended_sum, attention_maps, written_out

KINDS = {"full": (True, True), "channel": (True, False), "spatial": (False, True)}


def case(kind, *, batch=3, outs=3, out_poses=2, ins=3, in_poses=2, size=6, kernel=3, window=3, dimensions=2, **options):
    """Tensors that require gradients, and the geometry."""
    torch.manual_seed(0)

    def drawn(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()

    channel, spatial = KINDS[kind]
    tensors = [
        drawn(batch, ins * in_poses, *[size] * dimensions),
        drawn(outs, out_poses, ins, in_poses, *[kernel] * dimensions),
        drawn(outs, 2, out_poses, ins, in_poses) if channel else None,
        drawn(outs, ins, out_poses, 2, in_poses) if channel else None,
        drawn(outs, out_poses, 2, in_poses, *[window] * dimensions, scale=0.3) if spatial else None,
    ]
    return tensors, Geometry(**options)


def with_gradients(y, tensors):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [t for t in tensors if t is not None], weight)]


def as_function(tensors, geometry):
    """Of the tensors that are there."""

    def function(*given):
        left = iter(given)
        return attended_sum(*(None if t is None else next(left) for t in tensors), geometry)

    return function, tuple(t.detach() for t in tensors if t is not None)


def formula(tensors, geometry):
    return written_out(attentive._call(*tensors, geometry))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"padding": 2},
        {"dilation": 2},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"attention_dilation": 2},
        {"kernel": 4},
        {"kernel": 1, "window": 5},
        {"size": 3, "window": 7},
        {"in_poses": 1},
        {"out_poses": 1, "ins": 1},
        {"dimensions": 3, "size": 4, "padding": 1, "batch": 1},
        {"circular": True, "padding": 1, "attention_dilation": 2},
        {"circular": True, "kernel": 2, "stride": 2, "size": 2, "window": 5},
    ],
)
def test_values_and_gradients(kind, options):
    tensors, geometry = case(kind, **options)
    expected = with_gradients(formula(tensors, geometry)[0], tensors)
    for limit in (None, 5000, 1):
        with working_memory(limit):
            got = with_gradients(attended_sum(*tensors, geometry), tensors)
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_maxima_share_the_gradient(kind):
    """As in the formula, and unlike an index of the largest: turned images would have other gradients."""
    tensors, geometry = case(kind, kernel=1, window=1)
    with torch.no_grad():
        tensors[0] = tensors[0].round().clamp(-1, 1)
        tensors[1] = torch.ones_like(tensors[1])
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors]
    got = with_gradients(attended_sum(*tensors, geometry), tensors)
    torch.testing.assert_close(got, with_gradients(formula(tensors, geometry)[0], tensors), atol=1e-11, rtol=1e-11)


def test_maps():
    tensors, geometry = case("full")
    with working_memory(1):  # image by image
        maps = attention_maps(*tensors, geometry)
    torch.testing.assert_close(maps, formula(tensors, geometry)[1:])
    assert attention_maps(*case("spatial")[0])[0] is None
    assert attention_maps(*case("channel")[0])[1] is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_second_derivatives(kind):
    tensors, geometry = case(kind, batch=1, outs=1, out_poses=1, ins=2, in_poses=1, size=3, kernel=2)
    function, _ = as_function(tensors, geometry)
    torch.autograd.gradgradcheck(function, [t for t in tensors if t is not None])


@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind):
    """Gradients image by image are those of each image alone, and Jacobians agree in both modes."""
    tensors, geometry = case(kind, ins=2, padding=1, size=4)
    function, (x, *parameters) = as_function(tensors, geometry)

    def energy(image, *parameters):
        return function(image[None], *parameters).sin().sum()

    of_kernel = torch.func.vmap(torch.func.grad(energy, 1), (0, *[None] * len(parameters)))(x, *parameters)
    for image, got in zip(x, of_kernel, strict=True):
        kernel = parameters[0].clone().requires_grad_()
        (expected,) = torch.autograd.grad(energy(image, kernel, *parameters[1:]), kernel)
        torch.testing.assert_close(got, expected)
    jacobians = [of(function)(x[:1], *parameters) for of in (torch.func.jacfwd, torch.func.jacrev)]
    torch.testing.assert_close(*jacobians)


def test_parameters_that_need_no_gradient():
    tensors, geometry = case("full")
    expected = with_gradients(attended_sum(*tensors, geometry), tensors)
    tensors[0].requires_grad_(False)
    weight = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = attended_sum(*tensors, geometry)
    for create_graph in (False, True):
        got = torch.autograd.grad(y, tensors[1:], weight, create_graph=create_graph, retain_graph=True)
        torch.testing.assert_close(got, expected[2:], atol=1e-11, rtol=1e-11)


def test_half_precision_is_worked_out_in_single():
    tensors, geometry = case("full")
    half = [t.detach().bfloat16() for t in tensors]
    y = attended_sum(*half, geometry)
    assert y.dtype == torch.bfloat16
    single = attended_sum(*(t.float() for t in half), geometry)
    torch.testing.assert_close(y, single.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attended_sum(*(t.float() for t in half), geometry), single)


def test_what_is_not_a_number_stays_one():
    tensors, geometry = case("full")
    x = tensors[0].detach().clone()
    x[0, 0, 2, 2] = torch.nan
    y = attended_sum(x, *tensors[1:], geometry)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()
