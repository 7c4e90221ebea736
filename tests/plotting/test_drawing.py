import matplotlib.pyplot
import pytest

from escnn_attention.plotting import plot_feature_maps
from tests.plotting.pictures import system


def test_no_figure_is_left_to_pyplot():
    x, lifting, _ = system()
    plot_feature_maps(x, {"lifting": lifting})
    assert matplotlib.pyplot.get_fignums() == []


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    x, lifting, _ = system()
    with pytest.raises(ImportError, match=r"pip install escnn-attention\[plot\]"):
        plot_feature_maps(x, {"lifting": lifting})


def test_importing_the_package_imports_no_extra_and_no_compiler(run_python):
    code = "import sys, escnn_attention, escnn_attention.equivariance.angles, escnn_attention.plotting; "
    code += "import escnn_attention.training; "
    code += "print(sorted({'lightning', 'matplotlib', 'typer', 'rich', 'torch._dynamo'} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"
