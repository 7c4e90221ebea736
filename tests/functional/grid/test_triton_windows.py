"""Kernels for narrow heads in windows; test_triton.py compares them with the formula, too."""

import pytest
import torch

from escnn_attention.functional import attention
from escnn_attention.functional.grid import triton_windows
from escnn_attention.functional.grid.call import Arguments
from escnn_attention.functional.grid.triton_launch import positions_side_by_side
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, outputs_and_gradients
from tests.functional.grid.test_triton import interpreted


@interpreted
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("order", "key_poses", "channels", "query", "sizes"),
    [
        (2, 4, 3, "own", (1, 1, 2, 4)),
        (4, 2, 6, "own", (2, 1, 1, 4)),
        (4, 4, 4, "own", (4, 1, 4, 8)),
        (2, 2, 2, "all", (1, 2, 1, 4)),
        (2, 1, 2, "all", (2, 1, 1, 16)),
        (4, 2, 1, "all", (2, 4, 2, 8)),
        (3, 4, 1, "all", (1, 3, 4, 8)),
    ],
)
@pytest.mark.slow
def test_programs_of_any_shape(monkeypatch, order, key_poses, channels, query, sizes):
    """Several blocks of positions, that images share and of which the last is not full; tiles of poses."""
    chosen = triton_windows.Program(*sizes, 1)
    # Query poses of which each has its own output pose are looked at one by one, and so are others in the forward pass.
    one_by_one = {"own": "backward_keys", "all": "forward"}[query]
    single = chosen._replace(queries=1)
    monkeypatch.setattr(triton_windows, "program", lambda name, *_: single if name == one_by_one else chosen)
    call = case(order, key_poses, order, (5,), Window(3), {"spatial", "pose"}, heads=1, channels=channels)
    arguments = (*call, query)
    assert_same(outputs_and_gradients("triton", *arguments), outputs_and_gradients("reference", *arguments))


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poses", [1, 3, 4, 6, 24])
@pytest.mark.parametrize("channels", [1, 3, 10, 15])
def test_registers_hold_what_threads_have(monkeypatch, channels, poses, dtype, query):
    monkeypatch.setattr(triton_windows, "interpreted", lambda: False)
    q = torch.empty(1, 1, 6, poses, channels, dtype=dtype, device="meta")
    call = Arguments(q, q, q, *[None] * 6, poses, [2, 3], [2, 3], [], 3, "square", 1, query == "all", 0.0, 1)
    for name in ("forward", "backward_queries", "backward_keys"):
        few, many = (triton_windows.program(name, call, positions) for positions in (576, 2**20))
        assert few[:3] == many[:3]
        assert (few.warps, many.warps) == (1, 4)
        for program in (few, many):
            assert program.positions == 32 * program.warps
            assert all(poses % n == 0 for n in program[:3])
            # Those of a chunk of keys in the forward pass are read one after the other.
            held = program[:3] if name == "backward_keys" else program[:2]
            assert all(n * channels * q.element_size() // 4 <= 40 or n == 1 for n in held)


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("poses", [2, 3])
def test_vectors_are_read_and_written_where_they_lie(monkeypatch, poses, query):
    """Nothing is copied where positions are last in memory, as a layer on CUDA has them."""
    lying = [torch.randn(3, 2, 2, n, 5, 4)[:, 1].permute(1, 0, 4, 2, 3) for n in (2, poses, poses, 2)]
    q, k, v, grad = lying
    call = Arguments(q, k, v, *[None] * 6, 2, [4], [4], [], 3, "square", 1, query == "all", 0.0, 2**20)
    launched = {}
    monkeypatch.setattr(triton_windows, "_launch", lambda name, call, rows, tensors: launched.update({name: tensors}))
    out, sums = triton_windows.forward_pass(call)
    triton_windows.backward_pass(call, grad, out, sums)
    assert all(positions_side_by_side(t).data_ptr() == t.data_ptr() for t in lying)
    for tensors in launched.values():
        for name, t in {"q": q, "k": k, "v": v, "grad": grad, "out": out}.items():
            assert name not in tensors or tensors[name].data_ptr() == t.data_ptr()
    rows = positions_side_by_side(q.contiguous())
    assert torch.equal(rows, q)
    assert rows[0, 0].stride() == q[0, 0].stride()


@interpreted
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_probabilities_add_up_to_one_however_large_scores_are(query):
    """In float32, where a score of a million has no digits after the point: passes round it alike."""
    tensors, grid, terms = case(2, 2, 2, (6,), Window(3), {"spatial", "pose"}, dtype=torch.float32)
    large = (tensors[0].detach().mul(1e6).requires_grad_(), *tensors[1:])
    weight = torch.ones_like(tensors[2])
    out = attention(*large, grid, terms, query=query, backend="triton")
    (grad,) = torch.autograd.grad(out, large[2], weight)
    # The gradient of the values is what they are weighed with: each query gives 1 away, to each output.
    torch.testing.assert_close(grad.sum(), weight.sum() * (2 if query == "all" else 1), rtol=1e-5, atol=0)
