import numpy as np
import pytest
import torch
from escnn import nn

from escnn_attention.training.comparison.groups import (
    grid_symmetries,
    gspace_by_name,
    random_angles,
    rotate_by_angles,
    transform_by_element,
)
from escnn_attention.training.errors import UserError


@pytest.mark.parametrize(("name", "order"), [("c2", 2), ("C4", 4), ("c12", 12), ("d1", 2), ("d4", 8), ("D6", 12)])
def test_groups_by_name(name, order):
    assert gspace_by_name(name).fibergroup.order() == order


@pytest.mark.parametrize("name", ["", "so2", "c", "c0", "4", "c4 ", "c-4", "c1", "c64", "d17", "c99999"])
def test_unknown_groups(name):
    with pytest.raises(UserError, match="group"):
        gspace_by_name(name)


def test_elements_that_keep_the_grid():
    assert list(grid_symmetries(gspace_by_name("c4"))) == ["90°", "180°", "270°"]
    assert set(grid_symmetries(gspace_by_name("c8"))) == {"90°", "180°", "270°"}
    assert list(grid_symmetries(gspace_by_name("c6"))) == ["180°"]
    assert grid_symmetries(gspace_by_name("c3")) == {}
    assert len(grid_symmetries(gspace_by_name("d4"))) == 7


@pytest.mark.parametrize("size", [7, 8])
def test_elements_act_as_those_of_escnn(size):
    gspace = gspace_by_name("d4")
    images = np.random.default_rng(0).random((3, size, size), dtype=np.float32)
    x = nn.GeometricTensor(torch.from_numpy(images)[:, None], nn.FieldType(gspace, [gspace.trivial_repr]))
    for name, matrix in grid_symmetries(gspace).items():
        element = next(
            g for g in gspace.fibergroup.elements if np.allclose(gspace.basespace_action(g), matrix)
        )  # fmt: skip
        found = transform_by_element(images, matrix)
        np.testing.assert_allclose(found, x.transform(element).tensor[:, 0], atol=1e-5, err_msg=name)
        assert sorted(found.ravel()) == sorted(images.ravel())
    np.testing.assert_array_equal(
        transform_by_element(images, grid_symmetries(gspace)["90°"]), np.rot90(images, axes=(1, 2))
    )  # fmt: skip


def test_angles_agree_with_quarter_turns():
    images = np.random.default_rng(0).random((4, 9, 9), dtype=np.float32)
    found = rotate_by_angles(images, np.array([0.0, 90.0, 180.0, 270.0]))
    np.testing.assert_allclose(found, [np.rot90(image, k) for k, image in enumerate(images)], atol=1e-5)


def test_angles_are_seeded():
    np.testing.assert_array_equal(random_angles(5, 0), random_angles(5, 0))
    assert (random_angles(5, 0) != random_angles(5, 1)).all()
    assert (np.histogram(random_angles(4000, 0), 4, (0, 360))[0] > 900).all()
