"""Cross-attention between sequences, grids and points: the formula, and what it shares with self-attention."""

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from escnn import gspaces
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, PointwiseAvgPool2D

from escnn_attention import (
    ConvolutionalEncoding,
    GroupCrossAttention,
    GroupSelfAttention,
    RotaryEncoding,
    Samples,
    assert_equivariant,
    equivariance_report,
    sequence_space,
    space_time,
)
from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.grid import dense, triton
from escnn_attention.geometry.cache import Recording
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.grid_pair import GridPair
from escnn_attention.groups.fibers import fibers
from escnn_attention.plain import cross_attention
from escnn_attention.plain.self_attention import fields_of
from tests import spaces
from tests.functional.grid.test_dense import Watch
from tests.layers import CASES, assert_formula, drawn
from tests.nn.attention import ENCODINGS, written_out_between
from tests.nn.points import cloud
from tests.spaces import generators, grid_generators, mixed, random_field, regular, scalars

C4, D4, D6 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4), gspaces.flipRot2dOnR2(6)
TOLERANCE = 1e-10
CIRCLE = {"padding_mode": "circular"}


def sequence(space):
    return sequence_space(space.fibergroup)


def error_of(layer, *inputs, elements=None):
    """The largest relative equivariance error for elements that transform queries, keys and values."""
    elements = elements or generators(layer.space)
    with torch.no_grad():
        y = layer(*inputs)
        errors = [
            (layer(*(x.transform(g) for x in inputs)).tensor - y.transform(g).tensor).norm() / spaces.size_of(y.tensor)
            for g in elements
        ]
    return max(e.item() for e in errors)


SEQUENCE = sequence(C4)


@pytest.mark.parametrize(
    ("space", "shape", "key_space", "key_shape", "size", "options", "expected"),
    [
        (C4, (4, 4), C4, (4, 4), 3, {}, "triton"),
        (C4, (4, 4), C4, (4, 4), 3, CIRCLE, "triton"),
        (C4, (4, 4), C4, (4, 4), None, {"encoding": "fourier"}, "dense"),
        (C4, (4, 4), C4, (4, 4), None, {"encoding": "mlp", **CIRCLE}, "triton"),
        (C4, (4, 4), C4, (4, 4), None, {"encoding": "none", **CIRCLE}, "dense"),
        (SEQUENCE, (5,), SEQUENCE, (5,), None, {"causal": True}, "triton"),
        (SEQUENCE, (5,), SEQUENCE, (5,), 3, {"is_causal": True, "encoding": "mlp"}, "triton"),
        (SEQUENCE, (5,), SEQUENCE, (7,), None, {}, "dense"),
        (SEQUENCE, (5,), C4, (4, 4), None, {"encoding": "rotary"}, "dense"),
        (SEQUENCE, (5,), C4, (4, 4), None, {"encoding": "mlp"}, "blocked"),
        (C4, (4, 4), C4, (2, 2), None, {"encoding": "absolute"}, "dense"),
        (C4, (4, 4), C4, (2, 2), 3, {"encoding": "none"}, "blocked"),
        (C4, (4, 4), C4, (2, 2), 3, {"encoding": "mlp"}, "blocked"),
        (C4, (4, 4), C4, (2, 2), None, {"encoding": "mlp"}, "blocked"),
        (C4, (4, 4), C4, (2, 2), None, {"encoding": "fourier", **CIRCLE}, "blocked"),
        (C4, (4, 4), C4, (2, 2), None, {"encoding": "none", **CIRCLE}, "dense"),
    ],
    ids=str,
)
def test_what_cuda_would_take(space, shape, key_space, key_shape, size, options, expected, monkeypatch):
    """On the same positions what self-attention takes; between others fused attention, without a window or a table."""
    monkeypatch.setattr(triton, "why_not_run", lambda device: None)
    monkeypatch.setattr(dense, "why_no_kernel", lambda q, dropout: None)
    monkeypatch.setattr(ON_GRIDS, "preference", lambda device: ("triton", "dense", "blocked"))
    types, masks = (regular(space, 2), regular(key_space, 2)), (None, torch.rand(2, *key_shape) < 0.3)
    layer = drawn(GroupCrossAttention(*types, types[0], 1, size, head_fields=4, **options))
    x, y = (random_field(t, *s).tensor for t, s in zip(types, (shape, key_shape), strict=True))
    for mask in masks:
        call = layer.plain.call(x, y, None, layer.plain.grids(x, y), mask)
        assert ON_GRIDS._choose(call, "auto").name == expected
        if expected == "blocked" and space is key_space:
            for name, reason in (
                ("triton", "keys have other positions"),
                ("dense", "windows of keys|factorises|torus"),
            ):
                with pytest.raises(ValueError, match=reason):
                    ON_GRIDS.compute(call, name)


@pytest.mark.parametrize(
    ("types", "options", "shape"),
    [
        ((C4, C4), {"kernel_size": 3, "value_type": scalars(C4, 2)}, (2, 8, 8)),
        ((sequence(C4), C4), {"encoding": "mlp"}, (2, 5)),
        ((C4, C4), {"radius": 2.0}, (9,)),
        ((C4, C4), {"radius": 2.0}, (2, 3, 3)),
        ((C4, C4), {"kernel_size": 3}, (9,)),
    ],
    ids=str,
)
def test_the_report_draws_keys(types, options, shape):
    """Where they may be."""
    queries, keys = (mixed(space) for space in types)
    layer = drawn(GroupCrossAttention(queries, keys, queries, head_fields=4, **options))
    shape = (shape[0], queries.size, *shape[1:])
    assert_equivariant(layer, shape, tolerance=TOLERANCE)
    assert len(layer.check_equivariance()) == 4


def test_a_report_names_keys_about_another_centre():
    """Every second position of an even grid; on an odd one they are about the same centre."""

    class Strided(EquivariantModule):
        def __init__(self, fields):
            super().__init__()
            self.in_type = self.out_type = fields
            self.pool = PointwiseAvgPool2D(fields, 1, stride=2)
            self.layer = GroupCrossAttention(fields, fields, fields, 1, 3, spacing=2)

        def forward(self, x):
            return self.layer(x, self.pool(x))

        def evaluate_output_shape(self, input_shape):
            return input_shape

    fields = regular(C4, 1)
    report = equivariance_report(Strided(fields), (1, 4, 8, 8))
    assert report.relative_error > 1e-3
    assert report.inexact_layers == ("Strided", "pool (PointwiseAvgPool2D)")
    assert equivariance_report(Strided(fields), (1, 4, 9, 9)).relative_error < TOLERANCE


