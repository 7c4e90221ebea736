"""Networks at every pair of points: the compiled loop against plain operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional.native import build as compiled
from escnn_attention.functional.points import pair_mlp as module
from tests.functional.cases import in_threads

needs_compiler = pytest.mark.skipif(
    module._why_not_built(torch.float64) is not None, reason=str(module._why_not_built(torch.float64))
)


def draw(blocks=2, inputs=3, rows=37, heads=2, first=5, second=4, repeats=3, dtype=torch.float64):
    shapes = ((blocks, inputs, rows), (heads, first, blocks, repeats), (heads, first, inputs))
    shapes += ((heads, second, first), (heads, second))
    x, *weights = (torch.randn(*shape, dtype=dtype) for shape in shapes)
    return [x, *(t.requires_grad_() for t in weights)]


def natively(x, *weights):
    return module._operator(module.Arguments(*weights, x))


def plainly(x, *weights):
    return module._plainly(module.Arguments(*weights, x))


def written_out(x, bias, first, second, last):
    silu = torch.nn.functional.silu
    hidden = silu(torch.einsum("mfi,bir->mfbr", first, x).unsqueeze(3) + bias.unsqueeze(-1))  # M, F, B, Q, R
    return torch.einsum("ms,msbqr->mbqr", last, silu(torch.einsum("msf,mfbqr->msbqr", second, hidden)))


def outcomes(function, tensors):
    out = function(*tensors)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, tensors[1:], torch.randn(out.shape, dtype=torch.float64).to(out))]


@needs_compiler
@given(st.data())
def test_the_formula(data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    few, small = st.integers(1, 3), st.integers(1, 9)
    sizes = {"blocks": few, "inputs": few, "heads": few, "repeats": few, "first": small, "second": small}
    tensors = draw(rows=data.draw(st.integers(1, 200)), **{name: data.draw(s) for name, s in sizes.items()})
    expected = outcomes(written_out, tensors)
    for function in (plainly, natively, module.pair_mlp):
        torch.testing.assert_close(outcomes(function, tensors), expected, rtol=1e-11, atol=1e-11)


@needs_compiler
def test_large_numbers_and_none():
    tensors = draw()
    with torch.no_grad():
        tensors[1] *= 1e4  # Functions of these are 0, or the identity.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        exact = outcomes(written_out, tensors)
        got = outcomes(natively, [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors])
        for a, b in zip(got, exact, strict=True):
            assert (a.double() - b).norm() <= tolerance * b.norm()
    with torch.no_grad():
        tensors[2].abs_()  # All units of the first layer are infinite, of one sign.
    for value in (torch.nan, torch.inf, -torch.inf):
        tensors[0][0, 1, 4] = value
        spoilt = natively(*tensors).isnan()
        assert spoilt[:, 0, :, 4].all()
        assert int(spoilt.sum()) == spoilt[:, 0, :, 4].numel()
    assert torch.equal(spoilt, plainly(*tensors).isnan())


@needs_compiler
def test_the_same_for_any_number_of_threads():
    tensors = draw(rows=3000, dtype=torch.float32)
    first, *others = in_threads((1, 2, 5), lambda: outcomes(natively, tensors))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_compiler
def test_gradients_of_the_inputs():
    tensors = draw()
    tensors[0].requires_grad_()
    for leaves in (tensors, tensors[:1], tensors[2:]):
        grads = [torch.autograd.grad(function(*tensors).sin().sum(), leaves) for function in (module.pair_mlp, plainly)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


@needs_compiler
def test_derivatives_of_the_second_order():
    tensors = draw(rows=3, first=2, second=2, repeats=1)
    assert torch.autograd.gradcheck(natively, tensors)
    assert torch.autograd.gradgradcheck(natively, tensors)
    tensors[0].requires_grad_()
    assert torch.autograd.gradgradcheck(module.pair_mlp, tensors)


@needs_compiler
def test_who_serves(monkeypatch):
    served = []
    monkeypatch.setattr(module, "_operator", lambda call: served.append(True) or module._plainly(call))
    tensors = draw(dtype=torch.float32)
    module.pair_mlp(*tensors)
    assert len(served) == 1
    # Forces are differentiated twice, and half precision is left to torch.
    module.pair_mlp(tensors[0].requires_grad_(), *tensors[1:])
    module.pair_mlp(*(t.detach().bfloat16() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        module.pair_mlp(*(t.detach() for t in tensors))
    assert len(served) == 1
    with torch.no_grad():
        module.pair_mlp(*tensors)
    assert len(served) == 2
    monkeypatch.setattr(module.KERNEL, "_found", {torch.float32: compiled.NotBuilt("there is no compiler")})
    module.pair_mlp(*(t.detach() for t in tensors))
    assert len(served) == 2
