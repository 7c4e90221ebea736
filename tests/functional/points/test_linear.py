"""Attention without a softmax in whole clouds."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import FourierEncoding, PointSelfAttention, RotaryEncoding
from escnn_attention.functional import BETWEEN_POINTS
from escnn_attention.functional.points import linear, portable
from escnn_attention.functional.points.call import MANY
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.geometry.points import Points
from tests.functional.points.test_dense import BATCHES
from tests.layers import drawn
from tests.packages import write_down

SPACE = gspaces.rot2dOnR2(4)
TYPE = FieldType(SPACE, 2 * [SPACE.regular_repr])
ENCODINGS = {
    "rotary": RotaryEncoding,
    "rotary values": lambda: RotaryEncoding(values=True),
    "fourier": lambda: FourierEncoding(3),
    "absolute": lambda: "absolute",
    "none": lambda: "none",
}


def call_of(number=12, batch=None, encoding="rotary", **options):
    torch.manual_seed(0)
    options = {"head_fields": 2, "normalization": "count", "encoding": ENCODINGS[encoding](), **options}
    layer = drawn(PointSelfAttention(TYPE, TYPE, 1, **options)).plain
    x = torch.randn(number, TYPE.size, dtype=torch.float64, requires_grad=True)
    coords, measure = torch.randn(number, 2, dtype=torch.float64), torch.rand(number, dtype=torch.float64)
    points = Points(coords.requires_grad_(), coords, None, batch, Neighbourhood())
    return layer.call(x, points, measure), [x, coords, *layer.parameters()]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_is_the_formula(encoding, query, keys, batch):
    call, leaves = call_of(batch=BATCHES[batch], encoding=encoding, query=query, keys=keys)
    found = []
    for backend in ("linear", "reference"):
        y = BETWEEN_POINTS.compute(call, backend)
        gradients = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True, retain_graph=True)
        found.append([y, *(torch.zeros(()) if g is None else g for g in gradients)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.detach().abs().max().clamp(min=1)))


@pytest.mark.parametrize(("number", "options"), [(MANY - 1, {}), (MANY, {"head_fields": 64})])
def test_large_clouds_are_summed_first_and_these_are_not(number, options):
    assert BETWEEN_POINTS.plan(call_of(MANY)[0], "auto").name == "linear"
    assert BETWEEN_POINTS.plan(call_of(number, **options)[0], "auto").name != "linear"


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"normalization": "softmax"}, "count"), ({"dropout": 0.1}, "drop"), ({"edge_dim": 2}, "edges")],
)
def test_what_it_does_not_serve(options, reason):
    layer = PointSelfAttention(
        TYPE, TYPE, 1, head_fields=2, **{"normalization": "count", "encoding": "rotary"} | options
    )
    x = torch.randn(4, 8)
    edge_attr = torch.randn(1, 4, 4, 2) if "edge_dim" in options else None
    places = (torch.randn(4, 2), torch.randn(4, 2), None, None, Neighbourhood(), edge_attr)
    assert reason in linear.why_unsupported(layer.plain.call(x, Points(*places), None))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", ["own", "all"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", [*ENCODINGS, "mlp"])
def test_programs_sum_first(encoding, query, keys, masked, monkeypatch):
    """Of clouds of any sizes, in any order, with points of none; and compute the scores of other encodings."""
    made = ENCODINGS[encoding]() if encoding in ENCODINGS else encoding
    options = {"query": query, "keys": keys, "encoding": made}
    layer = drawn(PointSelfAttention(TYPE, TYPE, 1, head_fields=2, normalization="count", **options))
    given, scores, called = [], portable.attend_in_export, []
    for batch in ([0, 1, 1, 0, 2, 1], [0] * 5, [3, 0, 0, 0, 0, 0, 0, 1, 1], None):
        number = 5 if batch is None else len(batch)
        x, coords = (torch.randn(number, n, dtype=torch.float64) for n in (TYPE.size, 2))
        mask = torch.rand(number) > 0.3 if masked else None
        given.append((x, coords, None, None if batch is None else torch.tensor(batch), mask))
    expected = [layer.plain(*tensors) for tensors in given]
    if masked:  # no point is there
        given.append((*given[0][:-1], torch.zeros(6, dtype=torch.bool)))
        expected.append(torch.zeros(6, TYPE.size, dtype=torch.float64))
    monkeypatch.setattr(portable, "attend_in_export", lambda *a: [called.append(1), scores(*a)][1])
    write_down(monkeypatch)
    for tensors, y in zip(given, expected, strict=True):
        torch.testing.assert_close(layer.plain(*tensors), y, rtol=1e-12, atol=1e-12)
    assert len(called) == (len(given) if encoding == "mlp" else 0)