@pytest.mark.sampled(6)
@pytest.mark.parametrize("space", [spaces.PLANE[n]() for n in ("C3", "C8", "D6")], ids=["C3", "C8", "D6"])
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "absolute"])
@pytest.mark.parametrize("size", [None, 3])
def test_equivariant_to_elements_that_turn_the_grids(space, encoding, size):
    """Features on two turned grids are the transformed features."""
    fields = mixed(space)
    layer = drawn(GroupCrossAttention(fields, fields, fields, 1, size, head_fields=4, encoding=encoding))
    x, y = random_field(fields, 3, 4), random_field(fields, 6, 8)
    tables = fibers(space)

    def output(x, y, g):
        frame = torch.tensor(tables.action[tables.elements.index(g)])
        grids = [
            Grid(shape, layer.plain.window, dtype=torch.float64, frame=frame, spacing=spacing)
            for shape, spacing in (((3, 4), 2), ((6, 8), 1))
        ]
        call = layer.plain.call(x.tensor, y.tensor, None, tuple(grids))
        return fields_of(layer.plain.project(ON_GRIDS.compute(call)), (3, 4))

    with torch.no_grad():
        expected = layer(x, y)
        torch.testing.assert_close(output(x, y, space.fibergroup.identity), expected.tensor)
        for g in generators(space):
            found = output(x.transform_fibers(g), y.transform_fibers(g), g)
            assert (found - expected.transform_fibers(g).tensor).norm() < TOLERANCE * expected.tensor.norm()


def spoilt_action(layer, _):
    layer.plain.inverse_action[:] = torch.eye(layer.plain.inverse_action.shape[-1])


def spoilt_centre(_, monkeypatch):
    def shifted(*grids):
        pair = GridPair(*grids)
        pair.offsets = pair.offsets + 0.3
        return pair

    monkeypatch.setattr(cross_attention, "GridPair", shifted)


def spoilt_poses(layer, _):
    layer.plain.quotient = layer.plain.quotient.flip(1)


@pytest.mark.parametrize("spoil", [spoilt_action, spoilt_centre, spoilt_poses])
@pytest.mark.parametrize("kind", ["sequence", "grid", "points"])
def test_what_is_not_equivariant_is_noticed(spoil, kind, monkeypatch):
    query_type, key_type = mixed(sequence(D4) if kind == "sequence" else D4), mixed(D4)
    layer = drawn(GroupCrossAttention(query_type, key_type, query_type, head_fields=4, encoding="mlp"))
    x, y = random_field(query_type, *spaces.shape_of(query_type.gspace, 2)), random_field(key_type, 4, 4)
    if kind == "points":
        if spoil is spoilt_centre:
            pytest.skip("points have no centre")
        x, y = cloud(query_type, 5), cloud(key_type, 9, 1)
    assert error_of(layer, x, y) < TOLERANCE
    assert len(layer.check_equivariance()) == 8
    spoil(layer, monkeypatch)
    assert error_of(layer, x, y) > 1e-4
    if spoil is spoilt_poses:  # the report has its own grids, and a copy in float64 its own matrices
        with pytest.raises(AssertionError, match="the error is"):
            layer.check_equivariance()


def with_weights_of(own, *types, **options):
    """A cross-attention with the weights of a self-attention."""
    layer = GroupCrossAttention(*types, own.num_heads, head_fields=own.head_fields, **options).double().eval()
    core, rows = layer.plain, len(layer.plain.project_queries.weight)
    with torch.no_grad():
        projects = core.project_queries, core.project_values, core.project_keys
        for project, weight in zip(projects, own.plain.project_in.weight.split(rows), strict=True):
            project.weight.copy_(weight)
        bias = own.plain.project_in.bias
        if bias is not None:
            for project, part in zip(projects, bias.split([rows, rows, len(bias) - 2 * rows]), strict=True):
                assert (project.bias is None) == (not len(part))
                if len(part):
                    project.bias.copy_(part)
        core.project_out.load_state_dict(own.plain.project_out.state_dict())
        core.encoding.load_state_dict(own.plain.encoding.state_dict())
        for name in ("qk_norm", "registers"):
            if getattr(core, name) is not None:
                getattr(core, name).load_state_dict(getattr(own.plain, name).state_dict())
    return layer


@pytest.mark.sampled(12)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("modes", [("own", "all"), ("own", "own"), ("all", "all"), ("all", "own")], ids="-".join)
@pytest.mark.parametrize("kind", ["mixed", "scalars", "pointwise", "normalised"])
def test_self_attention_is_the_case_of_one_set(encoding, size, modes, kind):
    fields = {"mixed": mixed(C4), "scalars": scalars(C4, 3)}.get(kind, regular(C4, 2))
    extra = {"pointwise": {"projection": "pointwise"}, "normalised": {"qk_norm": True, "registers": 2}}.get(kind, {})
    if modes[1] == "own":
        extra.pop("registers", None)
    options = {"encoding": encoding, "query": modes[0], "keys": modes[1], **extra}
    out_type = fields if kind == "pointwise" else mixed(C4)
    own = drawn(GroupSelfAttention(fields, out_type, 2, size, head_fields=4, **options))
    layer = with_weights_of(own, fields, fields, out_type, kernel_size=size, **options)
    x = random_field(fields, 4, 4)
    torch.testing.assert_close(layer(x, x).tensor, own(x).tensor, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x, x, x).tensor, own(x).tensor, rtol=1e-12, atol=1e-12)
    mask = torch.rand(2, 4, 4) < 0.3
    mask[:, 0, 0] = False
    hidden = layer(x, x, key_padding_mask=mask).tensor
    torch.testing.assert_close(hidden.masked_fill(mask[:, None], 0.0), own(x, ~mask).tensor)
    with torch.no_grad():
        layer.plain.project_keys.weight.mul_(1.1)
    assert (layer(x, x).tensor - own(x).tensor).abs().max() > 1e-6


def centred(shape, spacing=1):
    """The positions ``(N, d)`` in space relative to the centre."""
    places = torch.tensor(list(itertools.product(*map(range, shape))), dtype=torch.float64)
    places = spacing * (places - (torch.tensor(shape) - 1) / 2)
    return places.flip(1) * torch.tensor([1.0, -1.0, -1.0])[: len(shape)]


