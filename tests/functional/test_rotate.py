"""Rotations of pairs of channels, by the kernel and by operations of PyTorch."""

import pytest
import torch

from escnn_attention.functional import rotate as module
from escnn_attention.functional.rotate import rotate
from tests.functional.cuda import needs_cuda

SHAPES = [
    ((2, 1, 3, 5, 1, 9), (2, 4, 1, 5, 1, 4)),  # all poses rotate the keys of an image
    ((1, 3, 2, 5, 2, 8), (1, 3, 2, 5, 1, 4)),  # several vectors at a position
    ((6, 1, 2, 7, 1, 8), (6, 1, 2, 7, 1, 3)),  # with channels that are left
]


def complex_product(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    pairs = angle.shape[-1]
    z = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag, x[..., 2 * pairs :].expand(*z.shape[:-1], -1)], -1)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], angles: tuple[int, ...], tolerance: float):
    torch.manual_seed(0)
    x, angle = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, angles))
    expected = complex_product(x, angle)
    weight = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), [x, angle])]
    x, angle = (t.detach().to(device, dtype).requires_grad_() for t in (x, angle))
    out = rotate(x, angle)
    got = [out, *torch.autograd.grad((out * weight.to(out)).sum(), [x, angle])]
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.detach().double().cpu(), b.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "angles"), SHAPES)
@pytest.mark.parametrize("interpreted", [False, True])
def test_rotating_is_complex_multiplication(monkeypatch, interpreted, shape, angles):
    if interpreted:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(module, "has_kernel", lambda _: True)
    compare("cpu", torch.float64, shape, angles, 1e-12)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize(("shape", "angles"), SHAPES)
def test_rotating_on_cuda(shape, angles, dtype, tolerance):
    compare("cuda", dtype, shape, angles, tolerance)


def test_of_fewer_axes():
    torch.manual_seed(0)
    x, angle = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, angle), complex_product(x, angle))


_COMPILE = """
import sys
sys.modules["escnn"] = None  # importing it takes longer than a kernel
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from escnn_attention.functional import rotate_kernels

constants = {"F": 3, "FP": 4, "C": 7, "BR": 256}
for numbers, of_angles in [("bf16", "bf16"), ("fp16", "fp32"), ("fp64", "fp64")]:
    types = dict.fromkeys(["x", "out", "grad", "grad_x"], "*" + numbers)
    types |= dict.fromkeys(["angle", "grad_angle"], "*" + of_angles) | dict.fromkeys(constants, "constexpr")
    for kernel in (rotate_kernels.rotate, rotate_kernels.rotate_back):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        built = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32))
        print(len(built.asm["cubin"]) > 0)
"""


def test_kernels_compile_for_a_gpu_in_every_precision(run_python, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert run_python(_COMPILE).split() == ["True"] * 6
