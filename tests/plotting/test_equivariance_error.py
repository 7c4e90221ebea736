import numpy as np
import pytest
from escnn import gspaces, nn

from escnn_attention.angles import equivariance_errors
from escnn_attention.plotting import plot_equivariance_error
from tests.plotting.pictures import drawn, system

pytest.importorskip("matplotlib")

ANGLES = [0, 20, 45, 90, 200, 270, 360]


def models():
    return {f"C{n}": system(gspaces.rot2dOnR2(n))[1] for n in (2, 4)}


def test_curves_and_dots():
    measured = equivariance_errors(models(), angles=ANGLES, size=10)
    figure = plot_equivariance_error(measured)
    assert drawn(figure) > 1000
    (ax,) = figure.axes
    interpolation, *curves = ax.lines
    np.testing.assert_allclose(interpolation.get_ydata(), measured.interpolation)
    assert [curve.get_label() for curve in curves] == ["C2", "C4"]
    for curve in curves:
        np.testing.assert_array_equal(curve.get_xdata(), ANGLES)
        np.testing.assert_allclose(curve.get_ydata(), measured.errors[curve.get_label()])
    dots = [[float(x) for x, _ in marks.get_offsets()] for marks in ax.collections]
    assert dots == [[0, 360], [0, 90, 270, 360]]
    np.testing.assert_allclose(np.concatenate([m.get_offsets()[:, 1] for m in ax.collections]), 0, atol=1e-5)
    assert [text.get_text() for text in figure.legends[0].get_texts()][1:] == ["C2", "C4"]
    # What is no turn of the group is an error.
    assert curves[1].get_ydata()[1] > 1e-3


def test_options():
    given = models()
    figure = plot_equivariance_error(given, angles=[0, 10, 20], size=8, interpolation=False, log=True, title="Errors")
    (ax,) = figure.axes
    assert len(ax.lines) == 2
    assert ax.get_yscale() == "log"
    assert min(ax.lines[0].get_ydata()) >= 1e-8
    assert figure.get_suptitle() == "Errors"
    assert drawn(figure) > 1000


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="models: got none"):
        plot_equivariance_error({})
    with pytest.raises(TypeError, match="models: got FieldType"):
        plot_equivariance_error({"type": nn.FieldType(gspaces.rot2dOnR2(4), [gspaces.rot2dOnR2(4).trivial_repr])})