def shortest(delta, period):
    """The shortest offsets between positions of a torus, ``(n, d)``; without a period the one that there is."""
    if not period:
        return delta.unsqueeze(0)
    near = delta - period * (delta / period).round()
    sides = [(d, -d) if 2 * abs(d) == period else (d,) for d in near.tolist()]
    return torch.tensor(list(itertools.product(*sides)), dtype=delta.dtype)


def ways_between(shape, key_shape, size=None, *, one_space=True, causal=False, dilation=1, period=0):
    """The offsets between the positions of two grids of the same extent, for :func:`written_out_between`."""
    ratio = Fraction(shape[-1], key_shape[-1]) if one_space else Fraction(1)
    step, asked = ratio.numerator, centred(key_shape, ratio.numerator)
    asking = centred(shape, ratio.denominator) if one_space else torch.zeros(math.prod(shape), len(key_shape)).double()

    def seen(delta):
        if causal:
            return bool(-(size or math.inf) < delta <= 0)
        whole = dilation == 1 or bool((delta % dilation == 0).all())
        return size is None or (whole and bool((delta.abs() < dilation * step * size / 2).all()))

    pairs = itertools.product(range(len(asking)), range(len(asked)))
    every = {(x, y): shortest(asked[y] - asking[x], period) for x, y in pairs}
    every = {pair: ways if seen(ways[0]) else ways[:0] for pair, ways in every.items()}
    most = max(float(ways.abs().max()) for ways in every.values() if len(ways))
    unit = max(1.0, most) if size is None else size - 1 if causal else dilation * step * max(1, size // 2)
    return lambda x, y: every[x, y] / unit


def by_backends(layer, *inputs, backends=("reference", "blocked", "auto"), **given):
    """The tensors of the output by each of the backends, the last of which the layer keeps."""
    outputs = []
    for backend in backends:
        layer.plain.backend = backend
        outputs.append(layer(*inputs, **given).tensor)
    return outputs


SETS = {
    "sequence to grid": (sequence(C4), (2,), C4, (2, 3), None, {}),
    "grid to coarse grid": (C4, (2, 4), C4, (1, 2), None, {}),
    "window on a coarse grid": (C4, (2, 4), C4, (1, 2), 3, {}),
    "window on a fine grid": (C4, (1, 2), C4, (2, 4), 3, {}),
    "earlier times": (sequence(C4), (4,), sequence(C4), (4,), None, {"causal": True}),
    "last times": (sequence(C4), (4,), sequence(C4), (4,), 2, {"causal": True}),
    "dilated window": (C4, (3, 3), C4, (3, 3), 3, {"dilation": 2}),
    "torus": (C4, (2, 2), C4, (2, 2), None, CIRCLE),
    "torus, window": (C4, (3, 3), C4, (3, 3), 3, CIRCLE),
    "torus, coarse keys": (C4, (4, 4), C4, (2, 2), None, CIRCLE),
    "torus, fine keys": (C4, (1, 1), C4, (3, 3), None, CIRCLE),
    "torus, window on fine keys": (C4, (2, 2), C4, (4, 4), 3, CIRCLE),
    "torus, window on coarse keys": (sequence(C4), (6,), sequence(C4), (3,), 3, CIRCLE),
    "torus, window of other cells": (sequence(C4), (4,), sequence(C4), (6,), 3, CIRCLE),
}


def on_sets(name, encoding, modes=("own", "all")):
    """A layer on two sets, the tensors of both, and the offsets between them."""
    query_space, shape, key_space, key_shape, size, options = SETS[name]
    of_grids = {"one_space": len(shape) == len(key_shape), **options}
    if of_grids.pop("padding_mode", None):
        of_grids["period"] = math.lcm(shape[-1], key_shape[-1])
    types = mixed(query_space), mixed(key_space), mixed(query_space)
    modes = dict(zip(("query", "keys"), modes, strict=True))
    layer = drawn(GroupCrossAttention(*types, 1, size, encoding=encoding, head_fields=4, **modes, **options))
    inputs = [random_field(t, *s, batch=1).tensor for t, s in zip(types, (shape, key_shape), strict=False)]
    return layer, inputs, ways_between(shape, key_shape, size, **of_grids)


def of_sets(layer, x, y):
    return layer.plain.to_heads(x.movedim(1, -1), y.movedim(1, -1), None)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "none"])
@pytest.mark.parametrize("modes", [("own", "all"), ("all", "all"), ("own", "own")], ids="-".join)
def test_values_and_gradients_are_those_of_the_formula(name, encoding, modes):
    if encoding == "rotary" and name.startswith("torus"):
        encoding = "separable"
    layer, (x, y), ways = on_sets(name, encoding, modes)
    inputs = x, y = [t.requires_grad_() for t in (x, y)]
    expected = fields_of(written_out_between(layer, of_sets(layer, x, y), ways), x.shape[2:])
    backends = ["reference", "blocked", "auto"]
    factorises = encoding in ("rotary", "none") or (encoding == "fourier" and "torus" not in name)
    backends += ["dense"] if factorises and layer.plain.window.looks_everywhere else []
    sets = GeometricTensor(x, layer.query_type), GeometricTensor(y, layer.key_type)
    outputs = by_backends(layer, *sets, backends=backends)
    for found in outputs:
        assert_formula(found, expected, [*inputs, *layer.parameters()], 1e-11, 1e-12)
    with torch.no_grad():
        wrong = fields_of(written_out_between(layer, of_sets(layer, x, y), lambda i, j: ways(i, j) + 0.2), x.shape[2:])
        assert encoding == "none" or (outputs[0] - wrong).abs().max() > 1e-5


