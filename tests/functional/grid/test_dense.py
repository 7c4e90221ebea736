import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from escnn_attention.functional import BACKENDS, PositionalBias, attention
from escnn_attention.functional.grid import dense
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.geometry.windows import Window
from tests.functional.cases import (
    assert_as_exact,
    assert_same,
    case,
    doubled,
    leaves,
    outputs_and_gradients,
    refusal,
    twice_differentiated,
)
from tests.functional.cuda import needs_cuda, on_cuda

FUSED = "_scaled_dot_product_flash_attention_for_cpu"


class Watch(TorchDispatchMode):
    """Which operators run, and the largest tensor that any of them makes."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append(func.overloadpacket.__name__)
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.itemsize)
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "terms", "vectors"),
    [
        (Window(), {"waves", "pose"}, 16),
        (Window(), {"rotary"}, 16),
        (Window(5), {"spatial"}, 9 * 32),  # a tile of 2 by 2 has a halo of 6 by 6
    ],
)
def test_is_fused_and_holds_no_scores(dtype, window, terms, vectors):
    tensors, grid, terms = case(2, 2, 2, (24, 24), window, terms, heads=1, batch=1, channels=4, dtype=dtype)
    for query in ("own", "all"):
        with Watch() as watch:
            out = attention(*tensors, grid, terms, query=query, backend="dense")
            torch.autograd.grad(out.sum(), leaves(tensors, terms), allow_unused=True)
        assert FUSED in watch.calls
        assert "_scaled_dot_product_attention_math" not in watch.calls
        assert "_softmax" not in watch.calls
        tokens = 2 * 2 * 576
        assert watch.largest <= tokens * vectors < tokens * 576


@pytest.mark.parametrize("window", [Window(), Window(3)])
def test_attention_is_not_computed_again_in_the_backward_pass(monkeypatch, window):
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", 1)
    tensors, grid, terms = case(3, 3, 3, (4, 4), window, {"waves", "pose"})
    with Watch() as watch:
        attention(*tensors, grid, terms, query="all", backend="dense").sum().backward()
    assert watch.calls.count(FUSED) == 2 * 3  # images and output poses


@pytest.mark.parametrize("query", ["own", "all"])
def test_computes_nothing_twice(monkeypatch, query):
    shapes = []

    def spy(q, k, v, attn_mask=None, **options):
        assert attn_mask is None or not attn_mask.requires_grad
        shapes.append((q.shape[:3], k.shape[:3], attn_mask is None))
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)

    scaled_dot_product_attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    tensors, grid, terms = case(4, 4, 4, (3, 3), Window(), set())
    attention(*tensors, grid, terms, query=query, backend="dense")
    assert shapes == [((4, 1, 36), (4, 1, 36), True)]
    tensors, grid, terms = case(4, 4, 4, (3, 3), Window(), {"waves"})
    attention(*tensors, grid, terms, query=query, backend="dense")
    assert shapes[1:] == [((4, 4, 9 if query == "own" else 36), (4, 4, 36), True)]
    tensors, grid, terms = case(4, 1, 1, (3, 3), Window(), set())
    attention(*tensors, grid, terms, query="all", backend="dense")
    assert shapes[2:] == [((4, 1, 9), (4, 1, 9), True)]


@pytest.mark.parametrize("piece", [1, 2**24])
@pytest.mark.parametrize(("window", "terms"), [(Window(), {"waves", "pose"}), (Window(3), {"spatial"})])
def test_transforms_see_what_is_done(monkeypatch, window, terms, piece):
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", piece)
    vectors, grid, terms = case(3, 3, 3, (4, 4), window, terms)
    out, *expected = outputs_and_gradients("reference", vectors, grid, terms, "all")
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vectors = tuple(t.detach() for t in vectors)
    steps = tuple(torch.randn_like(t) for t in vectors)

    def loss(*vectors):
        return (weight * attention(*vectors, grid, terms, query="all", backend="dense")).sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*vectors)
    assert_same(found, expected[:3])
    change = sum((a * b).sum() for a, b in zip(found, steps, strict=True))
    torch.testing.assert_close(torch.func.jvp(loss, vectors, steps)[1], change)
    with torch.autograd.forward_ad.dual_level():
        dual = loss(*map(torch.autograd.forward_ad.make_dual, vectors, steps))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, change)


@pytest.mark.parametrize("piece", [1, 2**24])
@pytest.mark.parametrize(("window", "terms"), [(Window(), {"waves", "pose"}), (Window(3), {"spatial"})])
def test_second_derivatives(monkeypatch, window, terms, piece):
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", piece)
    arguments = (*case(2, 2, 2, (3, 3), window, terms), "all")
    with Watch() as watch:
        found = twice_differentiated("dense", *arguments)
    assert FUSED in watch.calls
    assert_same(found, twice_differentiated("reference", *arguments))


def test_no_second_derivatives_with_dropout(monkeypatch):
    monkeypatch.setattr(dense, "why_no_kernel", lambda *_: None)
    vectors, grid, terms = case(2, 2, 2, (3, 3), Window(), {"waves", "pose"})
    out = attention(*vectors, grid, terms, dropout=0.3, backend="dense")
    with pytest.raises(RuntimeError, match=r"second derivatives with dropout.*'blocked'"):
        torch.autograd.grad(out.sum(), leaves(vectors, terms), create_graph=True)


@pytest.mark.parametrize(
    ("terms", "window", "dropout", "reason"),
    [
        ({"spatial"}, Window(), 0.0, "without a window it needs an encoding that factorises"),
        ({"spatial"}, Window(17), 0.0, "it needs a window of at most 256 offsets.* got 289"),
        ({"waves"}, Window(), 0.1, "on CPU there is no fused kernel with dropout"),
        ({"spatial"}, Window(15), 0.0, None),
        ({"waves"}, Window(17), 0.0, None),
        ({"spatial", "absolute"}, Window(), 0.0, None),
    ],
)
def test_refuses(terms, window, dropout, reason):
    tensors, grid, terms = case(2, 2, 2, (17, 17), window, terms)
    if reason is None:
        assert refusal("dense", tensors, grid, terms, "own", dropout=dropout) is None
    else:
        with pytest.raises(ValueError, match=f"'dense' cannot serve this call: {reason}"):
            attention(*tensors, grid, terms, dropout=dropout, backend="dense")


def test_refuses_what_has_no_fused_kernel():
    _, grid, _ = case(1, 1, 1, (2,), Window(), set())
    q = torch.empty(1, 1, 2, 1, 2, device="meta")
    assert dense.why_unsupported(GridCall(q, q, q, PositionalBias(1), grid, grid)) == "it needs CPU or CUDA, got meta"


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("window", "terms"),
    [(Window(), {"waves", "pose"}), (Window(), {"rotary"}), (Window(), set()), (Window(5), {"spatial", "pose"})],
)
@pytest.mark.parametrize("piece", [2**10, 2**24])
def test_on_cuda(monkeypatch, dtype, tolerance, query, window, terms, piece):
    monkeypatch.setattr(dense, "ENTRIES_PER_CHUNK", piece)
    monkeypatch.setitem(BACKENDS, "there", on_cuda("dense"))
    tensors, grid, terms = case(4, 4, 4, (12, 9), window, terms, channels=10, dtype=dtype)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        assert_as_exact("there", tensors, grid, terms, query, tolerance)


@needs_cuda
def test_on_cuda_it_refuses_double_precision():
    _, grid, _ = case(1, 1, 1, (2,), Window(), set())
    q = torch.empty(1, 1, 2, 1, 2, device="cuda", dtype=torch.float64)
    assert (
        dense.why_unsupported(GridCall(q, q, q, PositionalBias(1), grid, grid))
        == "on CUDA there is no fused kernel for float64"
    )


@pytest.mark.parametrize(("window", "terms"), [(Window(3), {"spatial", "pose"}), (Window(), {"waves", "pose"})])
def test_errors_of_gradients_are_those_of_the_largest_score_up_to_where_nothing_is_left(window, terms):
    def error(scale, seed):
        """Relative to the largest gradient, in rounding errors of the largest score."""
        tensors, grid, bias = case(4, 4, 4, (6, 6), window, terms, 1, 8, 1, torch.float32, seed)
        q, k, v = ((scale * t.detach()).requires_grad_() for t in tensors)
        score = (q.detach()[0, 0].flatten(0, 1) @ k.detach()[0, 0].flatten(0, 1).mT).abs().max() / math.sqrt(8)
        in_double, of_double = doubled((q, k, v), bias)
        expected = outputs_and_gradients("reference", in_double, grid, of_double, "own")[1:]
        got = outputs_and_gradients("dense", (q, k, v), grid, bias, "own")[1:]
        largest = max(t.abs().max() for t in expected)
        off = max((a.double() - b).abs().max() for a, b in zip(got, expected, strict=True))
        return off / largest / (torch.finfo(torch.float32).eps * score)

    assert all(error(scale, seed) < 2 for scale in (10, 100, 1000) for seed in range(3))
    assert not error(5000, 0) < 10
