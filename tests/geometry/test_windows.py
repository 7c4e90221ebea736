"""The neighbourhoods of queries on grids."""

import itertools
import math

import pytest

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("radius", [0.3, 1.0, 1.001, 1.42, 1.75, 2.0, 2.5, 3.2, 4.0])
def test_a_ball_holds_what_is_shorter_than_its_radius(radius, dim):
    window = Window.ball(radius)
    offsets = Grid((1,) * dim, window).offsets * (window.kernel_size // 2)
    expected = {x for x in itertools.product(range(-4, 5), repeat=dim) if math.hypot(*x) < radius}
    assert {tuple(x) for x in offsets.round().long().tolist()} == expected
    for whole in range(1, 4):
        assert Window.ball(whole + 0.5) == Window(2 * whole + 1, "disc")