@pytest.mark.parametrize(("options", "key_shape"), [({}, (2, 1)), (CIRCLE, (2, 2))], ids=str)
@pytest.mark.parametrize("size", [1, None])
def test_outputs_between_positions_are_those_of_the_formula(options, key_shape, size):
    fields, shape = mixed(C4), tuple(2 * n for n in key_shape)
    layer = drawn(GroupSelfAttention(fields, fields, 1, size, head_fields=4, scale_factor=2, **options))
    x = random_field(fields, *key_shape, batch=1).tensor.requires_grad_()
    q, k, v = layer.plain.to_heads(x.movedim(1, -1))
    cells = torch.arange(math.prod(key_shape)).view(key_shape).repeat_interleave(2, 0).repeat_interleave(2, 1)
    ways = ways_between(shape, key_shape, size, period=shape[0] if options else 0)
    expected = fields_of(written_out_between(layer, (q[:, :, cells.flatten()], k, v), ways), shape)
    for found in by_backends(layer, GeometricTensor(x, fields)):
        assert_formula(found, expected, [x, *layer.parameters()], 1e-11, 1e-12)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("sizes", [(6, 3), (3, 6), (6, 4), (3, 9), (2, 4)], ids=str)
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("window", ["square", "disc"])
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "none"])
def test_tori_of_other_sizes(sizes, size, window, encoding):
    """Exact for the group and for all rolls that keep both grids, by every backend; without a torus, not."""
    fields, (n, m) = mixed(D4), sizes
    step = math.gcd(n, m)
    options = {"head_fields": 4, "encoding": encoding, "window": window if size else "auto"}
    layer = drawn(GroupCrossAttention(fields, fields, fields, 1, size, **CIRCLE, **options))
    flat = drawn(GroupCrossAttention(fields, fields, fields, 1, size, **options))
    x, y = random_field(fields, n, n), random_field(fields, m, m)
    rolled = [fields(t.tensor.roll((s, -2 * s), (2, 3))) for t, s in ((x, n // step), (y, m // step))]

    def error_of_roll(layer):
        expected = layer(x, y).tensor.roll((n // step, -2 * n // step), (2, 3))
        return (layer(*rolled).tensor - expected).abs().max().item()

    outputs = by_backends(layer, x, y)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    assert error_of(layer, x, y) < TOLERANCE
    assert error_of_roll(layer) < 1e-12
    across = n > m if size else encoding != "none"  # whether queries at the edges see keys beyond them
    assert not across or error_of_roll(flat) > 1e-5


@pytest.mark.parametrize("ratio", [0.5, 1, 2], ids=str)
@pytest.mark.parametrize("options", [{}, CIRCLE], ids=str)
@pytest.mark.slow
def test_memory_grows_with_the_positions(ratio, options):
    """Twice the sides, four times the memory; all scores at once take sixteen times."""
    fields = regular(gspaces.trivialOnR2(), 1)
    layer = GroupCrossAttention(fields, fields, fields, 1, 3, **options)
    growth = {}
    for layer.plain.backend in ("blocked", "auto", "reference"):
        numbers = []
        for size in (12, 24):
            sets = (random_field(fields, n, n, batch=1, dtype=torch.float32) for n in (size, int(ratio * size)))
            with Watch() as watch:
                layer(*sets).tensor.sum().backward()
            numbers.append(watch.largest)
        growth[layer.plain.backend] = numbers[1] / numbers[0]
    assert growth["blocked"] < 5
    assert growth["auto"] < 5
    assert growth["reference"] > 12


def test_a_place_spoils_only_the_windows_that_reach_it():
    """Across the edges too, by every backend."""
    fields = regular(C4, 1)
    layer = drawn(GroupCrossAttention(fields, fields, fields, 1, 3, head_fields=2, **CIRCLE))
    x, y = random_field(fields, 8, 8, batch=1), random_field(fields, 4, 4, batch=1)
    y.tensor[..., 0, 0] = torch.nan  # between the first two queries along each axis
    near = torch.tensor([True] * 4 + [False] * 2 + [True] * 2)  # less than one and a half keys away
    for output in by_backends(layer, x, y):
        assert torch.equal(output.isnan().all(1)[0], near[:, None] & near)


def test_hidden_keys_are_not_there():
    """Whatever they hold; a sequence with hidden tokens is a shorter one."""
    image, tokens = regular(C4, 2), regular(sequence(C4), 2)
    layer = drawn(GroupCrossAttention(image, tokens, image, 2, head_fields=3, registers=1))
    x, y = random_field(image, 3, 3), random_field(tokens, 5)
    mask = torch.tensor([[False, False, False, True, True]]).expand(2, -1)
    expected = layer(x, tokens(y.tensor[:, :, :3])).tensor
    y.tensor[:, :, 3:] = torch.nan
    y.tensor.requires_grad_()
    found = layer(x, y, key_padding_mask=mask).tensor
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(x, y, y, mask).tensor, expected)
    (gradient,) = torch.autograd.grad(found.sum(), y.tensor)
    assert gradient.isfinite().all()
    assert not gradient[:, :, 3:].any()
    assert layer(x, y).tensor.isnan().all()
    none = torch.ones_like(mask)
    assert layer(x, y, key_padding_mask=none).tensor.isfinite().all()


def test_masks_commute_with_the_group():
    tokens, image = mixed(sequence(D4)), mixed(D4)
    layer = drawn(GroupCrossAttention(tokens, image, tokens, head_fields=3, encoding="fourier"))
    x, y, mask = random_field(tokens, 2), random_field(image, 4, 4), torch.rand(2, 4, 4) < 0.4
    expected = layer(x, y, key_padding_mask=mask)
    marks = GeometricTensor(mask.double().unsqueeze(1), scalars(D4, 1))
    for g in generators(D4):
        turned = marks.transform(g).tensor.squeeze(1) > 0.5
        found = layer(x.transform(g), y.transform(g), key_padding_mask=turned).tensor
        torch.testing.assert_close(found, expected.transform(g).tensor)
        wrong = layer(x.transform(g), y.transform(g), key_padding_mask=mask).tensor
        assert torch.equal(turned, mask) or (wrong - found).abs().max() > 1e-6


def test_images_over_time_and_without_a_base_space():
    video, point = space_time(C4), gspaces.no_base_space(C4.fibergroup)
    tokens, frames, invariants = regular(sequence(C4), 1), regular(video, 1), mixed(point)
    layer = drawn(GroupCrossAttention(tokens, frames, tokens, head_fields=3, encoding="mlp"))
    assert error_of(layer, random_field(tokens, 4), random_field(frames, 2, 3, 3)) < TOLERANCE
    layer = drawn(GroupCrossAttention(invariants, frames, invariants, head_fields=3, encoding="mlp"))
    x, y = random_field(invariants), random_field(frames, 2, 3, 3)
    assert layer(x, y).shape == (2, invariants.size)
    assert error_of(layer, x, y) < TOLERANCE
    layer = drawn(GroupCrossAttention(tokens, invariants, tokens, head_fields=3))
    z = random_field(tokens, 4)
    assert error_of(layer, z, x) < TOLERANCE
    mask = torch.tensor([False, True])
    torch.testing.assert_close(layer(z, x, key_padding_mask=mask).tensor[0], layer(z, x).tensor[0])


def test_samples_of_continuous_groups():
    """Exact for the elements that permute the samples."""
    space = gspaces.rot2dOnR2(-1, 3)
    tokens, image = (
        FieldType(sequence(space), [sequence(space).irrep(1)]),
        FieldType(space, [space.irrep(1), space.irrep(0)]),
    )
    options = {"head_fields": 3, "encoding": "mlp", "samples": 8}
    layer = drawn(GroupCrossAttention(tokens, image, tokens, **options))
    quarter = space.fibergroup.element(math.pi / 2)
    inputs = random_field(tokens, 3), random_field(image, 4, 4)
    assert error_of(layer, *inputs, elements=[quarter]) < TOLERANCE
    with pytest.raises(ValueError, match="samples: got turn"):
        GroupCrossAttention(tokens, image, tokens, head_fields=3, samples=Samples(8, turn="random"))


def test_grids_share_their_extent_or_have_a_spacing():
    fields = regular(C4, 2)
    layer = drawn(GroupCrossAttention(fields, fields, fields, kernel_size=3))
    x = random_field(fields, 8, 8)
    for key_shape in ((8, 8), (4, 4), (16, 16), (12, 12)):
        assert error_of(layer, x, random_field(fields, *key_shape), elements=grid_generators(C4)) < TOLERANCE
    with pytest.raises(ValueError, match=r"keys: .*same ratio"):
        layer(x, random_field(fields, 4, 2))
    with pytest.raises(ValueError, match=r"keys: .*whole numbers"):
        layer(random_field(fields, 9, 9), random_field(fields, 20, 20))
    strided = drawn(GroupCrossAttention(fields, fields, fields, kernel_size=3, spacing=2))
    y = random_field(fields, 9, 9)
    keys = fields(y.tensor[:, :, ::2, ::2])
    assert error_of(strided, y, keys, elements=grid_generators(C4)) < TOLERANCE
    # Where queries stand on keys, windows of the coarse grid are those that its own queries have.
    own = drawn(GroupCrossAttention(fields, fields, fields, kernel_size=3))
    own.load_state_dict(strided.state_dict())
    torch.testing.assert_close(strided(y, keys).tensor[:, :, ::2, ::2], own(keys, keys).tensor)
    narrow = drawn(GroupCrossAttention(fields, fields, fields, kernel_size=1))
    with pytest.raises(ValueError, match=r"kernel_size: got 1, .*larger window"):
        narrow(x, random_field(fields, 16, 16))


def test_without_places_any_grids_will_do():
    fields = regular(C4, 2)
    layer = drawn(GroupCrossAttention(fields, fields, fields, encoding="none"))
    x, y = random_field(fields, 3, 5), random_field(fields, 4, 2)
    mixed_up = fields(y.tensor.flatten(2)[:, :, torch.randperm(8)].view_as(y.tensor))
    torch.testing.assert_close(layer(x, y).tensor, layer(x, mixed_up).tensor)
    placed = drawn(GroupCrossAttention(regular(sequence(C4), 2), fields, regular(sequence(C4), 2), encoding="mlp"))
    z = random_field(placed.query_type, 3)
    assert (placed(z, y).tensor - placed(z, mixed_up).tensor).abs().max() > 1e-4


@pytest.mark.sampled(6)
@pytest.mark.parametrize("encoding", ["mlp", "rotary", "absolute", "none"])
@pytest.mark.parametrize("modes", [("own", "all"), ("all", "all"), ("own", "own")], ids="-".join)
@pytest.mark.parametrize("kinds", ["points-points", "sequence-points", "points-grid", "grid-points", "sequence-grid"])
def test_attention_maps_make_the_output(encoding, modes, kinds):
    """Of clouds and images, masks of keys included."""
    modes = {"query": modes[0], "keys": modes[1]}
    batches, given, inputs = torch.tensor([0, 1, 1, 0, 1]), {}, []
    for name, kind in zip(("query", "key"), kinds.split("-"), strict=True):
        fields = mixed(sequence(C4) if kind == "sequence" else C4)
        inputs.append(
            cloud(fields, 5) if kind == "points" else random_field(fields, *spaces.shape_of(fields.gspace, 2))
        )
        given |= {f"{name}_batch": batches} if kind == "points" else {}
    x, y = inputs
    layer = drawn(GroupCrossAttention(x.type, y.type, x.type, 2, head_fields=4, encoding=encoding, **modes))
    at_points, shape = kinds.startswith("points"), x.shape[2:]
    mask = torch.zeros(len(y.tensor), *y.shape[2:], dtype=torch.bool)
    mask[1] = True
    mask = mask if mask.dim() == 1 else mask & (torch.rand(mask.shape) < 0.5)
    positions = range(5) if at_points else list(itertools.product(*map(range, shape)))
    maps = layer.attention_maps(x, y, positions, key_padding_mask=mask, **given)
    _, _, v = of_sets(layer, *(t.tensor.T[None] if t.coords is not None else t.tensor for t in (x, y)))
    if at_points and y.coords is None:  # each query reads the values of its own image
        v = v[:, batches]
    of_values = "mnkpc" if y.coords is not None else "mqkpc" if at_points else "mbkpc"
    heads = torch.einsum(f"bmhqjpk,{of_values}->mbqhc", maps.flatten(6), v)
    found = layer.plain.project(heads)
    found = found.squeeze(0) if at_points else fields_of(found, shape)
    torch.testing.assert_close(found, layer(x, y, key_padding_mask=mask, **given).tensor)
    poses = [1] if at_points else [1, 0]
    torch.testing.assert_close(layer.attention_maps(x, y, positions[1:], poses, mask, **given), maps[:, :, poses, 1:])
    assert not maps.movedim(6, 0)[mask].any() if mask.dim() == 1 else True


def test_scalars_have_no_poses():
    """What is the same in every pose is computed once, and the output is that of poses that are alike."""
    tokens, image, hidden = scalars(sequence(D4), 3), scalars(D4, 2), mixed(sequence(D4))
    layer = drawn(GroupCrossAttention(tokens, image, hidden, head_fields=3, encoding="mlp"))
    x, y = random_field(tokens, 3), random_field(image, 4, 4)
    q, k, v = layer.plain.to_heads(x.tensor.movedim(1, -1), y.tensor.movedim(1, -1), None)
    assert [t.shape[3] for t in (q, k, v)] == [1, 1, 1]
    assert error_of(layer, x, y) < TOLERANCE
    layer = drawn(GroupCrossAttention(hidden, image, hidden, head_fields=3, encoding="mlp", query="all"))
    z = random_field(hidden, 3)
    q, k, v = layer.plain.to_heads(z.tensor.movedim(1, -1), y.tensor.movedim(1, -1), None)
    assert [t.shape[3] for t in (q, k, v)] == [8, 1, 1]
    assert error_of(layer, z, y) < TOLERANCE
    layer = drawn(GroupCrossAttention(tokens, mixed(D4), hidden, head_fields=3, encoding="mlp", query="all"))
    assert layer.plain.query == "all"
    assert error_of(layer, x, random_field(mixed(D4), 4, 4)) < TOLERANCE


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("GroupCrossAttention")])
def test_programs(name):
    """What ``torch.export`` writes down is the same; on grids, for any number of images."""
    case = CASES[name]
    module = case.drawn()
    plain, given = module.export(), case.exported(dict, *case.inputs(module))
    given["values"] = torch.randn_like(given["keys"])
    if case.on_grids:
        given["key_padding_mask"] = torch.rand(case.keys) < 0.3
        given["key_padding_mask"].flatten(1)[:, 0] = False
    if "key_padding_mask" in given:
        for hidden in {"keys", "values", "key_coords"} & set(given):
            given[hidden].movedim(1, -1)[given["key_padding_mask"]] = torch.nan
    shapes = dict.fromkeys(given, {0: torch.export.Dim("images", min=1)} if case.on_grids else None)
    program = torch.export.export(plain, (), given, dynamic_shapes=shapes, strict=False).module()
    more = {name: torch.cat([t, t, t]) for name, t in given.items()} if case.on_grids else given
    for sets in (given, more):
        torch.testing.assert_close(program(**sets), plain(**sets))


def test_what_does_not_fit():
    tokens, image = regular(sequence(C4), 2), regular(C4, 2)
    images, sets, constant_keys = 3 * [image], [tokens, image, tokens], RotaryEncoding(constant_keys=True)
    for types, options, error, message in (
        ([tokens, regular(D4, 1), tokens], {}, ValueError, "key_type: its fiber group is D4"),
        ([tokens, image, image], {}, ValueError, "out_type: its gspace is"),
        (sets, {"value_type": tokens}, ValueError, "value_type: its gspace"),
        ([tokens, 3, tokens], {}, TypeError, "key_type: got int"),
        (sets, {"kernel_size": 3}, ValueError, "kernel_size: got 3, but queries"),
        (sets, {"spacing": 2}, ValueError, "spacing: got 2"),
        (images, {"spacing": 0.013}, ValueError, "spacing: got 0.013, needed a ratio"),
        (images, {"spacing": "2"}, ValueError, "spacing: got '2'"),
        (images, {"backend": "fast"}, ValueError, "backend: got 'fast'"),
        (sets, {"radius": 1.0}, ValueError, "radius: got 1.0, but queries"),
        (sets, {"causal": True}, ValueError, "causal: got True, but queries"),
        (images, {"causal": True}, ValueError, "causal: got True, but"),
        (images, {"kernel_size": 3, "radius": 1.0}, ValueError, "radius: got 1.0 with kernel"),
        (images, {"cutoff": True}, ValueError, "cutoff: got one without a radius"),
        (images, {"head_fields": 4, "encoding": "rotary", "period": 2.0}, ValueError, "period: got"),
        (3 * [regular(D6, 1)], {"period": 2.0}, ValueError, "period: got a box of sides"),
        (images, {"heads": 2}, TypeError, "heads: GroupCrossAttention has no such"),
        (images, {"encoding": ConvolutionalEncoding()}, ValueError, "encoding: got ConvolutionalEncoding"),
        (images, {"head_fields": 4, "encoding": constant_keys}, ValueError, "encoding: got RotaryEncoding"),
    ):
        with pytest.raises(error, match=message):
            GroupCrossAttention(*types, **options)
    layer = GroupCrossAttention(tokens, image, tokens).double()
    x, y = random_field(tokens, 3), random_field(image, 4, 4)
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    for call, error, message in (
        (lambda: layer(x.tensor, y), TypeError, "queries: GroupCrossAttention got Tensor"),
        (lambda: layer(x, x), ValueError, "keys: GroupCrossAttention got a tensor on the gspace"),
        (lambda: layer(x, random_field(image, 4, 4, batch=3)), ValueError, "keys: got 3 images, and there are 2"),
        (lambda: layer(x, y, random_field(image, 3, 3)), ValueError, "values: got shape .* needed .2, 8, 4, 4."),
        (lambda: layer(x, image(y.tensor.float())), TypeError, "keys: .* got a tensor of float32"),
        (lambda: layer(x, y, key_padding_mask=mask.float()), TypeError, "key_padding_mask: got torch.float32"),
        (lambda: layer(x, y, key_padding_mask=mask[:, 0]), ValueError, "key_padding_mask: got shape .2, 4., needed"),
        (lambda: layer.attention_maps(x, y, [(0, 0)]), ValueError, "positions: got 2 indices each, needed 1"),
    ):
        with pytest.raises(error, match=message):
            call()
    apart = GroupCrossAttention(tokens, image, tokens, value_type=scalars(C4, 1)).double()
    with pytest.raises(ValueError, match="values: got None"):
        apart(x, y)


def test_no_images_with_a_mask():
    image = regular(C4, 1)
    layer = GroupCrossAttention(image, image, image).double()
    x, mask = random_field(image, 2, 2, batch=0), torch.zeros(0, 2, 2, dtype=torch.bool)
    assert layer(x, x, key_padding_mask=mask).shape == (0, 4, 2, 2)


@pytest.mark.parametrize(
    ("space", "size", "options"),
    [(sequence(C4), None, {"causal": True}), (sequence(C4), 2, {"is_causal": True}), (C4, 3, {"dilation": 2})],
    ids=str,
)
def test_windows_of_sets_with_the_same_positions(space, size, options):
    fields = regular(space, 2)
    layer = drawn(GroupCrossAttention(fields, fields, fields, kernel_size=size, encoding="mlp", **options))
    x, y = (random_field(fields, *(n,) * space.dimensionality) for n in (5, 10))
    assert layer(x, x).shape == x.shape
    with pytest.raises(ValueError, match="needed the same positions"):
        layer(x, y)


def test_tori_that_do_not_fit():
    fields = regular(C4, 1)
    for options, sizes, message in (
        ({"spacing": 2}, (8, 6), "spacing: got tori of sides"),
        ({}, (8, 3), None),
        ({}, (8, 2), "kernel_size: 3 reaches around"),
        ({}, (17, 18), "keys: got grids of"),
    ):
        layer = GroupCrossAttention(fields, fields, fields, 1, 3, **CIRCLE, **options).double()
        x, y = (random_field(fields, n, n) for n in sizes)
        if message is None:
            assert layer(x, y).shape == x.shape
            continue
        with pytest.raises(ValueError, match=message):
            layer(x, y)
    for space, encoding, message in ((D6, "mlp", "padding_mode: got"), (C4, "rotary", "encoding: got")):
        fields = regular(space, 1)
        with pytest.raises(ValueError, match=message):
            GroupCrossAttention(fields, fields, fields, 1, 3, head_fields=4, encoding=encoding, **CIRCLE)


@pytest.mark.parametrize(("backend", "graph"), [("reference", False), ("neighbours", False), ("neighbours", True)])
@pytest.mark.parametrize("far", [0.0, 100.0])
def test_queries_without_near_keys_see_nothing(backend, graph, far):
    """So many nearest within a radius: in a CUDA graph such queries are not left out."""
    fields = regular(D4, 1)
    layer = drawn(GroupCrossAttention(fields, fields, fields, head_fields=2, radius=0.5, num_neighbours=2))
    layer.plain.backend = backend
    x, y = cloud(fields, 4), cloud(fields, 3)
    places = x.coords.index_add(0, torch.tensor([1, 2]), torch.full((2, 2), 50.0, dtype=torch.float64))
    leaves = [x.tensor.requires_grad_(), y.tensor.requires_grad_()]

    def output(x, y):
        queries, keys = GeometricTensor(x, fields, places), GeometricTensor(y, fields, places[[0, 0, 3]] + far)
        return layer(queries, keys).tensor

    with Recording([]) if graph else nullcontext():
        out = output(*leaves)
        found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    nothing = output(*(0 * t for t in leaves))
    torch.testing.assert_close(out[[1, 2]], nothing[[1, 2]])
    assert (out[[0, 3]] - nothing[[0, 3]]).abs().max() > 0.01 or far
    assert out.isfinite().all()
    assert all(g is None or g.isfinite().all() for g in found)


@pytest.mark.parametrize("encoding", ["mlp", "rotary", "absolute", "none"])
def test_clouds_of_points_are_apart(encoding):
    """A batch of clouds of any sizes and places, in any order, with hidden keys, is cloud by cloud."""
    tokens, atoms = mixed(sequence(C4)), mixed(C4)
    layer = drawn(
        GroupCrossAttention(tokens, atoms, tokens, head_fields=4, encoding=encoding, value_type=regular(C4, 1))
    )
    x, y, batch = random_field(tokens, 3), cloud(atoms, 9), torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1])
    z = GeometricTensor(torch.randn(9, 4, dtype=torch.float64), layer.value_type, y.coords)
    hidden = torch.zeros(9, dtype=torch.bool)
    hidden[[2, 4]] = True
    y.tensor[hidden] = torch.nan
    y.coords[hidden] = torch.inf
    found = layer(x, y, z, hidden, key_batch=batch).tensor
    moved = GeometricTensor(y.tensor, atoms, y.coords + 3.0 * batch.unsqueeze(1) + 1.0)
    torch.testing.assert_close(layer(x, moved, z, hidden, key_batch=batch).tensor, found)
    for i in range(2):
        some = (batch == i) & ~hidden
        one = GeometricTensor(y.tensor[some], atoms, y.coords[some])
        values = GeometricTensor(z.tensor[some], layer.value_type, y.coords[some])
        alone = layer(tokens(x.tensor[i : i + 1]), one, values).tensor
        torch.testing.assert_close(found[i : i + 1], alone)
    back = drawn(GroupCrossAttention(atoms, tokens, atoms, head_fields=4))
    y.tensor[hidden], y.coords[hidden] = 1.0, 0.0
    together = back(y, x, query_batch=batch).tensor
    alone = back(GeometricTensor(y.tensor[batch == 1], atoms, y.coords[batch == 1]), tokens(x.tensor[1:])).tensor
    torch.testing.assert_close(together[batch == 1], alone)


