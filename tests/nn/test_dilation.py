"""Scales and what is done to each of them."""

import math

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, IIDBatchNorm2d, InnerBatchNorm, SequentialModule

from escnn_attention import FieldLayerNorm, GroupSelfAttention, HalvingPool, LiftingSelfAttention, PoseLinear, SiLU
from escnn_attention.nn.dilation import (
    DilationLiftingSelfAttention,
    DilationSelfAttention,
    PerScale,
    ScalePooling,
    Scales,
)
from tests.layers import drawn
from tests.nn.scales import EXACT, THREE, TOLERANCE, group, lifting, turned_error
from tests.spaces import PLANE, grid_error, mixed, random_field, regular, scalars, shape_of

C4 = PLANE["C4"]()


class TestPerScale:
    def test_is_the_module_on_every_scale(self):
        fields = mixed(C4)
        inner = PoseLinear(fields, regular(fields.gspace, 2)).double()
        layer = PerScale(inner, THREE)
        x = random_field(layer.in_type, 4, 5)
        each = [inner(fields(t)).tensor for t in x.tensor.unflatten(1, (3, -1)).unbind(1)]
        torch.testing.assert_close(layer(x).tensor, torch.cat(each, 1))
        assert sum(p.numel() for p in layer.parameters()) == sum(p.numel() for p in inner.parameters())

    def test_modules_that_change_the_grid(self):
        layer = PerScale(HalvingPool(regular(C4, 1)), THREE)
        x = random_field(layer.in_type, 8, 6)
        assert layer(x).shape == layer.evaluate_output_shape(x.shape) == (2, 12, 4, 3)


class TestScales:
    def test_values(self):
        assert Scales(3, 3).values == (1.0, 3.0, 9.0)
        assert Scales(1.5, 1).values == (1.0,)
        assert Scales(np.int64(2), 3) == Scales(np.float32(2), 3) == THREE
        assert [type(s) for s in Scales(np.float32(2), 2).values] == [float, float]

    def test_types_there_and_back(self):
        fields = mixed(PLANE["D4"]())
        assert THREE.single(THREE.repeat(fields)) == fields

    @pytest.mark.parametrize("base", [1, 0.5, "2", True, math.inf, math.nan, None])
    def test_base(self, base):
        with pytest.raises(ValueError, match=r"base: .*above 1"):
            Scales(base)

    def test_count(self):
        with pytest.raises(ValueError, match=r"count: .*needed at least"):
            Scales(2, 0)
        with pytest.raises(TypeError, match=r"count: got 2\.5"):
            Scales(2, 2.5)

    def test_types_that_differ(self):
        for fields in ([C4.regular_repr] * 4, [C4.regular_repr, C4.trivial_repr, C4.regular_repr]):
            with pytest.raises(ValueError, match=r"field_type: .*same fields"):
                THREE.single(FieldType(C4, fields))
        with pytest.raises(TypeError, match="field_type: got int"):
            THREE.repeat(3)


def test_shape_of_types():
    """A tensor can be viewed as (B, n, fields, |H|, *space)."""
    layer = lifting(C4, out=lambda space: regular(space, 3), head_fields=1)
    y = layer(random_field(layer.in_type, *shape_of(layer.space, 5))).tensor
    assert y.unflatten(1, (3, 3, 4)).shape == (2, 3, 3, 4, 5, 5)


def between(x, base=2):
    """An image enlarged by the base: the given values at every so many positions, and others in between."""
    space = [base * (n - 1) + 1 for n in x.shape[2:]]
    enlarged = torch.randn(*x.shape[:2], *space, dtype=x.dtype)
    enlarged[(slice(None), slice(None), *len(space) * [slice(None, None, base)])] = x
    return enlarged


def shifts(small, large, scales, steps=1, *, margin=0, factor=2):
    """For every scale that has one ``steps`` on, how far the features of an enlarged image are from those of the image.

    Relative to their size, at the positions that both have, and with a margin away from the border.
    """
    small, large = (t.tensor.detach().unflatten(1, (scales.count, -1)) for t in (small, large))
    large = large[(..., *(small.dim() - 3) * [slice(None, None, factor)])]
    inner = (..., *(slice(margin, n - margin) for n in small.shape[3:]))
    return [
        ((large[:, i + steps] - small[:, i])[inner].norm() / small[:, i][inner].norm()).item()
        for i in range(scales.count - steps)
    ]


