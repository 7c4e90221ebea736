"""Names of group elements, and the choice of elements and poses."""

import math

import numpy as np
import pytest
from escnn import gspaces
from escnn.group import cyclic_group

from escnn_attention.groups.fibers import fibers
from escnn_attention.plotting import name_element
from escnn_attention.plotting._elements import pose_indices


def angle(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def test_names_of_elements():
    assert [name_element(angle(degrees)) for degrees in (0, 90, -90, 45, 22.5)] == ["0°", "90°", "270°", "45°", "22.5°"]
    flip = np.diag([-1.0, 1.0])
    assert [name_element(angle(degrees) @ flip) for degrees in (0, 90)] == ["mirror", "mirror, 90°"]


@pytest.mark.parametrize(
    ("make", "elements", "names"),
    [
        (lambda: gspaces.rot2dOnR3(4), [1, 2, 3], ["90° about z", "180° about z", "270° about z"]),
        (lambda: gspaces.dihedralOnR3(2), [1, 2, 3], None),
        (lambda: gspaces.invOnR3(), [1], ["inversion"]),
        (lambda: gspaces.mirOnR3(), [1], ["mirror along x"]),
    ],
)
def test_names_in_space(make, elements, names):
    g = make()
    matrices = [g.basespace_action(list(g.fibergroup.elements)[i]) for i in elements]
    found = [name_element(matrix) for matrix in matrices]
    if names is None:
        assert sorted(found) == ["180° about x", "180° about y", "180° about z"]
    else:
        assert [name.replace("along y", "along x").replace("along z", "along x") for name in found] == names


def test_names_are_those_of_rotations():
    """Rotating about the named axis by the named angle gives the matrix."""
    from scipy.spatial.transform import Rotation

    assert name_element(np.eye(3)[[2, 0, 1]]) == "120° about (1, 1, 1)"
    assert name_element(np.diag([1.0, 1.0, -1.0])) == "mirror along z"
    for matrix in Rotation.random(20, random_state=0).as_matrix():
        angle, axis = name_element(matrix).split("° about ")
        axis = np.array([float(a) for a in axis.strip("()").split(",")])
        again = Rotation.from_rotvec(np.radians(float(angle)) * axis / np.linalg.norm(axis)).as_matrix()
        np.testing.assert_allclose(again, matrix, atol=0.05)
        assert name_element(-matrix).endswith(", inverted")


def test_other_matrices_have_no_name():
    with pytest.raises(ValueError, match=r"matrix: .*\(2, 2\)"):
        name_element(np.eye(4))


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
