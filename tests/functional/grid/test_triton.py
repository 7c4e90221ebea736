"""Kernels that Triton compiles, against the formula: interpreted on the CPU, compiled where there is a GPU.

Interpreted, an operation takes as long for many positions as for one: the cases have few offsets and poses.
"""

import math
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from escnn_attention import GroupSelfAttention, TransformerBlock
from escnn_attention.functional import BACKENDS, ON_GRIDS, PositionalBias, attention, autograd, launch, working_memory
from escnn_attention.functional.grid import triton, triton_tiles, triton_windows
from escnn_attention.functional.grid.call import Arguments, GridCall
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests import spaces
from tests.functional.cases import (
    assert_as_exact,
    assert_independent,
    assert_same,
    call_of,
    case,
    cases,
    leaves,
    outputs_and_gradients,
    refusal,
    twice_differentiated,
    with_leaves,
)
from tests.functional.cuda import needs_cuda, on_cuda

pytest.importorskip("triton")
InterpretedFunction = import_module("triton.runtime.interpreter").InterpretedFunction
import_module("tests.functional.interpreter").hasten()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@pytest.fixture(params=["chosen", "tiles"])
def passes(request, monkeypatch):
    """Those that a call takes, or products of tiles, which serve every call."""
    if request.param == "tiles":
        monkeypatch.setattr(triton, "tiled", lambda *_: True)
    return request.param


@interpreted
@pytest.mark.sampled(4)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("poses", "shape", "window", "kinds"),
    [
        ((2, 4, 2), (3, 4), Window(3), {"spatial", "pose"}),
        ((3, 3, 3), (4,), Window(3), {"spatial", "shared"}),
        ((4, 4, 4), (5,), Window(3, dilation=2), {"waves", "pose"}),
        ((2, 2, 2), (2, 2, 3), Window(3, "disc"), {"spatial"}),
        ((2, 2, 2), (4,), Window(), {"spatial", "pose"}),
        ((2, 2, 2), (6,), Window(5), {"pose"}),
        ((2, 2, 2), (6,), Window(3), set()),
        ((2, 2, 2), (5,), Window(2, "causal square"), {"spatial", "pose"}),
        ((2, 2, 2), (4,), Window(None, "causal square"), {"waves", "pose"}),
        ((2, 2, 2), (4,), Window(3, "circular square"), {"spatial", "pose"}),
        ((2, 2, 2), (3, 4), Window(3, "circular disc"), {"spatial"}),
        ((2, 2, 2), (2, 3, 3), Window(3, "causal circular square"), {"pose"}),
        ((2, 2, 2), (4,), Window(None, "circular square"), {"spatial"}),
        ((2, 2, 2), (4,), Window(3), {"absolute", "spatial", "pose"}),
        ((2, 2, 2), (4,), Window(3), {"rotary", "pose", "measure", "weights"}),
        # No keys lie beyond a side of one position.
        *(((2, 2, 2), shape, Window(3), {"spatial"}) for shape in ((1, 3), (3, 1), (1, 1, 3), (1,))),
        ((3, 1, 1), (4,), Window(3), {"spatial"}),  # lifting
        ((3, 3, 3), (4,), Window(3), {"spatial", "own keys"}),
    ],
)
@pytest.mark.slow
def test_agrees_with_the_reference(passes, query, poses, shape, window, kinds):
    query, keys = "all" if poses[2] < poses[0] else query, "own" if "own keys" in kinds else "all"
    channels = 4 if "rotary" in kinds else 3
    arguments = (*case(*poses, shape, window, kinds, channels=channels, batch=1), query, keys)
    assert refusal("triton", *arguments) is None
    assert_same(outputs_and_gradients("triton", *arguments), outputs_and_gradients("reference", *arguments))


def agree_or_refuse(arguments):
    if refusal("triton", *arguments) is None:
        assert_same(outputs_and_gradients("triton", *arguments), outputs_and_gradients("reference", *arguments))
    else:
        assert arguments[1].complete or not arguments[1].shape


@interpreted
@settings(max_examples=2)
@given(cases(max_side=3, max_dim=1))
def test_agrees_with_the_reference_on_random_calls(passes, arguments):
    agree_or_refuse(arguments)