def gaussians(size, spacing):
    """Two channels of blobs, sampled with a spacing: what is enlarged is the sampling."""
    generator = torch.Generator().manual_seed(0)
    axis = spacing * (torch.arange(size, dtype=torch.float64) - (size - 1) / 2)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    image = torch.zeros(1, 2, size, size, dtype=torch.float64)
    for channel in range(2):
        for _ in range(30):
            cx, cy, height, width = torch.rand(4, generator=generator, dtype=torch.float64)
            cx, cy, width = 32 * cx - 16, 32 * cy - 16, 1.5 + 2 * width
            image[0, channel] += (2 * height - 1) * torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * width**2))
    return image


class TestFiberGroup:
    def test_per_scale_and_pooling(self):
        fields = regular(PLANE["D4"](), 2)
        norm = drawn(PerScale(FieldLayerNorm(fields), THREE))
        layer = SequentialModule(norm, ScalePooling(norm.out_type, THREE))
        assert grid_error(layer, random_field(layer.in_type, 5, 5)) < TOLERANCE

    def test_without_the_action_on_offsets_it_is_lost(self):
        for layer in (lifting(PLANE["D3"]()), group(PLANE["D3"]())):
            layer.plain.inverse_action[:] = torch.eye(2)
            assert turned_error(layer, random_field(layer.in_type, 5, 5)) > 1e-3

    def test_without_the_action_on_poses_it_is_lost(self):
        layer = group(PLANE["D3"]())
        layer.plain.quotient[:] = torch.arange(layer.plain.quotient.shape[1])
        assert turned_error(layer, random_field(layer.in_type, 5, 5)) > 1e-3


