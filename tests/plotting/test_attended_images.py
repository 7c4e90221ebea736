import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import AttentiveConv, FeatureAttention
from escnn_attention.plotting import plot_attended_images
from tests.plotting.pictures import drawn, shown, texts

pytest.importorskip("matplotlib")

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


def network(gspace=C4, **options):
    """Colour images, and attention on the features of a convolution."""
    image = nn.FieldType(gspace, 3 * [gspace.trivial_repr])
    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    convolution = AttentiveConv(image, fields, 3, channel=False, spatial=False, **options)
    return nn.SequentialModule(convolution, FeatureAttention(fields, kernel_size=3))


def changes(figure):
    return [float(t.get_text()) for t in figure.texts if t.get_text()[-1].isdigit() and "e-" in t.get_text() + "e-"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gspace", [C4, D4])
def test_every_image_has_its_map_turned_and_turned_back(gspace):
    model, images = network(gspace), torch.rand(2, 3, 9, 9)
    figure = plot_attended_images(images, model)
    assert drawn(figure) > 1000
    assert len(figure.axes) == 1 + 2 * 2 * 2 * 4
    panels = np.array(figure.axes[1:]).reshape(2, 2, 4, 2)  # images, turned or turned back, elements, image and map
    elements = gspace.fibergroup.elements[:4]
    trivial = nn.FieldType(gspace, [gspace.trivial_repr])
    for image, (turned, back) in zip(images, panels, strict=True):
        first = shown(turned[0][1])[..., 3]
        assert np.ptp(first) > 0.1
        for element, column, returned in zip(elements, turned, back, strict=True):
            picture = model[0].in_type(image[None]).transform(element).tensor[0].movedim(0, -1)
            scaled = (picture - picture.min()) / (picture.max() - picture.min())
            np.testing.assert_allclose(shown(column[0]), scaled, atol=1e-5)
            expected = trivial(torch.tensor(first)[None, None]).transform(element).tensor[0, 0]
            np.testing.assert_allclose(shown(column[1])[..., 3], expected, atol=1e-4)
            np.testing.assert_allclose(shown(returned[1])[..., 3], first, atol=1e-4)
    found = changes(figure)
    assert len(found) == 2
    assert max(found) < 1e-5


def test_the_mean_over_fields_and_poses():
    model, images = network(), torch.rand(1, 3, 9, 9)
    figure = plot_attended_images(images, model, elements=[C4.fibergroup.identity], back=False)
    with torch.no_grad():
        maps = model[1].attention_maps(model[0](model[0].in_type(images)))
        passed = 1 - torch.einsum("fp,pyx->yx", maps.channel[0], maps.spatial[0]) / 8
    expected = 0.9 * (passed - passed.min()) / (passed.max() - passed.min())
    np.testing.assert_allclose(shown(figure.axes[2])[..., 3], expected, atol=1e-4)
    assert "change" not in texts(figure)


def test_strides_that_do_not_fit_are_seen():
    """Appendix C: exact where the stride reaches the last position, approximate where it does not."""
    model = network(stride=2)
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


def test_mistakes_are_named():
    model = network()
    with pytest.raises(TypeError, match="images: got list"):
        plot_attended_images([torch.rand(3, 9, 9)], model)
    with pytest.raises(ValueError, match=r"images: got shape .*, needed at least one image"):
        plot_attended_images(torch.rand(0, 3, 9, 9), model)
    with pytest.raises(ValueError, match="needed 3 channels"):
        plot_attended_images(torch.rand(1, 1, 9, 9), model)
    with pytest.raises(ValueError, match="no attentive layer"):
        plot_attended_images(model[0].in_type(torch.rand(1, 3, 9, 9)), model[0])
    with pytest.raises(ValueError, match="layer: got '0'"):
        plot_attended_images(torch.rand(1, 3, 9, 9), model, "0")
