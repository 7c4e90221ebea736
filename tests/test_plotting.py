import io
import math

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.plotting import name_element, plot_accuracies, plot_attention_maps, plot_feature_maps

pytest.importorskip("matplotlib")


def system(gspace=None):
    """An image, a lifting layer and a group layer with two heads."""
    gspace = gspace or gspaces.rot2dOnR2(4)
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    hidden = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    lifting = LiftingSelfAttention(image, hidden, 2, 3)
    attention = GroupSelfAttention(hidden, hidden, 2, 3)
    return image(torch.randn(1, 1, 6, 6)), lifting, attention


def texts(figure):
    found = [text.get_text() for text in figure.texts]
    for ax in figure.axes:
        found += [ax.get_title(), *(text.get_text() for text in ax.texts)]
    return found


def drawn(figure):
    """The number of bytes of the picture; drawing must not fail."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return len(file.getvalue())


def shown(ax):
    return np.asarray(ax.images[-1].get_array())


def angle(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def test_names_of_elements():
    assert [name_element(angle(degrees)) for degrees in (0, 90, -90, 45, 22.5)] == ["0°", "90°", "270°", "45°", "22.5°"]
    flip = np.diag([-1.0, 1.0])
    assert [name_element(angle(degrees) @ flip) for degrees in (0, 90)] == ["mirror", "mirror, 90°"]


def test_feature_maps_turn_and_their_frames_tell_the_permutation():
    x, lifting, attention = system()
    stages = {"lifting": lifting, "attention": nn.SequentialModule(lifting, attention)}
    figure = plot_feature_maps(x, stages, fields={"lifting": 1})
    assert drawn(figure) > 1000
    assert len(figure.axes) == 4 + 2 * 4 * 4
    assert "lifting\n(field 1)" in texts(figure)
    lifted = np.array([shown(ax) for ax in figure.axes[4:20]]).reshape(4, 4, 6, 6)  # poses, elements
    labels = np.array([int(ax.texts[0].get_text()) for ax in figure.axes[4:20]]).reshape(4, 4)
    for element in range(4):
        assert sorted(labels[:, element]) == [0, 1, 2, 3]
        for pose in range(4):
            original = lifted[labels[pose, element], 0]
            np.testing.assert_allclose(lifted[pose, element], np.rot90(original, element), atol=1e-4)


def test_attention_turns_with_the_image():
    x, lifting, attention = system()
    figure = plot_attention_maps(
        x, attention, nn.SequentialModule(lifting, attention), positions=[(1, 2), (4, 4)], head=1
    )
    assert drawn(figure) > 1000
    assert len(figure.axes) == 2 * 2 * (1 + 4)
    assert any("head 1" in text for text in texts(figure))
    rows = [figure.axes[5 * row : 5 * row + 5] for row in range(4)]
    for upright, turned in (rows[:2], rows[2:]):
        before = {ax.texts[0].get_text(): shown(ax)[..., 3] for ax in upright[1:]}
        for ax in turned[1:]:
            np.testing.assert_allclose(shown(ax)[..., 3], np.rot90(before[ax.texts[0].get_text()]), atol=1e-3)
    # The query is turned with the image: (1, 2) goes to (6 - 1 - 2, 1).
    assert rows[1][0].lines[0].get_data() == ([1], [3])


def test_lifting_attention_is_drawn_too():
    x, lifting, _ = system(gspaces.flipRot2dOnR2(4))
    figure = plot_attention_maps(x, lifting, positions=[(0, 0)])
    assert len(figure.axes) == 2 * (1 + 8)
    assert drawn(figure) > 1000


def test_large_groups_show_the_elements_that_keep_the_grid():
    x, lifting, _ = system(gspaces.rot2dOnR2(12))
    figure = plot_feature_maps(x, {"lifting": lifting})
    assert len(figure.axes) == 4 + 12 * 4
    assert drawn(figure) > 1000


def test_accuracies():
    accuracies = {"one": {"upright": 1.0, "turned": 0.25}, "other": {"upright": 0.5, "turned": 0.5}}
    figure = plot_accuracies(accuracies, title="Who knows", note="of four")
    assert drawn(figure) > 1000
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "other"]
    assert sorted(tuple(point) for marks in ax.collections for point in marks.get_offsets()) == [
        (25.0, 0.0),
        (50.0, 1.0),
        (50.0, 1.0),
        (100.0, 0.0),
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["upright", "turned"]


def test_no_figure_is_left_to_pyplot():
    import matplotlib.pyplot

    x, lifting, _ = system()
    plot_feature_maps(x, {"lifting": lifting})
    plot_accuracies({"one": {"upright": 1.0}})
    assert matplotlib.pyplot.get_fignums() == []


def test_mistakes_are_named():
    x, lifting, attention = system()
    with pytest.raises(ValueError, match="GeometricTensor"):
        plot_feature_maps(x.tensor, {})
    with pytest.raises(ValueError, match="one planar image"):
        plot_feature_maps(x.type(torch.randn(2, 1, 6, 6)), {})
    with pytest.raises(ValueError, match="'pooled' must give regular fields"):
        plot_feature_maps(x, {"pooled": nn.SequentialModule(lifting, nn.GroupPooling(lifting.out_type))})
    with pytest.raises(ValueError, match="outside the grid of 6×6"):
        plot_attention_maps(x, lifting, positions=[(6, 0)])
    with pytest.raises(ValueError, match="does not call layer"):
        plot_attention_maps(x, attention, lifting, positions=[(0, 0)])
    eighth = system(gspaces.rot2dOnR2(8))
    with pytest.raises(ValueError, match="elements"):
        plot_attention_maps(
            eighth[0], eighth[1], positions=[(0, 0)], elements=[eighth[0].type.gspace.fibergroup.element(1)]
        )
    with pytest.raises(ValueError, match="empty"):
        plot_accuracies({})


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install escnn-attention\[plot\]"):
        plot_accuracies({"one": {"upright": 1.0}})


def test_importing_the_package_imports_no_extra(run_python):
    code = "import sys, escnn_attention, escnn_attention.plotting, escnn_attention.training; "
    code += "print(sorted({'lightning', 'matplotlib', 'typer', 'rich'} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"