class TestDilatedWindows:
    """An enlarged image has the features of the image one scale on: exactly, the border included."""

    @pytest.mark.parametrize("measure", ["haar", "counting"])
    @pytest.mark.parametrize(("base", "encoding"), [(2, "mlp"), (3, "fourier"), (2, "rotary")])
    @pytest.mark.parametrize("name", ["trivial", "C8"])
    @pytest.mark.slow
    def test_lifting(self, name, base, encoding, measure):
        scales = Scales(base, 3)
        layer = lifting(PLANE[name](), scales, windows="dilated", encoding=encoding, measure=measure)
        x = random_field(layer.in_type, 7, 6)
        large = layer.in_type(between(x.tensor, base))
        assert max(shifts(layer(x), layer(large), scales, factor=base)) < EXACT

    @pytest.mark.parametrize("measure", ["haar", "counting"])
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("interval", [1, 2, 3])
    def test_group_layer(self, interval, query, measure):
        """The features of an enlarged image at scale 1 are anything; beyond the range there are none."""
        scales = Scales(2, 4)
        layer = group(C4, scales, windows="dilated", interval=interval, query=query, measure=measure)
        x = random_field(layer.in_type, 6, 6)
        small = x.tensor.unflatten(1, (4, -1))
        large = torch.cat([torch.randn_like(small[:, :1]), small[:, :-1]], dim=1)
        errors = shifts(layer(x), layer(layer.in_type(between(large.flatten(1, 2)))), scales)
        exact = 4 - interval  # The last of the scales that a query of the enlarged image sees must exist.
        assert max(errors[:exact]) < EXACT
        assert all(e > 1e-3 for e in errors[exact:])

    def network(self, scales, norm, interval=2):
        fields = regular(C4, 4)
        hidden = scales.repeat(fields)
        options = {"windows": "dilated", "kernel_size": 3}
        layers = [DilationLiftingSelfAttention(scalars(C4, 1), hidden, scales, 2, **options)]
        for _ in range(2):
            layers += [norm(fields, scales), SiLU(hidden)]
            layers.append(DilationSelfAttention(hidden, hidden, scales, 2, interval=interval, **options))
        return drawn(SequentialModule(*layers)).eval()

    def errors_of_network(self, norm):
        scales = Scales(2, 5)
        network = self.network(scales, norm)
        x = random_field(network.in_type, 18, 17, batch=1)  # so large that the largest window sees a neighbour
        return shifts(network(x), network(network.in_type(between(x.tensor))), scales)

    @pytest.mark.parametrize("norm", [FieldLayerNorm, InnerBatchNorm, IIDBatchNorm2d])
    def test_network(self, norm):
        """Each of the two group layers looks one scale further, and takes one away at the end of the range."""
        errors = self.errors_of_network(lambda fields, scales: PerScale(norm(fields), scales))
        assert max(errors[:2]) < EXACT if norm is FieldLayerNorm else max(errors[:2]) < 1e-5  # those hold float32
        assert all(e > 1e-4 for e in errors[2:])

    def test_norm_over_all_scales_breaks_it(self):
        errors = self.errors_of_network(lambda fields, scales: FieldLayerNorm(scales.repeat(fields)))
        assert min(errors) > 1e-3

    def test_maximum_over_scales(self):
        """Where the largest of the responses lies within the range, the maximum is that of the enlarged image."""
        scales = Scales(2, 3)
        pool = ScalePooling(scales.repeat(scalars(C4, 1)), scales)
        x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
        x[:, 2] = -10
        moved = torch.stack([x[:, 2], x[:, 0], x[:, 1]], dim=1)
        assert torch.equal(pool(pool.in_type(moved)).tensor, pool(pool.in_type(x)).tensor)
        torch.testing.assert_close(pool(pool.in_type(x)).tensor[:, 0], x.amax(1))

    @pytest.mark.parametrize(("layer", "factor"), [("lifting", 1 / 4), ("group", 1 / 8)])
    def test_printed_factors_make_the_response_to_an_enlarged_image_smaller_by_just_them(self, layer, factor):
        options = {"windows": "dilated", "measure": "printed", "bias": False}
        scales = Scales(2, 3)
        if layer == "lifting":
            layer = lifting(C4, **options)
            x = random_field(layer.in_type, 6, 6)
            large = between(x.tensor)
        else:
            layer = group(C4, interval=1, **options)
            x = random_field(layer.in_type, 6, 6)
            small = x.tensor.unflatten(1, (3, -1))
            large = between(torch.cat([small[:, :1], small[:, :-1]], dim=1).flatten(1, 2))
        small, large = layer(x), layer(layer.in_type(large))
        assert min(shifts(small, large, scales)) > 0.5
        balanced = GeometricTensor(large.tensor / factor, large.type)
        assert max(shifts(small, balanced, scales)) < EXACT

    def test_printed_factors_stand_in_front_of_the_projection(self):
        for make, power in ((lifting, 2), (group, 3)):
            printed, counting = (make(C4, measure=m, windows="dilated") for m in ("printed", "counting"))
            counting.load_state_dict(drawn(printed).state_dict())
            bias = printed.plain.project_out.invariants @ printed.plain.project_out.bias
            x = random_field(printed.in_type, 5, 5)
            got, plain = (m(x).tensor.unflatten(1, (3, -1)) - bias[:, None, None] for m in (printed, counting))
            for i in range(3):
                torch.testing.assert_close(got[:, i], plain[:, i] / 2 ** (power * i))

    def test_fixed_windows_break_it(self):
        scales = Scales(2, 3)
        layer = lifting(C4, windows="fixed")
        x = random_field(layer.in_type, 9, 9)
        assert min(shifts(layer(x), layer(layer.in_type(between(x.tensor))), scales)) > 1e-1

    def test_cost_is_that_of_scale_1(self):
        layer = group(C4, Scales(2, 4), windows="dilated")
        assert {len(grid.offsets) for grid in layer.plain.positions(torch.empty(1, 1, 5, 5))} == {9}


