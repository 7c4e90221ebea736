"""Maps of attentive convolutions."""

import re

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import AttentiveConv, Crop, FeatureAttention, GroupSelfAttention, HalvingPool, PoseAttention
from escnn_attention.plotting import plot_attended_images, plot_attentive_layers, plot_attentive_maps
from tests.plotting.pictures import drawn, number, opacity, shown, texts

pytest.importorskip("matplotlib")

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
UPRIGHT = {"elements": [C4.fibergroup.identity], "back": False}


def network(gspace=C4, size=9, **options):
    """An image, and lifting, attention on features, and an attentive convolution."""
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    fields = nn.FieldType(gspace, 3 * [gspace.regular_repr])
    lifting = AttentiveConv(image, fields, 3, channel=False, spatial=False)
    if options.get("spatial", True):
        options["attention_size"] = 3
    model = nn.SequentialModule(
        lifting, FeatureAttention(fields, kernel_size=3), AttentiveConv(fields, fields, 3, **options)
    )
    return image(torch.randn(1, 1, size, size)), model


def columns(figure, count, rows):
    """The panels of each column, from the input downwards; all but the scale at the end."""
    assert len(figure.axes) == count * rows + 1
    return [figure.axes[rows * k : rows * (k + 1)] for k in range(count)]


def changes(figure):
    """The numbers below the panels, or beside them."""
    return [float(text) for text in (t.get_text() for t in figure.texts) if re.fullmatch(r"[\d.]+(e-\d+)?", text)]


@pytest.mark.sampled(1)  # a map is a panel, and those of a column are as many as poses
@pytest.mark.parametrize("gspace", [C4, gspaces.flipRot2dOnR2(2)], ids=["C4", "D2"])
@pytest.mark.parametrize("layer", ["1", "2"])
@pytest.mark.slow
def test_maps_turn_with_the_image(gspace, layer):
    x, model = network(gspace)
    order = gspace.fibergroup.order()
    elements = gspace.fibergroup.elements[-2:]
    figure = plot_attentive_maps(x, model, layer, elements=[gspace.fibergroup.identity, *elements])
    assert drawn(figure) > 1000
    panels = columns(figure, 6, order + 2)
    upright = {number(ax): opacity(ax) for ax in panels[0][1:-1]}
    assert sorted(upright) == list(range(order))
    assert max(np.ptp(values) for values in upright.values()) > 0.1
    for column, element in zip(panels[1:3], elements, strict=True):
        for ax in column[1:-1]:
            map_ = nn.GeometricTensor(
                torch.tensor(upright[number(ax)])[None, None], nn.FieldType(gspace, [gspace.trivial_repr])
            )
            np.testing.assert_allclose(opacity(ax), map_.transform(element).tensor[0, 0], atol=1e-4)
    # Turned back they are the maps of the image as it is, in the same places, and so is the channel map.
    for column in panels[3:]:
        for ax, expected in zip(column[1:], panels[0][1:], strict=True):
            np.testing.assert_allclose(opacity(ax), opacity(expected), atol=1e-4)
        assert [number(ax) for ax in column[1:-1]] == list(range(order))


def test_a_layer_that_is_not_equivariant_is_seen(monkeypatch):
    x, model = network()
    assert max(changes(plot_attentive_maps(x, model, "1"))) < 1e-5
    kernel = model[1].plain.spatial
    orbits = torch.randperm(kernel.orbits.numel()).reshape(kernel.orbits.shape) % (int(kernel.orbits.max()) + 1)
    monkeypatch.setattr(kernel, "orbits", orbits)
    first, *others = changes(plot_attentive_maps(x, model, "1"))
    assert first == 0
    assert min(others) > 1e-2


def expected_parts(layer, x):
    """What the layer lets through, written out: (out fields, poses, h, w), and for channels alone."""
    maps = layer.attention_maps(x)
    if isinstance(layer, PoseAttention):
        return 1 - maps, None
    if isinstance(layer, FeatureAttention):
        both = torch.einsum("fp,pyx->fpyx", maps.channel[0], maps.spatial[0])
        return 1 - both, 1 - maps.channel[0]
    both = torch.einsum("opiq,opqyx->opiqyx", maps.channel[0], maps.spatial[0]).mean((2, 3))
    return 1 - both, 1 - maps.channel[0].mean((2, 3))


