"""Tables of a network of the offset, by the kernels and by operations of PyTorch."""

import pytest
import torch

from escnn_attention.functional import launch, tables
from escnn_attention.functional.tables import network_table, select_rows
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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("channels", [3, 70])
def test_gradients_of_selected_rows(monkeypatch, channels, dtype, tolerance):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "DEVICES", {"cpu"})
    index = torch.randint(4, (50,))  # the fifth row is not among them
    table = torch.randn(2, 5, channels).to(dtype).requires_grad_()
    out = select_rows(table, index)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, table, weight)
    monkeypatch.undo()
    assert torch.equal(out, table[:, index])
    expected = torch.zeros(2, 5, channels, dtype=torch.float64).index_add(1, index, weight.double())
    assert grad.dtype == dtype
    assert (grad.double() - expected).abs().max() <= tolerance * expected.abs().max()


_COMPILE = """
import sys
sys.modules["escnn"] = None  # importing it takes longer than a kernel
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from escnn_attention.functional import tables_kernels

numbers, chip = sys.argv[1], int(sys.argv[2])


def build(kernel, constants, types):
    signature = {n: "constexpr" if n in constants else types.get(n, "*" + numbers) for n in kernel.arg_names}
    built = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", chip, 32))
    print(len(built.asm["cubin"]) > 0)


constants = {"D": 2, "DP": 2, "F": 16, "MC": 90, "OP": 128, "C": 10, "BR": 32}
for kernel in (tables_kernels.table, tables_kernels.table_back):
    build(kernel, constants, {"rows": "i32"})
integers = dict.fromkeys(["count", "rows", "channels"], "i32")
build(tables_kernels.add_rows, {"BI": 32, "BC": 16}, {"index": "*i64"} | integers)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("numbers", "chip"), [("bf16", 80), ("fp32", 90), ("fp64", 80)])
def test_kernels_compile_for_a_gpu_in_every_precision(compiled, numbers, chip):
    assert compiled(_COMPILE, numbers, chip).split() == ["True"] * 3