class TestScaledWindows:
    """Up to the error of a sum over the window, which is small for smooth images."""

    def errors(self, layer, scales=THREE, steps=1, margin=10):
        small, large = (layer(layer.in_type(gaussians(n, s))) for n, s in ((33, 1.0), (65, 0.5)))
        return shifts(small, large, scales, steps, margin=margin)

    @pytest.mark.parametrize("name", ["trivial", "C4", "C8"])
    def test_lifting(self, name):
        errors = {}
        for windows, measure in (("scaled", "haar"), ("scaled", "counting"), ("fixed", "haar")):
            torch.manual_seed(1)
            layer = lifting(PLANE[name](), kernel_size=5, windows=windows, measure=measure)
            errors[windows, measure] = self.errors(layer)
        haar, counting, fixed = errors.values()
        assert max(haar) < 0.05
        assert haar[1] < haar[0]  # of more positions
        assert haar[1] < counting[1] / 2
        assert all(a < b / 3 for a, b in zip(haar, fixed, strict=True))

    @pytest.mark.parametrize("name", ["C4", "C8"])
    def test_any_base(self, name):
        scales = Scales(math.sqrt(2), 4)
        layer = lifting(PLANE[name](), scales, kernel_size=5)
        errors = self.errors(layer, scales, steps=2)
        assert max(errors) < 0.03

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("backend", ["reference", "blocked", "native", "dense"])
    @pytest.mark.parametrize("base", [math.sqrt(2), 1.5])
    @pytest.mark.parametrize("name", ["C4", "C8"])
    def test_nothing_outside_the_window_is_seen(self, name, base, backend):
        """A position whose cell lies outside: no gradient comes from it, and what is not finite there stays there."""
        scales = Scales(base, 4)
        layer = lifting(PLANE[name](), scales, kernel_size=3, backend=backend)
        step = torch.arange(13, dtype=torch.float64) - 6
        y, x = torch.meshgrid(step, step, indexing="ij")
        distance = torch.hypot(x, y) if name == "C8" else torch.maximum(x.abs(), y.abs())
        image = random_field(layer.in_type, 13, 13, batch=1).tensor.requires_grad_()
        features = layer(layer.in_type(image)).tensor.unflatten(1, (4, -1))
        for i, s in enumerate(scales.values):
            (gradient,) = torch.autograd.grad(features[0, i, :, 6, 6].square().sum(), image, retain_graph=True)
            seen = gradient[0].abs().sum(0) > 0
            assert torch.equal(seen, distance < s + 0.5 - 1e-6)
            spoilt = image.detach().masked_fill(~seen, math.nan)
            got = layer(layer.in_type(spoilt)).tensor.unflatten(1, (4, -1))[0, i, :, 6, 6]
            torch.testing.assert_close(got, features[0, i, :, 6, 6])

    def test_network(self):
        fields = regular(C4, 4)
        errors = {}
        for windows in ("scaled", "fixed"):
            torch.manual_seed(0)
            hidden = THREE.repeat(fields)
            network = SequentialModule(
                DilationLiftingSelfAttention(scalars(C4, 2), hidden, THREE, 2, 5, windows=windows),
                PerScale(FieldLayerNorm(fields), THREE),
                SiLU(hidden),
                DilationSelfAttention(hidden, hidden, THREE, 2, 3, windows=windows),
            ).double()
            errors[windows] = self.errors(network, margin=12)[0]  # the second scale sees one that is not there
        assert errors["scaled"] < 0.1
        assert errors["scaled"] < errors["fixed"] / 3

    @pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary"])
    def test_offsets_are_measured_in_the_frame_of_the_scale(self, encoding):
        """With reach 2 at scale 1 and 2 √2 at scale √2 the encoding sees the same function of s⁻¹Δ."""
        scales = Scales(math.sqrt(2), 2)
        layer = lifting(PLANE["C3"](), scales, kernel_size=5, encoding=encoding)
        core = layer.plain
        for scale, grid in enumerate(core.positions(torch.empty(1, 1, 9, 9))):
            steps = grid.offsets * (core.windows[scale].kernel_size // 2)
            delta = steps / (2 * scales.values[scale])
            turned = delta @ core.inverse_action.transpose(1, 2)
            terms = core._terms(scale, grid)
            if encoding == "rotary":
                got = grid.offsets @ terms.rotary.transpose(-1, -2)
                expected = torch.einsum("hld,mfd->mhlf", turned, core.encoding.frequencies)
            else:
                got, expected = terms.explicit(grid).spatial, core.encoding.offsets(turned)
            torch.testing.assert_close(got, expected.expand_as(got))


def test_measure_of_keys_of_other_scales():
    """Keys of t times the scale count as many times less as there are fewer of them in a window of their own scale."""
    layer = group(C4, interval=3)
    torch.testing.assert_close(
        layer.plain.log_measure.exp()[:, 0], torch.tensor([1, 1 / 4, 1 / 16]).double().repeat_interleave(4)
    )
    assert group(C4, interval=3, measure="counting").plain.log_measure is None
    x = random_field(layer.in_type, 5, 5)
    other = group(C4, interval=3, measure="counting", windows="dilated")
    same = group(C4, interval=3, measure="haar", windows="dilated")
    same.load_state_dict(other.state_dict())
    first, second = (m(x).tensor.unflatten(1, (3, -1)) for m in (same, other))
    assert all((first[:, i] - second[:, i]).norm() > 1e-3 for i in (0, 1))
    torch.testing.assert_close(first[:, 2], second[:, 2])  # The last scale sees itself alone.


@pytest.mark.parametrize("query", ["own", "all", "lifting"])
def test_with_a_single_scale_nothing_is_left_but_the_ordinary_layers(query):
    """Without shares of positions."""
    space, one, options = PLANE["D3"](), Scales(2, 1), {} if query == "lifting" else {"query": query}
    make, layer = (lifting, LiftingSelfAttention) if query == "lifting" else (group, GroupSelfAttention)
    ours = make(space, one, measure="counting", **options)
    plain = layer(ours.in_type, mixed(space), 2, 3, head_fields=4, **options).double()
    plain.load_state_dict(ours.state_dict())
    x = random_field(plain.in_type, 5, 4)
    torch.testing.assert_close(ours(x).tensor, plain(x).tensor)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "scales: got int, needed Scales", {"scales": 3}),
        (ValueError, "interval: got 4, needed at most the number of scales, 3", {"interval": 4}),
        (ValueError, "interval: got 0", {"interval": 0}),
        (ValueError, "windows: got 'round'", {"windows": "round"}),
        (
            ValueError,
            "windows: .* base 1.5, needed a whole",
            {"scales": Scales(1.5), "windows": "dilated"},
        ),
        (ValueError, "measure: got 'lebesgue'", {"measure": "lebesgue"}),
        (ValueError, "query: got 'each'", {"query": "each"}),
        (TypeError, "kernel_size: got None, needed an integer", {"kernel_size": None}),
        (ValueError, "kernel_size: got 4, needed an odd number$", {"kernel_size": 4}),
        (ValueError, "num_heads: the 2 regular fields", {"num_heads": 3}),
        (ValueError, "encoding: got AbsoluteEncoding, which sees positions", {"encoding": "absolute"}),
        (ValueError, "backend: got 'fast'", {"backend": "fast"}),
        (ValueError, "projection: got 'full'", {"projection": "full"}),
    ],
)
def test_bad_arguments(error, message, options):
    fields = THREE.repeat(regular(C4, 2))
    with pytest.raises(error, match=message):
        DilationSelfAttention(fields, fields, **{"scales": THREE, **options})


