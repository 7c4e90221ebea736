"""Places of a window that a group maps onto each other, and which of them heads look at."""

import numpy as np
import pytest
import torch
from escnn import gspaces

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.orbits import Orbits, orbits_of
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import fibers
from tests.spaces import PLANE, VOLUME

LINE = {"one": np.ones((1, 1, 1)), "mirror": np.array([[[1.0]], [[-1.0]]])}


def action(name):
    return LINE[name] if name in LINE else fibers((PLANE | VOLUME)[name]()).action


def window(name, width, shape="square"):
    matrices = action(name)
    return Grid((1,) * matrices.shape[-1], Window(width, shape)).offsets, matrices


NUMBERS = {("one", 5): 5, ("mirror", 5): 3, ("trivial", 3): 9, ("flip", 3): 6, ("C2", 3): 5, ("C4", 3): 3, ("D4", 3): 3}
NUMBERS |= {("C4", 5): 7, ("D4", 5): 6, ("C4", 7): 13, ("octahedral", 3): 4, ("mirror", 7): 4, ("inversion", 3): 14}


@pytest.mark.parametrize(("name", "width"), NUMBERS)
def test_numbers_of_orbits(name, width):
    points, matrices = window(name, width)
    first, stays = orbits_of(points, matrices)
    assert len(first) == NUMBERS[name, width]
    # The orbits are as long as the group by what leaves a point where it is, and there is nothing else.
    assert (len(matrices) / stays).sum() == len(points)
    orbits = [{tuple(p.round(6) + 0.0) for p in matrices @ points[i].numpy()} for i in first]
    assert sum(map(len, orbits)) == len(set().union(*orbits)) == len(points)


@pytest.mark.parametrize("name", ["C8", "D6", "flip about an odd axis"])
def test_a_group_that_moves_places_between_the_points_has_orbits_of_those_it_does_not(name):
    points, matrices = window(name, 5, "disc")
    first, stays = orbits_of(points, matrices)
    kept = points[first]
    for i, p in enumerate(kept):
        images = torch.from_numpy(matrices) @ p
        met = (images[:, None] - kept).abs().amax(-1).amin(0) < 1e-6
        assert met.nonzero().flatten().tolist() == [i]
        assert stays[i] == ((images - p).abs().amax(-1) < 1e-6).sum()
    for p in points:
        images = torch.from_numpy(matrices) @ p
        assert ((images[:, None] - kept).abs().amax(-1).amin(0) < 1e-6).sum() == 1


@pytest.mark.parametrize("name", ["C4", "D4", "octahedral", "mirror"])
def test_as_many_heads_as_orbits_cover_the_window(name):
    points, matrices = window(name, 3)
    number = len(orbits_of(points, matrices)[0])
    orbits = Orbits(Window(3), matrices, poses=(0,))

    def covered(num_heads):
        views = orbits.spread(num_heads)
        assert views.poses.tolist() == num_heads * [0]
        assert views.step == 1.0
        return {tuple(p.round(4) + 0.0) for place in views.places for p in matrices @ place.numpy()}

    assert len(covered(number)) == len(points)
    assert covered(2 * number + 1) == covered(number)
    assert len(covered(number - 1)) < len(points)


def test_few_heads_are_spread_from_the_middle_on_and_more_begin_again():
    orbits = Orbits(Window(5), action("C4"), poses=(0,))
    radii = (2 * orbits.spread(7).places).square().sum(1).round().tolist()
    assert radii == [0, 1, 2, 4, 5, 5, 8]
    assert (2 * orbits.spread(4).places).square().sum(1).round().tolist() == [0, 1, 4, 5]
    assert (2 * orbits.spread(9).places).square().sum(1).round().tolist() == [*radii, 0, 4]
    assert orbits.spread(1).places.tolist() == [[0.0, 0.0]]
    assert orbits.spread(3).step == 0.5


def test_where_every_place_counts_there_are_all_with_all_poses():
    orbits = Orbits(Window(3), np.eye(2)[None], poses=(0, 1, 2, 3))
    views = orbits.spread(36)
    pairs = {(*place, pose) for place, pose in zip(views.places.tolist(), views.poses.tolist(), strict=True)}
    assert len(pairs) == 36
    few = orbits.spread(9)
    assert len(set(map(tuple, few.places.tolist()))) == 9
    assert set(few.poses.tolist()) == {0, 1, 2, 3}


def test_global_attention_has_a_lattice():
    orbits = Orbits(Window(), fibers(gspaces.rot2dOnR2(4)).action, poses=(0,))
    views = orbits.spread(3, width=3, reach=0.25)
    assert views.places.norm(dim=1).tolist() == pytest.approx([0, 0.25, 0.25 * 2**0.5])
    assert views.step == 0.25
    ball = Orbits(Window(), fibers(gspaces.rot2dOnR2(8)).action, poses=(0,), ball=True)
    assert ball.spread(99, width=5, reach=0.5).places.norm(dim=1).max() == pytest.approx(0.25 * 5**0.5)
    for options in ({}, {"width": 3}, {"reach": 0.5}):
        with pytest.raises(ValueError, match=r"width, reach: .*global attention"):
            orbits.spread(3, **options)
