"""Kernels over neighbours that Triton compiles, against the formula: interpreted on the CPU, compiled for a GPU.

Interpreted, a program takes as long for many keys as for one: there are few queries and poses.
"""

import copy
import itertools
from dataclasses import replace
from importlib import import_module
from operator import itemgetter

import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor
from torch.autograd.profiler import profile

from escnn_attention import Pair, PointSelfAttention
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.functional.points import portable, triton
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Points
from tests.functional.cuda import needs_cuda
from tests.layers import drawn
from tests.nn.points import ENCODINGS, mixed

pytest.importorskip("triton")
import_module("tests.functional.interpreter").hasten()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")

EDGES = torch.tensor([[0, 1, 2, 2, 1, 0], [1, 1, 1, 0, 2, 1]])  # of different numbers, one of them twice
CLOUDS = torch.tensor([1, 0, 1])
SEEN = {"lists": {"edge_index": EDGES}, "clouds": {"batch": CLOUDS}, "one cloud": {}}


def layer_of(encoding="mlp", heads=3, backend="triton", space=None, **options):
    torch.manual_seed(0)
    fields = mixed(space or gspaces.rot2dOnR2(2))
    encoding = ENCODINGS[encoding]()
    return drawn(
        PointSelfAttention(fields, fields, heads, head_fields=3, encoding=encoding, backend=backend, **options)
    )


def points_of(layer, number=3, device="cpu", dtype=torch.float64):
    torch.manual_seed(1)
    dim = layer.in_type.gspace.dimensionality
    x, coords = torch.randn(number, layer.in_type.size, dtype=dtype), torch.randn(number, dim, dtype=dtype)
    return GeometricTensor(x.to(device).requires_grad_(), layer.in_type, coords.to(device))


def outcome(layer, x, backend, **others):
    """The output, and the gradients by the features and the weights."""
    layer.plain.backend = backend
    y = layer(x, **others).tensor
    leaves = [x.tensor, *layer.parameters()]
    return [y, *torch.autograd.grad(y.sin().sum(), leaves, materialize_grads=True, create_graph=False)]


def assert_close(got, expected, tolerance=1e-12):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * max(1, b.double().norm())


@interpreted
@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("normalization", ["softmax", "count"])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.slow
def test_agrees_with_the_formula(encoding, query, keys, normalization, seen):
    layer = layer_of(encoding, query=query, keys=keys, normalization=normalization)
    x, others = points_of(layer), {**SEEN[seen], "measure": torch.tensor([0.5, 1.5, 0.7]).double()}
    expected = outcome(layer, x, "reference", **others)
    assert_close(outcome(layer, x, "triton", **others), expected)
    others["measure"] *= torch.tensor([4.0, 1.0, 1.0])
    changed = outcome(layer, x, "reference", **others)
    assert (changed[0] - expected[0]).norm() > 1e-3 * expected[0].norm()