@pytest.mark.parametrize("make", [FeatureAttention, PoseAttention, lambda t: AttentiveConv(t, t, 3, attention_size=3)])
def test_what_is_drawn_is_what_the_layer_lets_through(make):
    fields = nn.FieldType(C4, 3 * [C4.regular_repr])
    layer, x = make(fields), fields(torch.randn(1, 12, 7, 7))
    with torch.no_grad():
        passed, channels = expected_parts(layer, x)
    for field in (None, 1):
        options = {} if field is None else {"field": field}
        figure = plot_attentive_maps(x, layer, elements=C4.fibergroup.elements[:1], back=False, **options)
        panels = figure.axes[1:5]
        mean = passed.mean(0) if field is None or len(passed) == 1 else passed[field]
        low, high = float(mean.min()), float(mean.max())
        for ax, values in zip(panels, mean, strict=True):
            np.testing.assert_allclose(opacity(ax), 0.9 * (values - low) / (high - low), atol=1e-4)
        assert len(figure.axes) == 5 + (channels is not None) + 1
        if channels is not None:
            chosen = channels if field is None else channels[field : field + 1]
            low, high = chosen.min(), chosen.max()
            np.testing.assert_allclose(opacity(figure.axes[5]), 0.9 * (chosen - low) / (high - low), atol=1e-4)
        bar = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
        assert bar == [f"{mean.min():.2f}", f"{mean.max():.2f}"]


def test_attention_instead_of_what_it_leaves():
    fields = nn.FieldType(C4, 2 * [C4.regular_repr])
    layer, x = FeatureAttention(fields, kernel_size=3), fields(torch.randn(1, 8, 7, 7))
    left = plot_attentive_maps(x, layer, **UPRIGHT)
    layer.plain.residual = False
    kept = plot_attentive_maps(x, layer, **UPRIGHT)
    np.testing.assert_allclose(opacity(kept.axes[1]), 0.9 - opacity(left.axes[1]), atol=1e-4)


@pytest.mark.slow
def test_one_kind_of_attention():
    fields = nn.FieldType(C4, 2 * [C4.regular_repr])
    x = fields(torch.randn(1, 8, 7, 7))
    only_channel = plot_attentive_maps(x, FeatureAttention(fields, spatial=False), **UPRIGHT)
    assert opacity(only_channel.axes[1]).shape == (1, 1)
    assert only_channel.axes[1].images[-1].get_extent() == [-3.5, 3.5, 3.5, -3.5]
    columns(only_channel, 1, 6)
    columns(plot_attentive_maps(x, FeatureAttention(fields, channel=False), **UPRIGHT), 1, 5)
    for options in ({"spatial": False}, {"channel": False}):
        rows = 5 + ("spatial" in options)
        columns(plot_attentive_maps(x, AttentiveConv(fields, fields, 3, **options), **UPRIGHT), 1, rows)


def test_attention_on_images_has_one_map():
    image = nn.FieldType(C4, 3 * [C4.trivial_repr])
    figure = plot_attentive_maps(torch.rand(1, 3, 7, 7), FeatureAttention(image, ratio=1))
    panels = columns(figure, 8, 3)
    assert shown(panels[0][0]).shape == (7, 7, 3)  # in colours
    assert not panels[0][1].texts
    assert "all poses" in texts(figure)
    for turned, back in zip(panels[:4], panels[4:], strict=True):
        np.testing.assert_allclose(opacity(back[1]), opacity(panels[0][1]), atol=1e-4)
        assert opacity(turned[1]).shape == (7, 7)