@pytest.mark.exhaustive
@interpreted
@settings(max_examples=60)
@given(cases(max_side=3, max_dim=2))
def test_agrees_with_the_reference_on_many_random_calls(passes, arguments):
    agree_or_refuse(arguments)


@interpreted
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_agrees_with_the_reference_in_lower_precision(query, channels, dtype, tolerance):
    tensors, grid, terms = case(2, 2, 2, (5,), Window(3), {"spatial", "pose"}, channels=channels, dtype=dtype)
    assert_as_exact("triton", tensors, grid, terms, query, tolerance)


@interpreted
@pytest.mark.slow
def test_autocast_changes_no_product_inside():
    arguments = (*case(2, 2, 2, (4,), Window(3), {"spatial", "pose"}, heads=1, batch=1, dtype=torch.float32), "all")
    plain = outputs_and_gradients("triton", *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(outputs_and_gradients("triton", *arguments), plain, 1e-6)


@interpreted
@pytest.mark.sampled(1)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_scores_of_any_size(passes, query, size):
    """Exponentials would overflow, and others are less than the smallest number."""
    tensors, grid, terms = case(2, 2, 2, (5,), Window(3), {"spatial"})
    tensors = (tensors[0].detach().mul(size).requires_grad_(), *tensors[1:])
    got, expected = (outputs_and_gradients(b, tensors, grid, terms, query) for b in ("triton", "reference"))
    assert_same(got, expected, 1e-8, atol=1e-13 * size)


def test_what_tiles_serve():
    assert [triton.tiled(False, n, torch.float32) for n in (1, 15, 16, 64)] == [False, False, True, True]
    assert triton.tiled(False, 1, torch.bfloat16)
    assert triton.tiled(False, 1, torch.float16)
    assert triton.tiled(True, 1, torch.float64)


@pytest.mark.parametrize(
    ("kernel_size", "rows", "columns", "channels", "expected"),
    [
        (5, 4, 4, 32, ((1, 2, 2), 4, 1)),
        (5, 4, 4, 100, ((1, 2, 2), 4, 4)),
        (5, 8, 6, 8, ((1, 1, 2), 2, 1)),
        (5, 24, 1, 8, ((1, 1, 1), 16, 1)),
        (5, 120, 120, 8, ((1, 1, 1), 1, 8)),
        (0, 4, 4, 10, ((1, 2, 4), 8, 2)),
    ],
)
def test_tiles_are_of_neighbouring_positions(kernel_size, rows, columns, channels, expected):
    assert triton_tiles.tiles((9, 9), kernel_size, rows, columns, channels) == expected


def test_positions_of_large_images_lie_closer():
    """Kernels count the numbers of an image in 32 bits."""
    heads = torch.empty(1, 2**20, 8, 16, 16, device="meta").permute(2, 0, 1, 3, 4)
    assert heads.shape[2] * heads.stride(2) == 2**31
    assert triton_tiles.laid_out(heads).is_contiguous()
    assert triton_tiles.room_for(heads).is_contiguous()
    assert triton_tiles.laid_out(heads[:, :, 1:]).stride() == heads.stride()
    assert triton_tiles.room_for(heads[:, :, 1:]).stride()[2:] == heads.stride()[2:]


def test_tensor_cores_are_exact_unless_less_is_allowed(monkeypatch):
    q = torch.empty(1, 1, 6, 2, 16)
    call = Arguments(q, q, q, *[None] * 6, 2, [2, 3], [2, 3], [], 3, "square", 1, False, 0.0, 1)
    monkeypatch.setattr(triton_tiles, "interpreted", lambda: False)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", "exact"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(precision)
            assert triton_tiles.launched("forward", call).constants["IN"] == expected
            double = call._replace(q=q.double())
            assert triton_tiles.launched("forward", double).constants["IN"] == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


@interpreted
@pytest.mark.sampled(1)  # the launch is one for both
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_works_on_a_bounded_chunk_of_the_products(monkeypatch, query):
    arguments = (*case(2, 2, 2, (5,), Window(3), {"spatial", "pose"}, heads=1, batch=3), query)
    launched, launches = [], triton_windows
    launch = launches._launch
    monkeypatch.setattr(launches, "_launch", lambda *a: launched.append(a[2]) or launch(*a))
    whole = outputs_and_gradients("triton", *arguments)
    assert [len(range(3)[rows]) for rows in launched] == [3, 3, 3]
    # Those with the poses, and backward those with both tables, too, of an image of which three are there.
    image = 2 * 5 * (2 if query == "all" else 1) * (2 + (3 + 2)) * 8
    for images, forward, backward in ((0.4, [1] * 3, [1] * 3), (1, [3], [1] * 3), (2, [3], [2, 1])):
        launched.clear()
        with working_memory(math.ceil(image * images)):
            assert_same(outputs_and_gradients("triton", *arguments), whole)
        counted = [len(range(3)[rows]) for rows in launched]
        assert counted == forward + [n for n in backward for _ in range(2)]


@pytest.mark.parametrize(("gigabytes", "products"), [(1, 2**24), (8, 2**24), (80, 5 * 2**25)])
def test_chunks_follow_the_memory_of_the_device(monkeypatch, gigabytes, products):
    properties = SimpleNamespace(total_memory=gigabytes * 2**30, shared_memory_per_multiprocessor=164 * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert triton._shared_memory(torch.device("cuda", 0)) == 163 * 2**10
    assert triton._products_per_chunk(torch.device("cuda", 0), 4) == products
    assert triton._products_per_chunk(torch.device("cuda", 0), 8) == max(2**24, products // 2)
    assert triton._products_per_chunk(torch.device("cpu"), 4) == 2**24


def test_chunks_keep_a_large_device_busy(monkeypatch):
    """C8, all query poses, 5×5 on 24×24 with 9 heads and 64 images: few launches of many programs each."""
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    q = torch.empty(9, 64, 576, 8, 10, device="meta")
    tables = (torch.empty(9, 8, n, 10, device="meta") for n in (25, 8))
    chunk = triton._products_per_chunk(torch.device("cuda", 0), 4)
    call = Arguments(q, q, q, *tables, *[None] * 4, 8, [24, 24], [24, 24], [], 5, "square", 1, True, 0.0, chunk)
    images = [rows.stop - rows.start for rows in triton_windows._chunks(call, 8 + 33)]
    assert sum(images) == 576
    assert len(images) <= 3
    assert max(images) - min(images) < len(images)


def test_kernels_count_the_positions_of_a_chunk_in_32_bits():
    """Without tables nothing is held of a chunk, which may have all images."""
    q = torch.empty(1, 2**12, 2**20, 1, 1, device="meta")
    call = Arguments(q, q, q, *[None] * 6, 1, [2**10, 2**10], [2**10, 2**10], [], 3, "square", 1, False, 0.0, 2**24)
    images = [rows.stop - rows.start for rows in triton_windows._chunks(call, 0)]
    assert sum(images) == 2**12
    assert max(images) * 2**20 < 2**31


@interpreted
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("strange", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("spoilt", ["q", "k", "v", "kv"])
@pytest.mark.slow
def test_what_is_not_finite_reaches_only_who_sees_it(passes, query, strange, place, spoilt):
    """In the output and in all gradients: of a window of three, the neighbours of a position and no others."""
    tensors, grid, terms = case(2, 2, 2, (8,), Window(3), {"spatial", "pose"}, heads=1)
    named = dict(zip("qkv", tensors, strict=True))
    for name in spoilt:
        t = named[name].detach().clone()
        t[0, 1, place, 0, 1] = strange
        named[name] = t.requires_grad_()
    got = outputs_and_gradients("triton", tuple(named.values()), grid, terms, query)
    clean = outputs_and_gradients("triton", tensors, grid, terms, query)
    of_query = spoilt == "q"
    for reach, a, b in zip((0, 0, 1, 1) if of_query else (1, 1, 2, 2), got[:4], clean[:4], strict=True):
        seen = (torch.arange(8) - place).abs() <= reach
        assert torch.equal(a[:, 0], b[:, 0])
        torch.testing.assert_close(a[:, 1, ~seen], b[:, 1, ~seen], rtol=1e-12, atol=1e-12)
        # A score of minus infinity is a weight of zero.
        if reach == (0 if of_query else 1) and (spoilt, strange) != ("k", math.inf):
            assert not a[:, 1, seen].isfinite().flatten(2).all(-1).any()


@interpreted
@pytest.mark.sampled(1)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_dropout_is_the_same_in_every_pass_and_for_chunks_of_any_size(passes, query):
    grid = Grid((3,), Window(3))
    call = call_of(grid, grid, (2, 2, 2), {"spatial", "pose"}, heads=1, channels=1, query=query, dropout=0.4)

    def function(*tensors):
        torch.manual_seed(3)
        return ON_GRIDS.compute(with_leaves(call, tensors), "triton")

    inputs = leaves((call.q, call.k, call.v), call.bias)
    whole = function(*inputs)
    with working_memory(1):
        torch.testing.assert_close(function(*inputs), whole)
    weight = torch.randn_like(whole)
    grads = torch.autograd.grad((whole * weight).sum(), inputs)
    direction = [torch.randn_like(t) for t in inputs]
    with torch.no_grad():
        ends = (function(*(t + s * 1e-6 * d for t, d in zip(inputs, direction, strict=True))) for s in (1, -1))
        ahead, behind = ((end * weight).sum() for end in ends)
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    assert slope.item() == pytest.approx(((ahead - behind) / 2e-6).item(), rel=1e-6)


@interpreted
@pytest.mark.sampled(1)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_dropout_drops_at_its_rate_and_independently(passes, query, monkeypatch):
    monkeypatch.setattr(triton_tiles, "ROWS", 256)  # few programs
    grid = Grid((600 if passes == "tiles" else 1600,), Window(3))
    assert_independent("triton", grid, 2, 1, query, 0.4)


@interpreted
@pytest.mark.sampled(2)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.slow
def test_second_derivatives(passes, query):
    arguments = (*case(2, 2, 2, (3,), Window(3), {"spatial", "pose"}, heads=1, batch=1), query)
    assert_same(twice_differentiated("triton", *arguments), twice_differentiated("reference", *arguments))


class TestRefuses:
    """Why a call cannot be served."""

    @pytest.fixture
    def arguments(self):
        return case(2, 2, 2, (3, 3), Window(3), {"spatial"})

    def reason(self, arguments, query="own", device="cuda"):
        (q, k, v), grid, terms = arguments
        q = q.detach().to("meta") if device == "meta" else q
        return triton.why_unsupported(GridCall(q, k, v, terms, grid, grid, query=query))

    @interpreted
    def test_what_it_does_not_compute(self, arguments, monkeypatch):
        assert self.reason(arguments) is None
        reason = self.reason(case(2, 2, 2, (3, 3), Window(), {"waves"}))
        assert reason == "without a window it needs an encoding that does not factorise: MLP, separable"
        assert self.reason(case(2, 2, 2, (3, 3), Window(3), {"spatial"}, batch=0)) is None
        axes = self.reason(case(1, 1, 1, (1, 2, 1, 2), Window(3), {"spatial"}))
        assert axes == "it needs a grid of one to three axes, got 4"
        none = self.reason(case(2, 2, 2, (), Window(), {"spatial"}))
        assert none == "there is no base space for a window"
        assert self.reason(arguments, device="meta") == "it needs CPU or CUDA, got meta"
        monkeypatch.setattr(triton, "MAX_PRODUCTS", 2 * 9 * 9)
        assert self.reason(arguments) is None
        reason = self.reason(arguments, "all")
        assert reason == "a head would have 324 products of queries with tables, at most 162"
        large = torch.empty(1, 1, 1, 2, 1, device="meta").expand(-1, -1, 2**20, -1, 2**9)
        monkeypatch.setattr(triton, "why_not_run", lambda _: None)
        reason = triton.why_unsupported(
            GridCall(large, large, large, PositionalBias(2), *2 * [Grid((2**10, 2**10), Window(1))])
        )
        assert reason == "the numbers of a head of an image are more than 32 bits count"

    @pytest.mark.parametrize(
        ("poses", "channels", "dtype", "kilobytes"),
        [
            (24, 128, torch.float32, 80),
            (48, 128, torch.float64, 224),
            (48, 128, torch.bfloat16, 112),
            (4, 512, torch.float32, 256),
            (48, 64, torch.float32, 144),
            (48, 8, torch.float64, 0),
        ],
    )
    def test_vectors_that_no_program_holds(self, monkeypatch, poses, channels, dtype, kilobytes):
        """As many bytes as their machine code has, or more; narrow heads have no tiles."""
        monkeypatch.setattr(triton, "why_not_run", lambda _: None)
        q, grid = torch.empty(1, 1, 9, poses, channels, dtype=dtype, device="meta"), Grid((3, 3), Window(3))

        def reason(most):
            monkeypatch.setattr(triton, "_shared_memory", lambda _: 2**10 * most)
            return triton.why_unsupported(GridCall(q, q, q, PositionalBias(poses), grid, grid))

        assert reason(kilobytes) is None
        if kilobytes:
            assert "shared memory" in reason(kilobytes - 1)

    def test_where_it_does_not_run(self, arguments, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert self.reason(arguments) == "it needs CUDA, got cpu"
        with pytest.raises(ValueError, match=r"backend: .*got cpu"):
            attention(*arguments[0], *arguments[1:], backend="triton")
        monkeypatch.setattr(launch, "_has_compiler", lambda _: False)
        assert launch.why_not_run("cuda") == "Triton needs a C compiler, and there is none"
        monkeypatch.setattr(launch, "_installed", lambda: False)
        assert self.reason(arguments) == "it needs Triton"


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("order", "shape", "window", "kinds", "channels"),
    [
        (4, (12, 9), Window(5), {"spatial", "pose"}, 10),
        (8, (24, 24), Window(5), {"spatial", "pose"}, 10),
        (4, (24, 9), Window(5, "circular square"), {"spatial", "pose"}, 10),
        (3, (130,), Window(9, dilation=3), {"spatial", "shared"}, 16),
        (6, (7, 6, 5), Window(3, "disc"), {"waves", "pose"}, 3),
        (4, (9, 8), Window(), {"spatial", "pose"}, 32),
        (2, (6, 6), Window(3), {"spatial", "pose"}, 64),
        (2, (11,), Window(3), {"rotary"}, 128),
        (4, (5, 5), Window(3), set(), 1),
    ],
)
def test_on_cuda(monkeypatch, dtype, tolerance, query, order, shape, window, kinds, channels):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("triton"))
    tensors, grid, terms = case(order, order, order, shape, window, kinds, channels=channels, dtype=dtype)
    if "rotary" in kinds and dtype == torch.bfloat16:
        # The gradient of the frequencies is a small difference of what queries and keys have, which are rounded.
        tolerance *= 2
    assert_as_exact("there", tensors, grid, terms, query, tolerance)


@needs_cuda
@pytest.mark.parametrize("query", ["own", "all"])
def test_dropout_on_cuda(query):
    rate, keys = 0.3, 4 * 9 * (4 if query == "all" else 1)
    q, k, v = (torch.zeros(4, 4, 900, 4, 8, device="cuda") for _ in range(3))
    v.requires_grad_()
    grid = Grid((30, 30), Window(3), device="cuda")
    out = attention(q, k, v + 1, grid, PositionalBias(4), query=query, dropout=rate, backend="triton")
    inside = (out / (4 if query == "all" else 1))[..., 0].transpose(2, 3).unflatten(-1, (30, 30))[..., 1:-1, 1:-1]
    assert inside.var().item() == pytest.approx(rate / (1 - rate) / keys, rel=0.06)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # What is linear in the values: their gradient is what they are weighed with.
    torch.testing.assert_close((grad * (v + 1)).sum(), out.sum(), rtol=1e-4, atol=0)


@needs_cuda
@pytest.mark.parametrize("query", ["own", "all"])
def test_second_derivatives_on_cuda(monkeypatch, query):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("triton"))
    arguments = (*case(4, 4, 4, (5, 4), Window(3), {"spatial", "pose"}), query)
    assert_same(twice_differentiated("there", *arguments), twice_differentiated("reference", *arguments))


@needs_cuda
def test_networks_compile_and_are_recorded_on_cuda():
    """With the graphs of ``reduce-overhead``: the first call makes what later ones have."""
    space = spaces.ALL["C4"]()
    fields = spaces.regular(space, 2)
    layer = GroupSelfAttention(fields, fields, 2, 3).export().cuda()
    compiled_layer = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(2, fields.size, 8, 8, device="cuda", requires_grad=True)
        got, expected = (
            [t.clone() for t in (y, *torch.autograd.grad(y.square().sum(), x))] for y in (compiled_layer(x), layer(x))
        )
        assert_same(got, expected, 1e-5)


@needs_cuda
def test_the_same_bits_again_on_cuda(monkeypatch):
    monkeypatch.setitem(BACKENDS, "there", on_cuda("triton"))
    arguments = (*case(4, 4, 4, (20, 20), Window(5), {"spatial", "pose"}, channels=10, dtype=torch.float32), "all")
    one, other = (outputs_and_gradients("there", *arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_cuda
def test_is_what_cuda_takes_by_default():
    q = torch.empty(1, 1, 9, 2, 4, device="cuda")
    _, grid, terms = case(2, 2, 2, (3, 3), Window(3), {"spatial"})
    assert triton.why_unsupported(GridCall(q, q, q, terms, grid, grid)) is None
    out = attention(q, q, q, Grid((3, 3), Window(3), device="cuda"), PositionalBias(2))
    assert out.shape == (1, 1, 9, 2, 4)
    assert math.isfinite(out.nan_to_num().sum().item())


class Operations(TorchDispatchMode):
    """The operations of PyTorch that do something, by their names, with how many numbers their inputs have.

    Kernels count as one; what runs inside an operator does not count.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.found, self.inside = [], False
        run = InterpretedFunction.run
        monkeypatch.setattr(InterpretedFunction, "run", lambda *a, **k: self.count(a[0].fn.__name__, 0, run, *a, **k))

    def count(self, name, numbers, function, *args, **kwargs):
        if self.inside:
            return function(*args, **kwargs)
        self.found.append((name, numbers))
        self.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.is_view or any(name in function.name() for name in ("_unsafe_view", "empty", "promote_types")):
            return function(*args, **(kwargs or {}))
        numbers = max((t.numel() for t in args if isinstance(t, torch.Tensor)), default=0)
        return self.count(function.name(), numbers, function, *args, **(kwargs or {}))


FIELDS = spaces.regular(gspaces.rot2dOnR2(4), 4)


def operations_of(layer, images, monkeypatch) -> list[tuple[str, int]]:
    """Those of a step, forward and backward, after a first one."""
    x, ones = images.clone().requires_grad_(), torch.ones_like(images)
    layer(GeometricTensor(x, FIELDS))
    with monkeypatch.context() as patches, Operations(patches) as operations:
        y = layer(GeometricTensor(x, FIELDS)).tensor
        torch.autograd.grad(y, [x, *layer.parameters()], ones)
    return operations.found


@interpreted
@pytest.mark.slow
def test_windows_copy_nothing(monkeypatch):
    """Features of images reach the kernels, and the gradients the weights, without a copy, however they lie."""
    layer = GroupSelfAttention(FIELDS, FIELDS, 2, 3, backend="triton")
    images = torch.randn(2, FIELDS.size, 8, 8)  # of fewer positions the CPU makes rows

    def counts(lies):
        found = operations_of(layer, lies, monkeypatch)
        return len(found), sum("clone" in name and numbers >= lies.numel() for name, numbers in found)

    assert counts(images) <= (36, 0)
    assert counts(images.contiguous(memory_format=torch.channels_last)) == counts(images)
    layer.plain.has_table = False  # channels side by side, as fused attention takes them
    assert counts(images) > (36, 0)


@interpreted
@pytest.mark.parametrize(
    ("layer", "most"),
    [
        (partial(GroupSelfAttention, kernel_size=3, backend="triton"), (19, 24)),
        (partial(GroupSelfAttention, kernel_size=3, query="all", backend="triton"), (19, 24)),
        (partial(GroupSelfAttention, kernel_size=None, encoding="rotary", keys="own", backend="dense"), (33, 33)),
        (partial(GroupSelfAttention, kernel_size=None, encoding="fourier", backend="dense"), (37, 40)),
        (partial(TransformerBlock, kernel_size=3, norm="pre", backend="triton"), (43, 50)),
        (partial(TransformerBlock, kernel_size=3, backend="triton"), (67, 72)),
    ],
)
@pytest.mark.slow
def test_operations_of_a_step(layer, most, monkeypatch, interpreted_kernels):
    """Each is launched on a GPU, which waits for it where images are small: operators as one, and all inside them."""
    layer, images = layer(FIELDS, FIELDS, num_heads=2), torch.randn(1, FIELDS.size, 3, 3)
    operators = len(operations_of(layer, images, monkeypatch))
    monkeypatch.setattr(autograd, "is_in_torch_dispatch_mode", lambda: False)
    launched = len(operations_of(layer, images, monkeypatch))
    assert operators <= most[0], (operators, launched)
    assert launched <= most[1], (operators, launched)
