import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool, PoseAttention
from escnn_attention.plotting import plot_attentive_layers
from escnn_attention.plotting._attended import find_attentive, look
from tests.plotting.pictures import drawn, shown, texts

pytest.importorskip("matplotlib")

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


def network(gspace=C4):
    """An image, and three attentive layers."""
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    return image(torch.randn(1, 1, 10, 10)), nn.SequentialModule(
        FeatureAttention(image, ratio=1, kernel_size=3),
        AttentiveConv(image, fields, 3, ratio=1, attention_size=3),
        nn.ReLU(fields),
        HalvingPool(fields),
        PoseAttention(fields),
    )


def arrows(ax):
    """The colours, directions and lengths of the arrows around a panel."""
    found = {}
    for text in ax.texts:
        vector = np.subtract(text.xy, text.xyann)
        found[text.arrow_patch.get_edgecolor()] = vector
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gspace", [C4, D4])
def test_maps_and_arrows_turn_with_the_image(gspace):
    x, model = network(gspace)
    element = gspace.fibergroup.elements[-1]
    figure = plot_attentive_layers(x, model, elements=[gspace.fibergroup.identity, element])
    assert drawn(figure) > 1000
    assert len(figure.axes) == 2 + 3 * (2 + 1)
    assert sum(text in texts(figure) for text in ("0", "1", "4")) == 3  # the names of the layers
    matrix = gspace.basespace_action(element)
    for row, poses in ((0, 1), (1, len(gspace.fibergroup.elements)), (2, len(gspace.fibergroup.elements))):
        upright, turned = figure.axes[2 + 3 * row : 4 + 3 * row]
        map_ = torch.tensor(shown(upright)[..., 3])[None, None]
        expected = nn.GeometricTensor(map_, nn.FieldType(gspace, [gspace.trivial_repr])).transform(element)
        np.testing.assert_allclose(shown(turned)[..., 3], expected.tensor[0, 0], atol=1e-4)
        before, after = arrows(upright), arrows(turned)
        assert len(before) == (poses if poses > 1 else 0)
        for colour, vector in before.items():
            np.testing.assert_allclose(after[colour], matrix @ vector, atol=1e-5)
            assert 0 < np.linalg.norm(vector) < 0.3


def test_arrows_are_the_sizes_of_what_a_layer_gives():
    x, model = network()
    figure = plot_attentive_layers(x, model, ["4"], elements=[C4.fibergroup.identity])
    with torch.no_grad():
        sizes = model(x).tensor[0].abs().unflatten(0, (2, 4)).mean((0, 2, 3))
    lengths = [np.linalg.norm(vector) for vector in arrows(figure.axes[1]).values()]
    np.testing.assert_allclose(np.array(lengths) / max(lengths), sizes / sizes.max(), rtol=1e-4)
    # Pose h points where h takes the first axis.
    for vector, direction in zip(arrows(figure.axes[1]).values(), ((1, 0), (0, 1), (-1, 0), (0, -1)), strict=True):
        np.testing.assert_allclose(vector / np.linalg.norm(vector), direction, atol=1e-6)


def test_a_network_that_is_not_equivariant_is_seen(monkeypatch):
    x, model = network()

    def changes():
        figure = plot_attentive_layers(x, model)
        return [float(t.get_text()) for t in figure.texts if t.get_position()[0] > 0.85 and t.get_text()[-1].isdigit()]

    assert len(changes()) == 3
    assert max(changes()) < 1e-5
    monkeypatch.setattr(model[1].plain.kernel, "orbits", model[1].plain.kernel.orbits.flip(0))
    exact, *others = changes()
    assert exact < 1e-5
    assert min(others) > 1e-3


def test_angles_and_chosen_layers():
    x, model = network()
    figure = plot_attentive_layers(x, model, ["4", model[1]], angles=[0, 30], background=0.5)
    assert len(figure.axes) == 2 + 2 * 3
    assert {"0°", "30°", "4", "1"} <= set(texts(figure))
    for wrong, error, message in (
        ({"layers": []}, ValueError, "layers: got none"),
        ({"layers": ["2"]}, ValueError, "layer: got '2', needed an attentive layer: '0', '1', '4'"),
        ({"elements": []}, ValueError, "elements: got none"),
    ):
        with pytest.raises(error, match=message):
            plot_attentive_layers(x, model, **wrong)


def test_where_the_grids_lie():
    x, model = network()
    _, run = look(x, model, find_attentive(model, None))
    covered = {name: found.covered for name, found in run(x).items()}
    assert covered == {"0": (1, 1), "1": (0.8, 0.8), "4": (0.8, 0.8)}