def test_bad_types():
    fields, four, vectors = THREE.repeat(regular(C4, 2)), regular(C4, 4), FieldType(C4, [C4.irrep(1)])
    point, circle = regular(gspaces.no_base_space(C4.fibergroup), 6), scalars(gspaces.rot2dOnR2(-1), 3)
    for error, message, layer, types in (
        (TypeError, "in_type: got int", DilationSelfAttention, (3, fields)),
        (ValueError, "in_type: got .* needed the same fields", DilationSelfAttention, (four, fields)),
        (ValueError, "out_type: got .* needed the same fields", DilationSelfAttention, (fields, four)),
        (ValueError, "out_type: its gspace is D4", DilationSelfAttention, (fields, regular(PLANE["D4"](), 6))),
        (ValueError, "in_type: its gspace .* has no base space", DilationSelfAttention, (point, point)),
        (NotImplementedError, r"gspace: the .* SO\(2\) is continuous", DilationSelfAttention, (circle, circle)),
        (ValueError, "in_type: .* needs trivial", DilationLiftingSelfAttention, (fields, fields)),
        (TypeError, "module: got Tensor", PerScale, (torch.zeros(1),)),
        (ValueError, "in_type: ScalePooling acts on every channel", ScalePooling, (THREE.repeat(vectors),)),
    ):
        with pytest.raises(error, match=message):
            layer(*types, scales=THREE)


def test_the_interval_is_two_scales_where_there_are():
    for count, interval in ((1, 1), (2, 2), (3, 2)):
        scales = Scales(2, count)
        assert group(C4, scales).plain.interval == interval
        x = random_field(scales.repeat(mixed(C4)), 4, 4)
        assert grid_error(group(C4, scales), x) < TOLERANCE
