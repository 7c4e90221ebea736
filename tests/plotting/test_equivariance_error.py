import inspect

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention.equivariance.angles import EquivarianceErrors, equivariance_errors
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


@pytest.mark.slow
def test_options():
    given = models()
    figure = plot_equivariance_error(given, angles=[0, 10, 20], size=8, interpolation=False, log=True, title="Errors")
    (ax,) = figure.axes
    assert len(ax.lines) == 2
    assert ax.get_yscale() == "log"
    assert min(ax.lines[0].get_ydata()) >= 1e-8
    assert figure.get_suptitle() == "Errors"
    assert drawn(figure) > 1000


def measured(number=1, angles=(0.0, 90.0)):
    errors = {str(i): np.full(len(angles), 0.1) for i in range(number)}
    return EquivarianceErrors(np.array(angles), errors, np.zeros(len(angles)), dict.fromkeys(errors, ()))


def test_one_model():
    model = system()[1]
    one, named = (plot_equivariance_error(m, angles=[0, 30], size=8) for m in (model, {type(model).__name__: model}))
    for curve, other in zip(one.axes[0].lines, named.axes[0].lines, strict=True):
        assert curve.get_label() == other.get_label()
        np.testing.assert_array_equal(curve.get_ydata(), other.get_ydata())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.slow
def test_one_angle(log):
    figure = plot_equivariance_error(measured(angles=(30.0,)), log=log)
    assert drawn(figure) > 1000
    (ax,) = figure.axes
    assert [line.get_marker() for line in ax.lines] == ["_", "_"]
    assert ax.get_xticks().tolist() == [30]


def test_as_many_models_as_colours():
    (ax,) = plot_equivariance_error(measured(8)).axes
    assert len({line.get_color() for line in ax.lines}) == 9
    for models in (measured(9), {str(i): torch.nn.Identity() for i in range(9)}):
        with pytest.raises(ValueError, match=r"models: .*at most 8"):
            plot_equivariance_error(models)


@pytest.mark.parametrize(
    "option",
    [
        {"images": torch.zeros(1, 1, 4, 4)}, {"angles": [0, 90]}, {"layer": "0"}, {"size": -3}, {"disc": 0.5},
        {"background": 1.0}, {"seed": 1},
    ],
)  # fmt: skip
def test_what_was_measured_is_not_measured_again(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}: .*measured before"):
        plot_equivariance_error(measured(), **option)
    assert name in inspect.signature(equivariance_errors).parameters


def test_mistakes_are_named():
    for errors, interpolation in ((measured(0), False), (measured(angles=()), True)):
        with pytest.raises(ValueError, match="models: got no errors"):
            plot_equivariance_error(errors, interpolation=interpolation)
    assert len(plot_equivariance_error(measured(0)).axes[0].lines) == 1
    with pytest.raises(ValueError, match="models: got none"):
        plot_equivariance_error({})
    with pytest.raises(TypeError, match=r"models: .*or a mapping"):
        plot_equivariance_error([system()[1]])
    with pytest.raises(TypeError, match="models: got FieldType"):
        plot_equivariance_error({"type": nn.FieldType(gspaces.rot2dOnR2(4), [gspaces.rot2dOnR2(4).trivial_repr])})
