"""Tables of a network of the offset, by the kernels and by operations of PyTorch."""

import pytest
import torch

from escnn_attention.functional import launch, tables
from escnn_attention.functional.tables import network_table
from tests.functional.cuda import needs_cuda

SHAPES = [(5, 2, 3, 2, 3), (70, 3, 4, 1, 1), (9, 1, 2, 3, 5)]  # rows, dimension, hidden units, heads, channels


def network(offsets, layer, shift, readout):
    inner = torch.einsum("rd,fd->rf", offsets, layer) + shift
    return torch.einsum("rf,mcf->mrc", inner * inner.sigmoid(), readout)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], tolerance: float) -> None:
    torch.manual_seed(0)
    rows, dim, functions, heads, channels = shape
    sizes = (functions, dim), (functions,), (heads, channels, functions)
    offsets, *weights = (torch.randn(s, dtype=torch.float64) for s in ((rows, dim), *sizes))
    weights = [w.mul_(3).requires_grad_() for w in weights]
    expected = network(offsets, *weights)
    weight = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), weights)]
    weights = [w.detach().to(device, dtype).requires_grad_() for w in weights]
    out = network_table(offsets.to(device, dtype), *weights)
    got = [out, *torch.autograd.grad((out * weight.to(out)).sum(), weights)]
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.detach().double().cpu() - b.detach()).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_table_is_that_of_the_network(monkeypatch, interpreted, shape):
    if interpreted:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(launch, "DEVICES", {"cpu"})
        monkeypatch.setattr(tables, "_plainly", None)
    compare("cpu", torch.float64, shape, 1e-12)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("shape", [*SHAPES, (200, 2, 16, 9, 10)])
def test_tables_on_cuda(shape, dtype, tolerance):
    compare("cuda", dtype, shape, tolerance)


@pytest.mark.parametrize("change", ["large", "gradients of offsets", "transforms"])
def test_other_calls_are_operations_of_pytorch(monkeypatch, change):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "DEVICES", {"cpu"})
    monkeypatch.setattr(tables, "_operator", None)
    offsets, *weights = torch.randn(5, 2), torch.randn(3, 2), torch.randn(3), torch.randn(2, 4, 3)
    expected = network(offsets, *weights)
    if change == "large":
        monkeypatch.setattr(tables, "MOST", 39)
    elif change == "transforms":
        weights = [w.double().requires_grad_() for w in weights]
        offsets = offsets.double()
        monkeypatch.setattr(tables, "needs_operators", lambda *_: True)
    else:
        offsets.requires_grad_()
    torch.testing.assert_close(network_table(offsets, *weights).to(expected), expected, rtol=1e-4, atol=1e-5)


_COMPILE = """
import sys
sys.modules["escnn"] = None  # importing it takes longer than a kernel
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from escnn_attention.functional import tables_kernels

constants = {"D": 2, "DP": 2, "F": 16, "MC": 90, "OP": 128, "C": 10, "BR": 32}
numbers, chip = sys.argv[1], int(sys.argv[2])
for kernel in (tables_kernels.table, tables_kernels.table_back):
    types = dict.fromkeys(constants, "constexpr") | {"rows": "i32"}
    signature = {name: types.get(name, "*" + numbers) for name in kernel.arg_names}
    built = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", chip, 32))
    print(len(built.asm["cubin"]) > 0)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("numbers", "chip"), [("bf16", 80), ("fp32", 90), ("fp64", 80)])
def test_kernels_compile_for_a_gpu_in_every_precision(compiled, numbers, chip):
    assert compiled(_COMPILE, numbers, chip).split() == ["True"] * 2
