import functools
import itertools
import math

import numpy as np
import pytest
import torch
from escnn import gspaces

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.nn.dilation import DilationLiftingSelfAttention, Scales
from escnn_attention.plain.dilation import PerScale, ScalePooling, join_scales, scaled_window, split_scales
from tests.layers import drawn
from tests.nn.scales import group, lifting
from tests.spaces import PLANE, random_field


def positions(window, shape=(1, 1)):
    """The offsets of a window in positions, and how much of each lies in it."""
    offsets = Grid(shape, window.window).offsets * (window.window.kernel_size // 2) * window.window.dilation
    share = torch.ones(len(offsets), dtype=torch.float64) if window.share is None else window.share
    return offsets, share


class TestScaledWindow:
    @pytest.mark.parametrize(
        ("kernel_size", "scale", "width", "end"),
        # r s, and what is left of the last position: min(1, r s + 1/2 − its number).
        [(5, 1.0, 5, 0.5), (5, 2.0, 9, 0.5), (3, 1.25, 3, 0.75), (3, 1.75, 5, 0.25), (3, math.sqrt(2) ** 4, 9, 0.5)],
    )
    def test_square(self, kernel_size, scale, width, end):
        window = scaled_window(kernel_size, "square", scale, 2, kind="scaled", weighted=True)
        offsets, share = positions(window)
        assert window.window == Window(width)
        axis = offsets[:, 1] == 0
        torch.testing.assert_close(share[axis & (offsets[:, 0] == width // 2)].item(), end)
        # All shares together are the area of the window.
        torch.testing.assert_close(share.sum().item(), (2 * (kernel_size // 2) * scale) ** 2)
        torch.testing.assert_close(window.unit * (kernel_size // 2) * scale, float(width // 2))

    @pytest.mark.parametrize("dimension", [2, 3])
    @pytest.mark.parametrize("scale", [2.0, 4.0, 5.3])
    def test_shares_of_a_ball_are_its_volume(self, dimension, scale):
        window = scaled_window(5, "disc", scale, dimension, kind="scaled", weighted=True)
        _, share = positions(window, (1,) * dimension)
        volume = {2: math.pi, 3: 4 / 3 * math.pi}[dimension] * (2 * scale) ** dimension
        assert abs(share.sum().item() / volume - 1) < 0.05

    def test_shares_of_a_ball_are_those_of_its_turns(self):
        window = scaled_window(7, "disc", 1.7, 2, kind="scaled", weighted=True)
        offsets, share = positions(window)
        assert 0 < share.min() < 0.25
        assert share.max() == 1
        radius = offsets.norm(dim=-1)
        torch.testing.assert_close(share, (3 * 1.7 + 0.5 - radius).clamp(max=1))

    @pytest.mark.parametrize("dimension", [2, 3])
    @pytest.mark.parametrize("shape", ["square", "disc"])
    @pytest.mark.parametrize("base", [1.25, math.sqrt(2), 1.5, 2.0])
    @pytest.mark.parametrize("kernel_size", [3, 5])
    def test_has_the_positions_of_which_anything_lies_in_it_and_no_others(self, kernel_size, base, shape, dimension):
        for scale in (1.0, base, base**2):
            window = scaled_window(kernel_size, shape, scale, dimension, kind="scaled", weighted=True)
            offsets, share = positions(window, (1,) * dimension)
            end = kernel_size // 2 * scale + 0.5
            box = range(-math.ceil(end), math.ceil(end) + 1)
            length = (lambda x: math.hypot(*x)) if shape == "disc" else (lambda x: max(map(abs, x)))
            expected = {x for x in itertools.product(box, repeat=dimension) if length(x) < end - 1e-6}
            assert {tuple(x) for x in offsets.round().long().tolist()} == expected
            assert share.min() > 0

    @pytest.mark.parametrize(("scale", "width"), [(1.0, 5), (math.sqrt(2), 5), (1.5, 7), (2.0, 9), (3.9, 15)])
    def test_all_positions_in_it_the_same(self, scale, width):
        window = scaled_window(5, "square", scale, 2, kind="scaled", weighted=False)
        assert window.window == Window(width)
        assert window.share is None

    def test_dilated(self):
        for weighted in (False, True):
            window = scaled_window(5, "disc", 4.0, 2, kind="dilated", weighted=weighted)
            assert window.window == Window(5, "disc", 4)
            assert (window.unit, window.share) == (1.0, None)

    def test_fixed_is_that_of_scale_1(self):
        fixed, first = (
            scaled_window(5, "disc", s, 2, kind=k, weighted=True) for s, k in ((4.0, "fixed"), (1.0, "scaled"))
        )
        assert (fixed.window, fixed.unit) == (first.window, first.unit)
        assert torch.equal(fixed.share, first.share)

    def test_a_single_position(self):
        window = scaled_window(1, "square", 4.0, 2, kind="scaled", weighted=True)
        assert window.window == Window(1)
        assert window.share is None


def test_scales_as_samples_and_back():
    x = torch.randn(2, 12, 3, 4)
    apart = split_scales(x, 3)
    assert torch.equal(apart[4], x[1, 4:8])
    assert torch.equal(join_scales(apart, 3), x)


def test_per_scale_and_pooling():
    x = torch.randn(2, 6, 3, 4)
    assert torch.equal(PerScale(torch.nn.Identity(), 3)(x), x)
    linear = torch.nn.Conv2d(2, 5, 1)
    torch.testing.assert_close(PerScale(linear, 3)(x), torch.cat([linear(t) for t in x.split(2, 1)], 1))
    torch.testing.assert_close(ScalePooling(3)(x), torch.stack(x.split(2, 1)).amax(0))


def written_out(layer, x, query):
    """The layer in plain loops over escnn's own group elements and over numbers, with none of the package's tables."""
    space, core = layer.space, layer.plain
    elements = list(space.fibergroup.elements)
    lifted = isinstance(layer, DilationLiftingSelfAttention)
    heads, fields, n = layer.num_heads, layer.head_fields, layer.scales.count
    weight, bias = core.project_in.weight, core.project_in.bias
    places = list(itertools.product(*map(range, x.shape[2:])))
    reach = layer.kernel_size // 2
    one_in = layer.in_type if lifted else layer.scales.single(layer.in_type)
    one_out = layer.scales.single(layer.out_type)
    levels = range(1) if lifted else range(n)
    x = x.unflatten(1, (len(levels), -1))

    def project(place, level, h):
        f = x[(0, level, slice(None), *place)]
        y = weight @ (f if lifted else torch.tensor(one_in.representation(~h)) @ f)
        return (y + torch.cat([bias, torch.zeros(heads * fields, dtype=y.dtype)])).view(3, heads, fields)

    def cell(steps, s):
        """How much of the unit cell around a position lies in the window."""
        if layer.windows == "dilated":
            return 1.0 if all(step % s == 0 and abs(step) <= reach * s for step in steps) else 0.0
        if layer.measure != "haar":
            return float(all(abs(step) <= reach * s for step in steps))
        if layer.window == "disc":
            return min(1.0, max(0.0, reach * s + 0.5 - math.hypot(*steps)))
        return math.prod(min(1.0, max(0.0, reach * s + 0.5 - abs(step))) for step in steps)

    projected = {
        (p, level, h): project(p, level, h)
        for p in places
        for level in levels
        for h in (elements[:1] if lifted else elements)
    }
    interval = 1 if lifted else core.interval

    @functools.cache
    def encoded(h, steps, s, t, p):
        turn = torch.tensor(np.asarray(space.basespace_action(~h)), dtype=torch.float64)
        delta = torch.tensor([steps[1], -steps[0]], dtype=torch.float64) / (s * reach)
        offset = core.encoding.offsets(turn @ delta)
        if lifted:
            return offset
        return offset + core.encoding.poses()[:, t * len(elements) + elements.index(~h @ p)]

    out = []
    for i in range(n):
        s = layer.scales.base**i
        rows = []
        for place in places:
            total = torch.zeros(len(elements), heads, fields, dtype=torch.float64)
            for (a, h), m in itertools.product(enumerate(elements), range(heads)):
                for own in [elements[0]] if lifted else [h] if query == "own" else elements:
                    q = projected[place, 0 if lifted else i, own][0][m]
                    scores, values = [], []
                    for other, t, p in itertools.product(places, range(interval), elements[:1] if lifted else elements):
                        steps = tuple(b - c for b, c in zip(other, place, strict=True))
                        share = cell(steps, s)
                        if share == 0 or (not lifted and i + t >= n):
                            continue
                        rho = encoded(h, steps, s, t, p)[m]
                        _, v, k = projected[other, 0 if lifted else i + t, p]
                        measure = share * (layer.scales.base ** (-2 * t) if layer.measure == "haar" else 1.0)
                        scores.append(q @ (k[m] + rho) / math.sqrt(fields) + math.log(measure))
                        values.append(v[m])
                    total[a, m] = total[a, m] + torch.stack(scores).softmax(0) @ torch.stack(values)
            if layer.measure == "printed":
                total = total / s ** (2 if lifted else 3)
            y = core.project_out.invariants @ core.project_out.bias
            for a, h in enumerate(elements):
                y = y + torch.tensor(one_out.representation(h)) @ (core.project_out.weight.T @ total[a].flatten())
            rows.append(y)
        out.append(torch.stack(rows, 1))
    return torch.cat(out)[None].unflatten(2, tuple(max(p) + 1 for p in zip(*places, strict=True)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("query", ["own", "all", "lifting"])
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (math.sqrt(2), {}),
        (math.sqrt(2), {"window": "disc"}),
        (math.sqrt(2), {"measure": "counting"}),
        (2, {"measure": "printed"}),
        (2, {"windows": "dilated"}),
    ],
    ids=["haar", "disc", "counting", "printed", "dilated"],
)
def test_agrees_with_plain_loops(base, options, query):
    space = gspaces.flip2dOnR2()
    make = lifting if query == "lifting" else group
    if query != "lifting":
        options = {**options, "query": query}
    layer = make(space, Scales(base, 2), encoding="fourier", head_fields=2, **options)
    drawn(layer)
    x = torch.randn(1, layer.in_type.size, 3, 3, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    got, expected = layer(layer.in_type(x)).tensor, written_out(layer, x, query)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(got)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True) for y in (got, expected)),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["reference", "blocked", "native", "dense"])
@pytest.mark.parametrize("make", [lifting, group])
def test_every_backend(make, backend):
    for encoding in ("mlp", "fourier", "rotary"):
        torch.manual_seed(0)
        layer, other = (make(PLANE["C4"](), encoding=encoding, backend=b) for b in (backend, "blocked"))
        other.load_state_dict(layer.state_dict())
        x = random_field(layer.in_type, 6, 6, batch=1)
        torch.testing.assert_close(layer(x).tensor, other(x).tensor, rtol=1e-10, atol=1e-11)


@pytest.mark.sampled(1, of="compiled graphs")
@pytest.mark.parametrize(("name", "base"), [("flip", 2), ("C3", 1.5)])
def test_compiles_in_one_graph(name, base):
    layer = group(PLANE[name](), Scales(base, 2))
    exported = layer.export()
    x = random_field(layer.in_type, 4, 4).tensor
    torch.testing.assert_close(torch.compile(exported, fullgraph=True, backend="eager")(x), exported(x))
