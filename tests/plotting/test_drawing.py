"""What all figures share."""

from functools import partial

import matplotlib.pyplot
import numpy as np
import pytest
import torch
from escnn import nn
from escnn.group import cyclic_group

from escnn_attention import FeatureAttention
from escnn_attention.models import EquivariantClassifier
from escnn_attention.plotting import (
    animate_feature_maps,
    plot_attention_maps,
    plot_attentive_layers,
    plot_attentive_maps,
    plot_encoding,
    plot_feature_maps,
)
from tests.plotting.pictures import Wrapped, drawn, shown, system

FIGURES = {
    "attention maps": partial(plot_attention_maps, positions=[(0, 0)]),
    "attentive maps": plot_attentive_maps,
    "attentive layers": plot_attentive_layers,
    "feature maps": plot_feature_maps,
}
OF_MODELS = FIGURES | {"encodings": lambda x, model: plot_encoding(model, pose_table=False)}


def modules():
    """An image, and layers of which every figure can draw some."""
    x, lifting, attention = system()
    return x, {"lifting": lifting, "attentive": FeatureAttention(lifting.out_type, kernel_size=3), "last": attention}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_mistakes_are_named(draw):
    x, stages = modules()
    model = nn.SequentialModule(*stages.values())
    draw(x, model)
    for wrong, error, message in (
        ({"elements": [1]}, TypeError, "elements: got 1, needed an element of C4"),
        ({"elements": [cyclic_group(8).element(2)]}, ValueError, "elements: got an element of C8, needed one of C4"),
        ({"elements": []}, ValueError, "elements: got none"),
        ({"elements": cyclic_group(4).element(1)}, TypeError, "elements: .*needed a sequence"),
        ({"x": x.type(torch.randn(2, 1, 6, 6))}, ValueError, "one planar image"),
        ({"x": [x]}, TypeError, "x: got list"),
        ({"model": "model"}, TypeError, "(model|stages): got str"),
    ):
        given = {"x": x, "model": model} | wrong
        with pytest.raises(error, match=message):
            draw(given.pop("x"), given.pop("model"), **given)


def assert_same(figure, expected, atol):
    assert drawn(figure) > 1000
    assert len(figure.axes) == len(expected.axes)
    for ax, other in zip(figure.axes, expected.axes, strict=True):
        if other.images:
            np.testing.assert_allclose(shown(ax), shown(other), atol=atol)


@pytest.mark.sampled(2, of="pictures of any model")
@pytest.mark.parametrize("draw", OF_MODELS.values(), ids=OF_MODELS)
def test_any_model(draw):
    """A sequence, a classifier, and a network of plain tensors give the same picture."""
    x, stages = modules()
    model = nn.SequentialModule(*stages.values())
    expected = draw(x, model)
    for given, other in ((x, EquivariantClassifier(stages, 3)), (x.tensor, Wrapped(*model))):
        assert_same(draw(given, other), expected, 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("draw", OF_MODELS.values(), ids=OF_MODELS)
@pytest.mark.slow
def test_any_precision(draw, dtype):
    """The modes and states of modules are as before."""
    x, stages = modules()
    model = nn.SequentialModule(*stages.values())
    model[1].eval()
    expected, state = draw(x, model), [value.clone() for value in model.state_dict().values()]
    assert [m.training for m in model] == [True, False, True]
    assert all(map(torch.equal, state, model.state_dict().values()))
    assert_same(draw(x.to(dtype), model.to(dtype)), expected, 1e-4 if dtype == torch.float64 else 0.15)


class Lazy(torch.nn.Module):
    """Calls none of its layers."""

    def __init__(self, x, stages):
        super().__init__()
        self.in_type, self.stages = x.type, torch.nn.ModuleDict(stages)

    def forward(self, x):
        return x


@pytest.mark.parametrize("name", ["attention maps", "attentive maps", "attentive layers"])
def test_layers_that_are_not_called(name):
    with pytest.raises(ValueError, match=r"does not call (the layer|'stages\.attentive')"):
        FIGURES[name](modules()[0], Lazy(*modules()))


@pytest.mark.parametrize("draw", [FIGURES["attention maps"], plot_feature_maps, animate_feature_maps])
def test_exported_networks_are_said_to_know_no_group(draw):
    x, stages = modules()
    exported = EquivariantClassifier(stages, 3).export()
    for given in (x, x.tensor):
        with pytest.raises(ValueError, match=r"model: .*exported"):
            draw(given, exported)


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
