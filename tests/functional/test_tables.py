"""Tables of a network of the offset, by the kernels and by operations of PyTorch."""

import pytest
import torch

from escnn_attention.functional import tables
from escnn_attention.functional.tables import network_tables, select_rows
from tests.functional.cuda import needs_cuda

SHAPES = [(5, 2, 3, 2, 3), (30, 3, 4, 1, 1), (9, 1, 2, 3, 5)]  # points, dimension, hidden units, heads, channels


def network(points, inverse, layer, shift, readout, poses, index):
    inner = torch.einsum("hij,rj,fi->hrf", inverse, points, layer) + shift
    return torch.einsum("hrf,mcf->mhrc", inner * inner.sigmoid(), readout), poses[:, index]


def drawn(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Points, matrices of three poses, weights and a table, and which rows of it each pose has."""
    rows, dim, functions, heads, channels = shape
    sizes = (
        (rows, dim),
        (3, dim, dim),
        (functions, dim),
        (functions,),
        (heads, channels, functions),
        (heads, 4, channels),
    )
    tensors = [torch.randn(s, dtype=torch.float64) for s in sizes]
    return tensors[:2] + [w.mul_(3).requires_grad_() for w in tensors[2:]], torch.randint(4, (3, 2))


def tables_of(points, inverse, layer, shift, readout, poses, index):
    return network_tables(points, inverse, (layer, shift, readout), poses, index)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], tolerance: float) -> None:
    tensors, index = drawn(shape)
    expected = network(*tensors, index)
    weights = [torch.randn_like(t) for t in expected]
    wanted = [*expected, *torch.autograd.grad(expected, tensors[2:], weights)]
    tensors = [t.detach().to(device, dtype) for t in tensors]
    # The matrices of a layer lie so.
    tensors[1] = tensors[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    leaves = [t.requires_grad_() for t in tensors[2:]]
    found = tables_of(*tensors, index.to(device))
    got = [*found, *torch.autograd.grad(found, leaves, [w.to(device, dtype) for w in weights])]
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.detach().double().cpu() - b.detach()).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_table_is_that_of_the_network(monkeypatch, request, interpreted, shape):
    if interpreted:
        request.getfixturevalue("interpreted_kernels")
        monkeypatch.setattr(tables, "_plainly", None)
    compare("cpu", torch.float64, shape, 1e-12)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_results_has_gradients_of_any_order(interpreted_kernels, used):
    tensors, index = drawn((2, 2, 3, 2, 3))
    found = []
    for function in (network, tables_of):
        out = function(*tensors, index)[used]
        grads = torch.autograd.grad(out.sin().sum(), tensors[2:], create_graph=True, allow_unused=True)
        assert [g is None for g in grads] == 3 * [used == 1] + [used == 0] or function is tables_of
        grads = [g for g in grads if g is not None and g.any()]
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), tensors[2 + 3 * used])])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_layer_without_poses(interpreted_kernels):
    tensors, _ = drawn((2, 2, 3, 2, 3))
    table, chosen = network_tables(*tensors[:2], tuple(tensors[2:5]))
    assert chosen is None
    expected, _ = network(*tensors, torch.zeros(3, 2, dtype=torch.long))
    torch.testing.assert_close(table, expected)
    grads = (torch.autograd.grad(t.square().sum(), tensors[2]) for t in (table, expected))
    torch.testing.assert_close(*(g for (g,) in grads))


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("shape", [*SHAPES, (200, 2, 16, 9, 10)])
def test_tables_on_cuda(shape, dtype, tolerance):
    compare("cuda", dtype, shape, tolerance)


@pytest.mark.parametrize("change", ["large", "gradients of points", "gradients of matrices", "transforms"])
def test_other_calls_are_operations_of_pytorch(monkeypatch, interpreted_kernels, change):
    monkeypatch.setattr(tables, "_operator", None)
    tensors, index = drawn((5, 2, 3, 2, 4))
    if change == "large":
        monkeypatch.setattr(tables, "MOST", 119)
    elif change == "transforms":
        monkeypatch.setattr(tables, "needs_operators", lambda *_: True)
    else:
        tensors[change == "gradients of matrices"].requires_grad_()
    torch.testing.assert_close(tables_of(*tensors, index), network(*tensors, index))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("channels", [3, 70])
def test_gradients_of_selected_rows(monkeypatch, interpreted_kernels, channels, dtype, tolerance):
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


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize(("dtype", "chip"), [(torch.bfloat16, 80), (torch.float32, 90), (torch.float64, 80)])
def test_kernels_compile_for_a_gpu_in_every_precision(compiled, dtype, chip):
    shapes = (16, 2), (16,), (9, 10, 16), (9, 4, 10), (25, 2), (4, 2, 2)
    tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    arguments = tables._Arguments(*tensors, torch.empty(16, dtype=torch.long, device="meta"))
    found = compiled("tables:_operator", arguments, chip)
    assert [one.kernel for one in found] == ["table", "table_back", "add_rows"]