@pytest.fixture
def one_order():
    """PyTorch's sums have one order, and memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which products on CUDA need another variable for
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("query", "keys"), [("own", "own"), ("own", "all"), ("all", "all")])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("encoding", ["mlp", "shared", "separable"])
@pytest.mark.slow
def test_programs_as_on_a_gpu(monkeypatch, one_order, query, keys, heads, encoding):
    """More heads than a program has, and channels that are shared unevenly."""
    layer = layer_of(encoding, heads=heads, query=query, keys=keys)
    x, chosen = points_of(layer), []
    expected = outcome(layer, x, "reference", edge_index=EDGES)
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    program = triton.program
    monkeypatch.setattr(triton, "program", lambda *sizes: chosen.append(program(*sizes)) or chosen[-1])
    assert_close(outcome(layer, x, "triton", edge_index=EDGES), expected)
    assert all(each.sharing * each.lanes == 32 for each in chosen)


@pytest.mark.parametrize("held", [1, 4])
@pytest.mark.parametrize("widest", [1, 3, 16, 48, 128])
@pytest.mark.parametrize("keys", [1, 9, 512])
def test_registers_hold_the_vectors_of_a_thread(monkeypatch, held, widest, keys):
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    chosen = triton.program(held, widest, 4, keys)
    assert chosen.sharing * chosen.lanes == 32
    assert held * widest / chosen.sharing <= triton._NUMBERS or chosen.sharing == min(16, triton.power_of_two(widest))


def most_held(layer, degree, number=64):
    """The most bytes of tensors that a step has at once where every point sees so many neighbours."""
    x = points_of(layer, number)
    keys = (torch.arange(number)[:, None] + torch.arange(degree)) % number
    edges = torch.stack([keys.flatten(), torch.arange(number).repeat_interleave(degree)])
    with profile(profile_memory=True) as seen:
        layer(x, edge_index=edges).tensor.sum().backward()
    layer.zero_grad(set_to_none=True)
    changes = [(e.start_ns(), e.nbytes()) for e in seen.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(n for _, n in sorted(changes, key=itemgetter(0))))


@pytest.mark.parametrize("backend", ["triton", "neighbours"])
@pytest.mark.slow
def test_scores_that_are_given_are_held_for_a_chunk_at_a_time(monkeypatch, backend):
    """Eight times as many edges take no more memory, but for their numbers, if chunks are small; else they do."""
    monkeypatch.setattr(triton, "why_not_run", lambda _: None)
    monkeypatch.setattr(triton, "_launch", lambda *_: None)  # kernels hold nothing
    layer = layer_of("LieTransformer", heads=2, backend=backend)

    def growth(numbers):
        monkeypatch.setattr(triton, "_GIVEN_SCORES_PER_CHUNK", numbers)
        monkeypatch.setattr(portable, "_NUMBERS_PER_CHUNK", numbers)
        few, many = (most_held(layer, degree) for degree in (8, 64))
        return many / few

    assert growth(2**13) < 2
    assert growth(2**30) > 4


def points_at(coords, batch=None):
    return Points(coords, coords, None, batch, Neighbourhood())


def call_of(layer, number=3):
    x = points_of(layer, number)
    return layer.plain.call(x.tensor, points_at(x.coords), None)


@interpreted
@pytest.mark.slow
def test_dropout_is_the_same_in_all_passes():
    """The gradient is that of a function."""
    layer = layer_of(heads=1, dropout=0.4)
    x, v = points_of(layer), torch.randn(3, layer.in_type.size, dtype=torch.float64)

    def run(values):
        torch.manual_seed(3)
        return layer(GeometricTensor(values, layer.in_type, x.coords), edge_index=EDGES).tensor

    kept = run(x.tensor)
    layer.train()
    y, step = run(x.tensor), 1e-5
    assert (y - kept).norm() > 1e-3
    slope = (run(x.tensor + step * v) - run(x.tensor - step * v)) / (2 * step)
    weight = torch.randn_like(y)
    (grad,) = torch.autograd.grad((y * weight).sum(), x.tensor)
    torch.testing.assert_close((grad * v).sum(), (slope * weight).sum(), rtol=1e-7, atol=1e-7)
    torch.manual_seed(4)
    assert (layer(x, edge_index=EDGES).tensor - y).norm() > 1e-3
    with pytest.raises(RuntimeError, match=r"triton.*second derivatives with dropout.*neighbours"):
        torch.autograd.grad(run(x.tensor).sum(), x.tensor, create_graph=True)


@interpreted
def test_derivatives_of_the_second_order():
    layer = layer_of(heads=1)
    x = points_of(layer)

    def twice(backend):
        layer.plain.backend = backend
        y = layer(x, edge_index=EDGES).tensor
        (first,) = torch.autograd.grad(y.sin().sum(), x.tensor, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x.tensor, *layer.parameters()], materialize_grads=True)

    assert_close(twice("triton"), twice("neighbours"))


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.slow
def test_lower_precision(dtype, tolerance):
    layer = layer_of(heads=1, keys="own")
    x = points_of(layer)
    expected = outcome(layer, x, "reference", edge_index=EDGES)
    x = GeometricTensor(x.tensor.detach().to(dtype).requires_grad_(), x.type, x.coords.to(dtype))
    got = outcome(layer.to(dtype), x, "triton", edge_index=EDGES)
    assert all(t.dtype == dtype for t in got)
    assert_close(got, expected, tolerance)


@interpreted
def test_what_is_not_finite_reaches_only_those_who_see_it():
    layer = layer_of(heads=1)
    x = points_of(layer)
    x.tensor.data[2] = torch.nan
    y = layer(x, edge_index=EDGES[:, [0, 1, 3, 4, 5]]).tensor  # point 1 does not see point 2
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


@interpreted
@pytest.mark.parametrize("number", [0, 2])
def test_keys_at_other_points(number):
    """Two clouds of queries and three of keys, of different sizes; without queries, nothing."""
    call = call_of(layer_of(), 5)
    coords = call.key_points.coordinates
    sets = (points_at(coords[:number], CLOUDS[:number]), points_at(coords, torch.tensor([0, 1, 1, 2, 0])))
    call = replace(call, q=call.q[:, :, :number], query_points=sets[0], key_points=sets[1])
    y, expected = (BETWEEN_POINTS.compute(call, backend) for backend in ("triton", "reference"))
    assert y.shape == (3, 1, number, 2, 3)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_what_it_does_not_serve(monkeypatch):
    call, measure = call_of(layer_of()), torch.zeros(3, 1, requires_grad=True)
    monkeypatch.setattr(triton, "why_not_run", lambda _: None)
    assert triton.why_unsupported(call) is None
    assert triton.why_not_first(call) is None
    bias = copy.copy(call.bias)
    bias.log_measure = measure
    for change, reason in (
        ({"values": object()}, "values"),
        ({"edges": measure}, "edges have features"),
        ({"envelope": torch.add}, "envelope"),
        ({"bias": bias}, "measure requires a gradient"),
    ):
        assert reason in triton.why_unsupported(replace(call, **change))
    monkeypatch.setattr(triton, "why_not_run", lambda device: f"it needs CUDA, got {device}")
    with pytest.raises(ValueError, match=r"backend: 'triton'.*needs CUDA"):
        BETWEEN_POINTS.compute(replace(call, dropout=0.5), "triton")


def test_a_gpu_prefers_it_for_neighbours():
    names = BETWEEN_POINTS.preference("cuda")
    assert names.index("dense") < names.index("triton") < names.index("neighbours")
    assert "triton" not in BETWEEN_POINTS.preference("cpu")


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("content", "dtype", "rate", "count"),
    [
        ("layer", torch.float32, 0.0, False),
        ("features", torch.float64, 0.0, False),
        ("", torch.float32, 0.1, True),
        ("layer", torch.float32, 0.1, False),
    ],
)
def test_kernels_compile_for_a_gpu(compiled, chip, summed, own, content, dtype, rate, count):
    found = launched(compiled, chip, summed=summed, own=own, content=content, dtype=dtype, rate=rate, count=count)
    assert [one.kernel for one in found] == ["forward", "backward_queries", "backward_keys"]
    if dtype == torch.float32:  # In double precision some kernels spill.
        assert all(one.spilled == 0 and one.occupancy >= 2 for one in found), found


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("poses", [4, 24])
@pytest.mark.parametrize(
    ("content", "own", "channels", "heads"),
    [("layer", True, 4, 2), ("layer", True, 8, 4), ("layer", False, 4, 2), ("", True, 4, 2), ("", False, 4, 4)],
)
def test_four_programs_fit_into_registers(compiled, chip, poses, content, own, channels, heads):
    found = launched(compiled, chip, own=own, content=content, poses=poses, channels=channels, heads=heads)
    assert all(one.spilled == 0 and one.occupancy >= 4 for one in found), found


def launched(compiled, chip, *, own, content, summed=False, dtype=torch.float32, rate=0.0, count=False, **sizes):
    """What the kernels need of a GPU for 64 queries of 32 keys each."""
    numbers, poses = torch.empty(1, dtype=dtype, device="meta"), sizes.get("poses", 4)
    heads, rows, of_key = sizes.get("heads", 2), poses if summed else 1, 1 if own else poses
    vectors = numbers.expand(heads, 64, poses, sizes.get("channels", 8))
    keys = torch.empty(64, 32, dtype=torch.long, device="meta")
    of_offsets = [None, None, None, numbers.expand(heads, poses * rows, poses, 64, 1, 32), None, None, None]
    if content:
        layer = [numbers.expand(16, 3), numbers.expand(16), numbers.expand(poses, 3, 64, 1, 32)]
        features = numbers.expand(1, poses, 16, 64, 1, 32)
        given = [None, *layer] if content == "layer" else [features, None, None, None]
        known = numbers.expand(heads, 64, poses, rows, of_key)
        of_offsets = [numbers.expand(heads, 64, poses, 16), given[0], known, None, *given[1:]]
    q, seed = vectors if content else None, keys[0, :1] if rate else None
    arguments = triton.Arguments(q, q, vectors, *of_offsets, keys, None, seed, poses, 1, True, summed, own, count, rate)
    return compiled("points.triton:_operator", arguments, chip)


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("query", "keys"), [("own", "own"), ("own", "all"), ("all", "all")])
@pytest.mark.parametrize("encoding", ["mlp", "LieTransformer", "fourier"])
@pytest.mark.parametrize("options", [{"num_neighbours": 7}, {}, {"normalization": "count"}])
def test_on_cuda(one_order, dtype, tolerance, query, keys, encoding, options):
    layer = layer_of(encoding, space=gspaces.flipRot2dOnR2(4), query=query, keys=keys, **options)
    x = points_of(layer, 150)
    expected = outcome(layer, x, "reference")
    layer, x = layer.to("cuda", dtype), points_of(layer, 150, "cuda").to("cuda")
    x = GeometricTensor(x.tensor.detach().to(dtype).requires_grad_(), x.type, x.coords.to(dtype))
    got, again, chosen = (outcome(layer, x, backend) for backend in ("triton", "triton", "auto"))
    assert all(map(torch.equal, got, again))
    for found in (got, chosen):
        assert_close([t.cpu() for t in found], expected, tolerance)


def test_who_makes_features():
    """Kernels do so where the encoding says how, and coordinates have no gradient."""

    def coordinates(encoding, **options):
        layer = call_of(layer_of(encoding, **options)).bias.first_layer()
        return None if layer is None else layer[0].shape[1]

    assert coordinates("mlp") == 2
    assert coordinates("shared") is None  # of two layers
    assert coordinates("separable") is None
    assert coordinates("mlp", relation=Pair()) is None
