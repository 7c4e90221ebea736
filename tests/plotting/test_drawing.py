import math

import matplotlib.pyplot
import numpy as np
import pytest
from escnn import gspaces
from escnn.group import cyclic_group

from escnn_attention.groups.fibers import fibers
from escnn_attention.plotting import name_element, plot_accuracies, plot_feature_maps
from escnn_attention.plotting._drawing import element_indices, pose_indices
from tests.plotting.pictures import system


def angle(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def test_names_of_elements():
    assert [name_element(angle(degrees)) for degrees in (0, 90, -90, 45, 22.5)] == ["0°", "90°", "270°", "45°", "22.5°"]
    flip = np.diag([-1.0, 1.0])
    assert [name_element(angle(degrees) @ flip) for degrees in (0, 90)] == ["mirror", "mirror, 90°"]


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


def test_no_figure_is_left_to_pyplot():
    x, lifting, _ = system()
    plot_feature_maps(x, {"lifting": lifting})
    plot_accuracies({"one": {"upright": 1.0}})
    assert matplotlib.pyplot.get_fignums() == []


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install escnn-attention\[plot\]"):
        plot_accuracies({"one": {"upright": 1.0}})


def test_importing_the_package_imports_no_extra(run_python):
    code = "import sys, escnn_attention, escnn_attention.equivariance.angles, escnn_attention.plotting; "
    code += "import escnn_attention.training; "
    code += "print(sorted({'lightning', 'matplotlib', 'typer', 'rich'} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"