NEAR = {
    "radius": {"radius": 1.2},
    "cutoff": {"radius": 1.2, "cutoff": True},
    "number": {"num_neighbours": 3},
    "both": {"num_neighbours": 2, "radius": 1.0},
    "period": {"period": 3.0},
    "box": {"period": 3.0, "radius": 1.3, "num_neighbours": 3},
}


def as_edges(x, y, radius=None, num_neighbours=None, cutoff=False, period=None):
    """The edges that the options choose, found by looking at all pairs."""
    offset = y.coords - x.coords[:, None]
    distance = (offset if period is None else offset - period * (offset / period).round()).norm(dim=-1)
    seen = distance <= (radius or math.inf)
    if num_neighbours is not None:
        seen &= distance.argsort(1).argsort(1) < num_neighbours
    return seen.nonzero().T.flip(0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*NEAR, "all", "edges", "grid of keys"])
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "none"])
@pytest.mark.parametrize("modes", [("own", "all"), ("all", "all"), ("own", "own")], ids="-".join)
def test_values_and_gradients_between_points_are_those_of_the_formula(name, encoding, modes):
    fields, options = mixed(C4), NEAR.get(name, {})
    if "period" in options and encoding == "rotary":
        encoding = "separable"
    x, y = cloud(fields, 2), cloud(fields, 4, 1)
    inputs = a, b, p, r = [t.clone().requires_grad_() for t in (x.tensor, y.tensor, x.coords, y.coords)]
    given = {"edge_index": torch.tensor([[0, 2, 3], [0, 0, 0]])} if name == "edges" else {}
    keys = GeometricTensor(b, fields, r)
    if name == "grid of keys":
        keys, r, options = fields(b.T.reshape(1, -1, 2, 2)), centred((2, 2)), {"kernel_size": 3}
        seen = torch.stack([(r - place).abs().amax(1) < 1.5 for place in p])
    else:
        edges = given.get("edge_index", as_edges(x, y, **options))
        seen = torch.zeros(2, 4, dtype=torch.bool).index_put((edges[1], edges[0]), torch.tensor(True))
    options = {"length_scale": 1.3, "query": modes[0], "keys": modes[1], **options}
    layer = drawn(GroupCrossAttention(fields, fields, fields, head_fields=4, encoding=encoding, **options))
    period, cutoff = options.get("period"), layer.plain.cutoff

    def offset(i, j):
        delta = r[j] - p[i]
        return delta if period is None else delta - period * (delta / period).round()

    def envelope(i, j):
        return 1.0 if cutoff is None else cutoff.function(offset(i, j).norm() / cutoff.radius)

    def expected(turn=0.0):
        ways = lambda i, j: (offset(i, j)[None] + turn)[: int(seen[i, j])] / 1.3  # noqa: E731
        return written_out_between(layer, of_sets(layer, a.T[None], b.T[None]), ways, envelope).squeeze(0)

    wanted = inputs[:3] if name == "grid of keys" else inputs
    sets = GeometricTensor(a, fields, p), keys
    outputs = by_backends(layer, *sets, backends=("reference", "neighbours", "auto"), **given)
    for found in outputs:
        assert_formula(found, expected(), [*wanted, *layer.parameters()], 1e-11, 1e-12)
    assert encoding == "none" or (outputs[0] - expected(0.2)).abs().max() > 1e-5


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("window", ["square", "disc"])
def test_windows_between_points_and_grids(size, window):
    """As between grids, where the points are the positions of one."""
    fields = mixed(D4)
    layer = drawn(GroupCrossAttention(fields, fields, fields, 1, size, head_fields=4, encoding="none", window=window))
    grid = random_field(fields, 5, 5, batch=1)
    at = GeometricTensor(grid.tensor.flatten(2).squeeze(0).T.contiguous(), fields, centred((5, 5)))
    expected = layer(grid, grid).tensor
    torch.testing.assert_close(layer(at, grid).tensor, expected.flatten(2).squeeze(0).T)
    torch.testing.assert_close(layer(grid, at).tensor, expected)
    x = cloud(fields, 5)
    assert error_of(layer, x, grid, elements=grid_generators(D4)) < TOLERANCE
    moved = GeometricTensor(at.tensor, fields, at.coords + 0.7)
    assert (layer(moved, grid).tensor - layer(at, grid).tensor).abs().max() > 1e-6