@pytest.mark.slow
def test_angles():
    x, model = network(size=13)
    figure = plot_attentive_maps(x, model, "1", angles=[0, 45, 90], background=-9.0)
    panels = columns(figure, 6, 6)
    assert shown(panels[1][0]).min() == -9  # the corners
    for ax, expected in zip(panels[5][1:], panels[0][1:], strict=True):
        np.testing.assert_allclose(opacity(ax), opacity(expected), atol=1e-4)
    # In between there is no pose to go to, and the network is not exact.
    assert np.abs(opacity(panels[4][1]) - opacity(panels[0][1])).max() > 0.05
    assert {"0°", "45°", "90°"} <= set(texts(figure))
    # C8 has a pose for 45°, to which frames are matched.
    _, eighth = network(gspaces.rot2dOnR2(8), size=13)
    turned = plot_attentive_maps(eighth[0].in_type(x.tensor), eighth, "1", angles=[45], back=False)
    assert [number(ax) for ax in turned.axes[1:9]] == [7, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_elements_that_do_not_map_the_grid_onto_itself():
    gspace = gspaces.flipRot2dOnR2(3)
    x, model = network(gspace, size=11)
    angle, mirror = gspace.fibergroup.element((0, 1)), gspace.fibergroup.element((1, 1))
    figure = plot_attentive_maps(x, model, "1", elements=[angle, mirror], background=-2.0)
    panels = columns(figure, 4, 8)
    assert shown(panels[0][0]).min() < -1.5
    assert shown(panels[1][0]).min() < -1.5
    assert [number(ax) for ax in panels[0][1:4]] == [2, 0, 1]


@pytest.mark.slow
def test_maps_lie_on_the_part_of_the_image_that_they_are_of():
    fields = nn.FieldType(C4, 2 * [C4.regular_repr])
    image = nn.FieldType(C4, [C4.trivial_repr])
    attention = FeatureAttention(fields, kernel_size=3)

    def extent(*stages, layer=attention, size=12):
        model = nn.SequentialModule(*stages, layer)
        figure = plot_attentive_maps(image(torch.randn(1, 1, size, size)), model, layer, **UPRIGHT)
        return figure.axes[1].images[-1].get_extent()[1] * 2, figure.axes[1].images[-1].get_array().shape[0]

    lifting = nn.R2Conv(image, fields, 3)  # takes a margin of one off
    padded = nn.R2Conv(image, fields, 3, padding=1)
    assert extent(lifting) == (10, 10)
    assert extent(padded) == (12, 12)
    assert extent(padded, HalvingPool(fields)) == (12, 6)
    assert extent(lifting, HalvingPool(fields), Crop(fields, 1)) == (6, 3)
    assert extent(padded, nn.PointwiseAvgPool2D(fields, 3, 3)) == (12, 4)
    assert extent(nn.R2Conv(image, fields, 3, stride=2), size=13) == (12, 6)
    # An attentive convolution attends to its output.
    assert extent(padded, layer=AttentiveConv(fields, fields, 3, attention_size=3)) == (10, 10)
    strided = AttentiveConv(fields, fields, 3, attention_size=3, stride=2)
    assert extent(padded, layer=strided, size=13) == (12, 6)


def test_branches_that_halve_the_same_grid_halve_it_once():
    fields = nn.FieldType(C4, 2 * [C4.regular_repr])

    class Residual(nn.EquivariantModule):
        def __init__(self):
            super().__init__()
            self.in_type = self.out_type = fields
            self.pool, self.shortcut = HalvingPool(fields), HalvingPool(fields)
            self.attention = FeatureAttention(fields, kernel_size=3)

        def forward(self, x):
            return self.attention(self.shortcut(x) + self.pool(x))

        def evaluate_output_shape(self, shape):
            return shape

    figure = plot_attentive_maps(fields(torch.randn(1, 8, 12, 12)), Residual(), "attention", **UPRIGHT)
    assert figure.axes[1].images[-1].get_extent() == [-6, 6, 6, -6]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_image_gets_the_precision_of_the_model(dtype):
    x, model = network()
    expected = [opacity(ax) for ax in plot_attentive_maps(x, model, "1", **UPRIGHT).axes[1:5]]
    figure = plot_attentive_maps(x.type(x.tensor.double()), model.to(dtype), "1", **UPRIGHT)
    for ax, values in zip(figure.axes[1:5], expected, strict=True):
        np.testing.assert_allclose(opacity(ax), values, atol=1e-4)


def test_mistakes_are_named():
    x, model = network()
    fields = model[0].out_type
    for wrong, error, message in (
        ({"angles": [float("nan")]}, ValueError, "angles: got"),
        ({"angles": [0], "elements": C4.fibergroup.elements}, ValueError, "both elements and angles"),
        ({"field": 3}, ValueError, "field: got 3, needed a number from 0 to 2"),
        ({"field": 0.5}, TypeError, "field: got 0.5, needed an integer"),
        ({"layer": "0"}, ValueError, "layer: got .0., needed attentive layer.*: .1., .2."),
        ({"layer": "nine"}, ValueError, "has no module 'nine'"),
        ({"layer": 1}, TypeError, "layer: got int"),
    ):
        with pytest.raises(error, match=message):
            plot_attentive_maps(x, model, **wrong)
    with pytest.raises(ValueError, match="no attentive layer"):
        plot_attentive_maps(model[0](x), GroupSelfAttention(fields, fields, kernel_size=None))
    with pytest.raises(ValueError, match=r"angles: .*of scalar fields"):
        plot_attentive_maps(model[0](x), model[1], angles=[0])
    with pytest.raises(ValueError, match=r"angles: .*square image"):
        plot_attentive_maps(x.type(torch.randn(1, 1, 6, 7)), model, angles=[0])
    with pytest.raises(ValueError, match=r"background: got 1.0"):
        plot_attentive_maps(model[0](x), model[1], background=1.0)
    other = nn.FieldType(D4, [D4.trivial_repr])
    with pytest.raises(ValueError, match="x: its gspace"):
        plot_attentive_maps(other(x.tensor), model)


@pytest.mark.slow
def test_grids_that_are_not_square():
    x, model = network()
    wide = x.type(torch.randn(1, 1, 7, 10))
    figure = plot_attentive_maps(wide, model, "1")
    panels = columns(figure, 8, 6)
    before = {number(ax): opacity(ax) for ax in panels[0][1:-1]}
    for ax in panels[1][1:-1]:
        np.testing.assert_allclose(opacity(ax), np.rot90(before[number(ax)]), atol=1e-4)


def layered(gspace=C4):
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
    x, model = layered(gspace)
    element = gspace.fibergroup.elements[-1]
    figure = plot_attentive_layers(x, model, elements=iter([gspace.fibergroup.identity, element]))
    assert drawn(figure) > 1000
    assert len(figure.axes) == 2 + 3 * (2 + 1)
    assert sum(text in texts(figure) for text in ("0", "1", "4")) == 3  # the names of the layers
    matrix = gspace.basespace_action(element)
    for row, poses in ((0, 1), (1, len(gspace.fibergroup.elements)), (2, len(gspace.fibergroup.elements))):
        upright, turned = figure.axes[2 + 3 * row : 4 + 3 * row]
        map_ = torch.tensor(opacity(upright))[None, None]
        expected = nn.GeometricTensor(map_, nn.FieldType(gspace, [gspace.trivial_repr])).transform(element)
        np.testing.assert_allclose(opacity(turned), expected.tensor[0, 0], atol=1e-4)
        before, after = arrows(upright), arrows(turned)
        assert len(before) == (poses if poses > 1 else 0)
        for colour, vector in before.items():
            np.testing.assert_allclose(after[colour], matrix @ vector, atol=1e-5)
            assert 0 < np.linalg.norm(vector) < 0.3


def test_arrows_are_the_sizes_of_what_a_layer_gives():
    x, model = layered()
    figure = plot_attentive_layers(x, model, ["4"], elements=[C4.fibergroup.identity])
    with torch.no_grad():
        sizes = model(x).tensor[0].abs().unflatten(0, (2, 4)).mean((0, 2, 3))
    lengths = [np.linalg.norm(vector) for vector in arrows(figure.axes[1]).values()]
    np.testing.assert_allclose(np.array(lengths) / max(lengths), sizes / sizes.max(), rtol=1e-4)
    # Pose h points where h takes the first axis.
    for vector, direction in zip(arrows(figure.axes[1]).values(), ((1, 0), (0, 1), (-1, 0), (0, -1)), strict=True):
        np.testing.assert_allclose(vector / np.linalg.norm(vector), direction, atol=1e-6)


def test_a_network_that_is_not_equivariant_is_seen(monkeypatch):
    x, model = layered()

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
    x, model = layered()
    figure = plot_attentive_layers(x, model, ["4", model[1]], angles=[0, 30], background=0.5)
    assert len(figure.axes) == 2 + 2 * 3
    assert {"0°", "30°", "4", "1"} <= set(texts(figure))
    for wrong, error, message in (
        ({"layers": []}, ValueError, "layers: got none"),
        ({"layers": ["2"]}, ValueError, "layers: got .2., needed attentive layer.*: .0., .1., .4."),
    ):
        with pytest.raises(error, match=message):
            plot_attentive_layers(x, model, **wrong)


def coloured(gspace=C4, **options):
    """Colour images, and attention on the features of a convolution."""
    image = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    convolution = AttentiveConv(image, fields, 3, channel=False, spatial=False, **options)
    return nn.SequentialModule(convolution, FeatureAttention(fields, kernel_size=3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gspace", [C4, D4])
@pytest.mark.slow
def test_every_image_has_its_map_turned_and_turned_back(gspace):
    model, images = coloured(gspace), torch.rand(2, 3, 9, 9)
    figure = plot_attended_images(images, model)
    assert drawn(figure) > 1000
    assert len(figure.axes) == 1 + 2 * 2 * 2 * 4
    panels = np.array(figure.axes[1:]).reshape(2, 2, 4, 2)  # images, turned or turned back, elements, image and map
    elements = gspace.fibergroup.elements[:4]
    trivial = nn.FieldType(gspace, [gspace.trivial_repr])
    for image, (turned, back) in zip(images, panels, strict=True):
        first = opacity(turned[0][1])
        assert np.ptp(first) > 0.1
        for element, column, returned in zip(elements, turned, back, strict=True):
            picture = model[0].in_type(image[None]).transform(element).tensor[0].movedim(0, -1)
            scaled = (picture - picture.min()) / (picture.max() - picture.min())
            np.testing.assert_allclose(shown(column[0]), scaled, atol=1e-5)
            expected = trivial(torch.tensor(first)[None, None]).transform(element).tensor[0, 0]
            np.testing.assert_allclose(opacity(column[1]), expected, atol=1e-4)
            np.testing.assert_allclose(opacity(returned[1]), first, atol=1e-4)
    found = changes(figure)
    assert len(found) == 2
    assert max(found) < 1e-5


def test_the_mean_over_fields_and_poses():
    model, images = coloured(), torch.rand(1, 3, 9, 9)
    figure = plot_attended_images(images, model, elements=[C4.fibergroup.identity], back=False)
    with torch.no_grad():
        maps = model[1].attention_maps(model[0](model[0].in_type(images)))
        passed = 1 - torch.einsum("fp,pyx->yx", maps.channel[0], maps.spatial[0]) / 8
    expected = 0.9 * (passed - passed.min()) / (passed.max() - passed.min())
    np.testing.assert_allclose(opacity(figure.axes[2]), expected, atol=1e-4)
    assert "change" not in texts(figure)


def test_strides_that_do_not_fit_are_seen():
    """Appendix C: exact where the stride reaches the last position, approximate where it does not."""
    model = coloured(stride=2)
    for size, exact in ((9, True), (10, False)):
        (found,) = changes(plot_attended_images(torch.rand(1, 3, size, size), model))
        assert (found < 1e-5) == exact
        assert exact or found > 1e-3


def test_grey_images_and_angles():
    image = nn.FieldType(C4, [C4.trivial_repr])
    attention = FeatureAttention(image, ratio=1, kernel_size=3)
    figure = plot_attended_images(image(torch.rand(2, 1, 9, 9)), attention, angles=[0, 90], back=False)
    assert shown(figure.axes[1]).shape == (9, 9)
    assert {"0°", "90°"} <= set(texts(figure))
    assert len(figure.axes) == 1 + 2 * 2 * 2


def test_mistakes_in_images_are_named():
    model, images = coloured(), torch.rand(1, 3, 9, 9)
    for arguments, error, message in (
        (([images[0]], model), TypeError, "images: got list"),
        ((images[:0], model), ValueError, "images: .*at least one"),
        ((images[:, :1], model), ValueError, "needed 3 channels"),
        ((model[0].in_type(images), model[0]), ValueError, "no attentive layer"),
        ((images, model, "0"), ValueError, "layer: got '0'"),
    ):
        with pytest.raises(error, match=message):
            plot_attended_images(*arguments)
