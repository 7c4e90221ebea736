import itertools
import math

import pytest
import torch
from escnn import gspaces

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.nn.dilation import Scales
from escnn_attention.plain.dilation import scaled_window
from tests.layers import assert_formula, drawn
from tests.nn.scales import group, lifting
from tests.plain.loops import written_out


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
    got, expected = layer(layer.in_type(x)).tensor, written_out(layer, x, query)
    assert_formula(got, expected, [x, *layer.parameters()], 1e-10, 1e-12)
