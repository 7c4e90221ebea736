import numpy as np
import pytest
from escnn import gspaces
from escnn.group import cyclic_group

from escnn_attention.groups.fibers import fibers
from escnn_attention.plotting._arguments import element_indices, pose_indices


def test_poses_are_indices_or_elements():
    space = gspaces.rot2dOnR2(4)
    table = fibers(space)
    assert pose_indices(table, None) == [0, 1, 2, 3]
    assert pose_indices(table, [space.fibergroup.element(3), 1]) == [3, 1]
    assert pose_indices(table, np.arange(2)) == [0, 1]
    for wrong, error, message in (
        ([4], ValueError, "got 4, needed a number from 0 to 3"),
        ([-1], ValueError, "got -1"),
        ([], ValueError, "got none"),
        ([cyclic_group(8).element(1)], ValueError, "got an element of C8, needed one of C4"),
        ([1.7], TypeError, "got 1.7, needed an integer"),
        (["a"], TypeError, "got 'a', needed an integer"),
        ([True], TypeError, "got True, needed an integer"),
        (2, TypeError, "got 2, needed a sequence"),
    ):
        with pytest.raises(error, match=f"poses: {message}"):
            pose_indices(table, wrong)


def test_elements_are_of_the_group():
    space = gspaces.rot2dOnR2(4)
    table = fibers(space)
    assert element_indices(table, iter([space.fibergroup.element(3), space.fibergroup.identity])) == [3, 0]
    for wrong, error, message in (
        ([], ValueError, "got none"),
        ([cyclic_group(8).element(2)], ValueError, "got an element of C8, needed one of C4"),
        ([1], TypeError, "got 1, needed an element of C4"),
        (space.fibergroup.element(1), TypeError, "needed a sequence"),
    ):
        with pytest.raises(error, match=f"elements: .*{message}"):
            element_indices(table, wrong)
