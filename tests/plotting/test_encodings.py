import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, sequence_space, space_time
from escnn_attention.plotting import plot_encoding
from tests.plotting.pictures import drawn, number, shown, texts

pytest.importorskip("matplotlib")


def layer(gspace, kernel_size=5, *, lifting=False, **options):
    fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
    if lifting:
        return LiftingSelfAttention(nn.FieldType(gspace, [gspace.trivial_repr]), fields, 2, kernel_size, **options)
    return GroupSelfAttention(fields, fields, 2, kernel_size, head_fields=3, **options)


def panels(figure):
    """The images of the poses, in order."""
    found = [ax for ax in figure.axes if ax.get_title().startswith("pose ")]
    assert [number(ax) for ax in found] == sorted(number(ax) for ax in found)
    return [shown(ax) for ax in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
@pytest.mark.parametrize("kernel_size", [5, None])
@pytest.mark.slow
def test_the_picture_of_a_pose_is_that_of_the_identity_turned(encoding, kernel_size):
    """Exact for C4, whose elements map the fine grid onto itself. Row 0 is at the bottom: turned the other way."""
    figure = plot_encoding(layer(gspaces.rot2dOnR2(4), kernel_size, encoding=encoding), head=1)
    identity, *turned = panels(figure)
    assert identity.std() > 0.01
    for quarters, image in enumerate(turned, start=1):
        np.testing.assert_allclose(image, np.rot90(identity, -quarters), atol=1e-5)
        # It does turn, and the other way it does not fit.
        assert not np.allclose(image, identity, atol=1e-2)
        if quarters != 2:
            assert not np.allclose(image, np.rot90(identity, quarters), atol=1e-2)


def test_reflections():
    figure = plot_encoding(layer(gspaces.flipRot2dOnR2(4)))
    assert drawn(figure) > 1000
    images = dict(zip(texts_of_poses(figure), panels(figure), strict=True))
    np.testing.assert_allclose(images["pose mirror"], images["pose 0°"][:, ::-1], atol=1e-5)
    np.testing.assert_allclose(images["pose mirror, 180°"], images["pose 0°"][::-1], atol=1e-5)


def texts_of_poses(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title().startswith("pose ")]


def test_poses_of_c8_are_the_encoding_at_turned_offsets():
    gspace = gspaces.rot2dOnR2(8)
    attention = layer(gspace, 5).double()
    figure = plot_encoding(attention, head=1, channels=2)
    fine = len(shown(figure.axes[0]))
    half = 2.5 / 2  # two steps of reach, and half a position beyond
    axis = torch.linspace(-half, half, fine, dtype=torch.float64)
    offsets = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    inside = offsets.norm(dim=-1) <= half
    encoding = attention.plain.encoding
    with torch.no_grad():
        centre = encoding.offsets(offsets)[1, ..., 2][inside].mean()
        for element, image in zip(gspace.fibergroup.elements, panels(figure), strict=True):
            inverse = torch.tensor(gspace.basespace_action(~element))
            expected = encoding.offsets(offsets @ inverse.T)[1, ..., 2] - centre
            np.testing.assert_allclose(image, expected, atol=1e-9)


def test_the_table_permutes_the_poses():
    gspace = gspaces.rot2dOnR2(4)
    attention = layer(gspace)
    figure = plot_encoding(attention, channels=1)
    (table,) = (shown(ax) for ax in figure.axes if ax.get_title() == "table over poses")
    for pose in range(4):
        np.testing.assert_allclose(table[pose], np.roll(table[0], pose))
    embedding = attention.plain.encoding.poses()[0, :, 1].detach()
    np.testing.assert_allclose(table[0], embedding - embedding.mean(), atol=1e-6)
    assert "table over poses" not in texts(plot_encoding(attention, pose_table=False))
    assert "table over poses" not in texts(plot_encoding(layer(gspace, lifting=True)))
    assert "table over poses" not in texts(plot_encoding(layer(gspace, encoding="rotary")))


@pytest.mark.slow
def test_channels_and_poses():
    attention = layer(gspaces.rot2dOnR2(4))
    every = plot_encoding(attention, channels=range(3), pose_table=False)
    assert [text.get_text() for text in every.texts if text.get_rotation() == 90] == [f"channel {c}" for c in range(3)]
    some = plot_encoding(attention, channels=[2], poses=[1, attention.space.fibergroup.element(3)], pose_table=False)
    assert [number(ax) for ax in some.axes[:2]] == [1, 3]
    np.testing.assert_array_equal(shown(some.axes[1]), shown(every.axes[2 * 5 + 3]))


def test_the_channel_that_varies_most():
    attention = layer(gspaces.rot2dOnR2(4), encoding="separable")
    # The last channels of a separable encoding are the table over the poses: nothing varies with the offset.
    assert "channel 2" not in {text.get_text() for text in plot_encoding(attention).texts}
    figure = plot_encoding(attention, channels=2)
    assert np.ptp(panels(figure)[0]) == 0


def marks(figure):
    return np.concatenate([c.get_offsets() for c in figure.axes[0].collections if len(c.get_offsets()) > 1])


@pytest.mark.slow
def test_marks_are_the_positions_of_the_window():
    disc = marks(plot_encoding(layer(gspaces.rot2dOnR2(8), 5)))
    assert len(disc) == 21  # 5×5 without its corners
    square = plot_encoding(layer(gspaces.rot2dOnR2(4), 5, dilation=2))
    assert len(marks(square)) == 25
    labels = [label.get_text() for label in square.axes[0].get_yticklabels()]
    assert labels == ["−4", "0", "4"]
    everywhere = plot_encoding(layer(gspaces.rot2dOnR2(4), None), size=4)
    assert len(marks(everywhere)) == 7**2
    absolute = plot_encoding(layer(gspaces.rot2dOnR2(4), None, encoding="absolute"), size=4)
    assert len(marks(absolute)) == 4**2
    assert [label.get_text() for label in absolute.axes[0].get_yticklabels()] == ["−1.5", "0", "1.5"]


def test_mistakes_are_named():
    attention = layer(gspaces.rot2dOnR2(4))
    for options, message in (
        ({"head": 2}, "head: got 2"),
        ({"channels": 3}, "channels: got 3"),
        ({"channels": []}, "channels"),
        ({"poses": [7]}, "poses: got 7"),
        ({"size": 9}, "size: got 9, but the layer has a window"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_encoding(attention, **options)
    for options, message in (
        ({"head": 0.0}, "head: got 0.0"),
        ({"channels": [1.5]}, "channels: got 1.5"),
        ({"poses": [1.7]}, "poses: got 1.7"),
    ):
        with pytest.raises(TypeError, match=f"{message}, needed an integer"):
            plot_encoding(attention, **options)
    everywhere = layer(gspaces.rot2dOnR2(4), None)
    for arguments, options, error, message in (
        ((everywhere,), {"size": 1}, ValueError, "size: got 1"),
        ((everywhere,), {"size": 3.5}, TypeError, "size: .*integer"),
        ((layer(gspaces.rot2dOnR2(4), encoding="none"),), {}, ValueError, "NoEncoding encodes no positions"),
        ((layer(gspaces.rot2dOnR3(2), 3),), {}, ValueError, "3 dimensions"),
        ((torch.nn.Linear(2, 2),), {}, ValueError, "no attention layer"),
    ):
        with pytest.raises(error, match=message):
            plot_encoding(*arguments, **options)


@pytest.mark.parametrize("kernel_size", [3, None])
@pytest.mark.slow
def test_causal_windows_have_the_past_only(kernel_size):
    """Three times, at each of which there are three positions; without a window all that is above the query."""
    space = space_time(sequence_space(gspaces.rot2dOnR2(4).fibergroup))
    for causal in (True, False):
        attention = layer(space, kernel_size, causal=causal)
        figure = plot_encoding(attention, poses=[0], size=None if kernel_size else 4)
        places = np.asarray(marks(figure))
        assert (places[:, 1].min() == 0) == causal
        assert len(places) == (9 if kernel_size else 28 if causal else 49)
        box = figure.axes[0].images[0].get_clip_box().transformed(figure.axes[0].transData.inverted())
        assert (-0.4 < box.ymin < 0) == causal
