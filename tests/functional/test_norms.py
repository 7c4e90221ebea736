"""Layer norms of fields, by the kernels and by operations of PyTorch."""

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck
from torch.func import jvp

from escnn_attention.functional import norms
from escnn_attention.functional.norms import field_norm, layer_norm
from tests.functional.cuda import needs_cuda

SHAPES = [(3, 12, 2, 5), (7, 12), (2, 4, 3)]  # images, channels, and space: four fields


def norm(x, weight, bias, invariants, rms):
    y = x if rms else x - x.mean(1, keepdim=True)
    y = y / (y.square().mean(1, keepdim=True) + 1e-3).sqrt()
    shape = (-1, *[1] * (x.dim() - 2))
    y = y * weight.repeat_interleave(x.shape[1] // 4).view(shape)
    return y if rms else y + (invariants @ bias).view(shape)


def compare(device, dtype, tolerance, shape, rms, memory=torch.contiguous_format):
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (4,), (4,))][: 3 - rms]
    invariants = torch.randn(shape[1], 1) * torch.eye(4).repeat_interleave(shape[1] // 4, 0)
    expected = norm(*leaves, *[None] * rms, invariants.double(), rms)
    weight = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, leaves, weight)]
    leaves = [t.detach().to(device, dtype) for t in leaves]
    leaves[0] = leaves[0].contiguous(memory_format=memory)
    leaves = [t.requires_grad_() for t in leaves]
    out = field_norm(*leaves, *[None] * rms, invariants.to(device, dtype), 1e-3, rms=rms)
    assert out.stride() == leaves[0].stride()  # no copy for what follows
    for a, b in zip([out, *torch.autograd.grad(out, leaves, weight.to(out))], wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert (a.detach().double().cpu() - b.detach()).norm() <= tolerance * b.norm()


@pytest.fixture
def kernels(monkeypatch, interpreted_kernels):
    """Those that run in the interpreter: of several programs that have several stretches of rows each."""
    monkeypatch.setattr(norms, "_NUMBERS", 64)
    monkeypatch.setattr(norms, "_PROGRAMS", 2)
    monkeypatch.setattr(norms, "_plainly", None)


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_kernels_normalise(kernels, dtype, tolerance, shape, rms):
    compare("cpu", dtype, tolerance, shape, rms)


def test_channels_may_lie_side_by_side(kernels):
    compare("cpu", torch.float64, 1e-12, SHAPES[0], False, torch.channels_last)


@pytest.mark.parametrize("rms", [False, True])
def test_the_same_by_operations_of_pytorch(rms):
    def of(x, weight, bias):
        invariants = torch.eye(4, dtype=x.dtype).repeat_interleave(3, 0)
        return norms._operator.passes.plainly(norms._Arguments(x, weight, None if rms else bias, invariants, 1e-3, rms))

    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 12, 3), (4,), (4,)))
    invariants = torch.eye(4, dtype=x.dtype).repeat_interleave(3, 0)
    torch.testing.assert_close(of(x, weight, bias), norm(x, weight, bias, invariants, rms))


@needs_cuda
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 160, 24, 24), (8, 768, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_on_cuda(dtype, tolerance, shape, rms):
    compare("cuda", dtype, tolerance, shape, rms)


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize(("dtype", "chip"), [(torch.bfloat16, 80), (torch.float32, 90), (torch.float64, 80)])
def test_kernels_compile_for_a_gpu_in_every_precision(compiled, dtype, chip):
    shapes = (8, 80, 24, 24), (20,), (20,), (80, 20)
    tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    found = compiled("norms:_operator", norms._Arguments(*tensors, 1e-5, False), chip)
    assert [one.kernel for one in found] == ["norm", "norm_back", "norm_sums"]


def leaves_of(affine):
    torch.manual_seed(0)
    shapes = [(2, 2, 4), (4,), (4,)][: 1 + 2 * affine]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(*leaves):
    """The gradients of a function of the normalised rows."""
    y = layer_norm(*leaves, *[None] * (3 - len(leaves)), 1e-3)
    return torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)


@pytest.mark.parametrize("affine", [False, True])
def test_third_derivatives(affine, monkeypatch):
    leaves = leaves_of(affine)
    assert gradcheck(gradients, leaves)
    assert gradgradcheck(gradients, leaves)
    exact = norms._standardised
    monkeypatch.setattr(norms, "_standardised", lambda rows, eps: (exact(rows, eps)[0], exact(rows, eps)[1].detach()))
    with pytest.raises(GradcheckError):
        gradgradcheck(gradients, leaves)


def test_needed_gradients_alone():
    leaves = leaves_of(True)
    expected = torch.autograd.grad(layer_norm(*leaves, 1e-3).sin().sum(), leaves)
    for graph in (False, True):
        for needed in range(3):
            some = [t.detach().requires_grad_(i == needed) for i, t in enumerate(leaves)]
            (found,) = torch.autograd.grad(layer_norm(*some, 1e-3).sin().sum(), some[needed], create_graph=graph)
            torch.testing.assert_close(found.detach(), expected[needed])


def test_second_derivatives_in_forward_mode():
    x = leaves_of(False)[0]
    v = torch.ones_like(x).cumsum(-1)

    def along(function):
        return lambda x: jvp(function, (x,), (v,))[1]

    found = along(along(lambda x: layer_norm(x, None, None, 1e-3).sin()))(x)
    y = layer_norm(x, None, None, 1e-3).sin()
    for _ in range(2):
        ones = torch.ones_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, ones, create_graph=True)
        (y,) = torch.autograd.grad(back, ones, v, create_graph=True)
    torch.testing.assert_close(found, y)