def farthest(coords, number):
    """The recipe of the documentation: each point the farthest from those before it."""
    distance, chosen = (coords - coords.mean(0)).norm(dim=1), []
    for _ in range(number):
        chosen.append(int(distance.argmax()))
        from_it = (coords - coords[chosen[-1]]).norm(dim=1)
        distance = from_it if len(chosen) == 1 else torch.minimum(distance, from_it)
    return chosen


@pytest.mark.parametrize("choose", [farthest, lambda coords, number: coords[:, 0].argsort()[:number]])
def test_fewer_points_and_back(choose):
    """Equivariant where the choice of the points is invariant; the leftmost points are no such choice."""
    fields = mixed(D4)
    options = {"head_fields": 4, "num_neighbours": 3}
    pool, back = (drawn(GroupCrossAttention(fields, fields, fields, **options)) for _ in range(2))

    def network(x):
        some = choose(x.coords, 4)
        return back(x, pool(GeometricTensor(x.tensor[some], fields, x.coords[some]), x))

    network.space, x = D4, cloud(fields, 12)
    assert (error_of(network, x) < TOLERANCE) == (choose is farthest)


def test_points_that_do_not_fit():
    tokens, atoms = regular(sequence(C4), 1), regular(C4, 1)
    layer, window = GroupCrossAttention(tokens, atoms, tokens).double(), GroupCrossAttention(atoms, atoms, atoms, 1, 3)
    x, y, batch = random_field(tokens, 3), cloud(atoms, 4), torch.tensor([0, 0, 1, 2])
    near, whole = (GroupCrossAttention(atoms, atoms, atoms, radius=r).double() for r in (1.0, None))
    torus, edges = GroupCrossAttention(atoms, atoms, atoms, padding_mode="circular").double(), torch.zeros(2, 1).long()
    one, none = random_field(atoms, 4, 4), cloud(atoms, 0)
    nowhere = GeometricTensor(y.tensor, atoms, y.coords.index_fill(0, torch.tensor([2]), torch.nan))
    for call, error, message in (
        (lambda: layer(x, y), ValueError, "key_batch: got None, needed the number of the image"),
        (lambda: layer(x, y, key_batch=batch), ValueError, "key_batch: got clouds up to number 2, needed 2"),
        (lambda: layer(x, y, query_batch=batch), ValueError, "query_batch: got a tensor for features on a grid"),
        (lambda: layer(x, one, key_batch=batch), ValueError, "key_batch: got a tensor for features on a grid"),
        (lambda: window.double()(y, y), ValueError, "kernel_size: got 3, which is a window on a grid"),
        (lambda: near.attention_maps(y, y, [4]), ValueError, "positions: got"),
        (lambda: layer.attention_maps(x, y, [(0,)]), ValueError, "key_batch: got None"),
        (lambda: near(one, one), ValueError, "radius, num_neighbours or period: got two sets on grids"),
        (lambda: whole(one, one, edge_index=edges), ValueError, "edge_index: got two sets on grids"),
        (lambda: near(y, y, edge_index=edges), ValueError, "edge_index: got edges, and the layer chooses"),
        (lambda: whole(y, y, edge_index=edges.double()), TypeError, "edge_index: got torch.float64"),
        (lambda: whole(y, y, edge_index=edges + 4), ValueError, "edge_index: got 4 to 4, needed numbers from 0 to 3"),
        (lambda: torus(y, one), ValueError, "padding_mode: .* needed period="),
        (lambda: whole(y, y, edge_index=edges, key_batch=batch[1:].clone()), ValueError, "key_batch: got shape"),
        (lambda: whole(y, y, edge_index=edges, key_batch=batch + 1), ValueError, "edge_index: got edges from keys of"),
        (lambda: layer(x, y, key_batch=batch - 1), ValueError, "key_batch: got -1 to 1, needed numbers from 0"),
        (lambda: whole(y, nowhere), ValueError, "coords of key: got numbers .* by key_padding_mask"),
        (lambda: whole(nowhere, y), ValueError, "coords of query: got numbers that are not finite$"),
        (lambda: whole(y, none), ValueError, "keys: got no points"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_centres_of_clouds_in_programs():
    """Of hidden points, too, and beside a cloud with a point that is nowhere."""
    coords, batch = torch.randn(6, 2), torch.tensor([-1, 1, 0, -2, 1, 0])
    coords[1] = torch.nan
    expected = cross_attention._centres(coords, batch)
    assert expected.isnan().all(1).tolist() == (batch == 1).tolist()
    torch.testing.assert_close(expected[0], coords[[0, 3]].mean(0))
    traced = torch.jit.trace(cross_attention._centres, (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
    torch.testing.assert_close(traced(coords, batch), expected, equal_nan=True)
