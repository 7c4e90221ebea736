"""Feature maps of an input that is transformed."""

import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention.models import HybridNet
from escnn_attention.plotting import animate_feature_maps, plot_feature_maps
from tests.equivariance.test_report import Pointwise
from tests.plotting.pictures import Wrapped, drawn, number, shown, system, texts

pytest.importorskip("matplotlib")


def test_feature_maps_turn_and_their_frames_tell_the_permutation():
    x, lifting, attention = system()
    stages = {"lifting": lifting, "attention": nn.SequentialModule(lifting, attention)}
    figure = plot_feature_maps(x, stages, fields={"lifting": 1})
    assert drawn(figure) > 1000
    assert len(figure.axes) == 4 + 2 * 4 * 4
    assert "lifting\n(field 1)" in texts(figure)
    lifted = np.array([shown(ax) for ax in figure.axes[4:20]]).reshape(4, 4, 6, 6)  # poses, elements
    labels = np.array([number(ax) for ax in figure.axes[4:20]]).reshape(4, 4)
    for element in range(4):
        assert sorted(labels[:, element]) == [0, 1, 2, 3]
        for pose in range(4):
            original = lifted[labels[pose, element], 0]
            np.testing.assert_allclose(lifted[pose, element], np.rot90(original, element), atol=1e-4)


@pytest.mark.slow
def test_large_groups_show_the_elements_that_keep_the_grid():
    x, lifting, _ = system(gspaces.rot2dOnR2(12))
    figure = plot_feature_maps(x, {"lifting": lifting})
    assert len(figure.axes) == 4 + 12 * 4
    assert drawn(figure) > 1000


def test_layers_are_the_first_attention_and_the_last_regular_fields():
    x, lifting, attention = system(gspaces.rot2dOnR2(2))
    sequence = nn.SequentialModule(lifting, attention)
    options = {"elements": x.type.gspace.fibergroup.elements[1:]}
    expected = plot_feature_maps(x, {"0": lifting, "1": sequence}, **options)
    for layers in (None, ["0", "1"]):
        figure = plot_feature_maps(x, sequence, layers, **options)
        for ax, other in zip(figure.axes, expected.axes, strict=True):
            np.testing.assert_allclose(shown(ax), shown(other), atol=1e-6)
    assert len(plot_feature_maps(x, sequence, "1", **options).axes) == 1 + 2 * 1
    assert len(plot_feature_maps(x, lifting, **options).axes) == 1 + 2 * 1


@pytest.mark.slow
def test_models_without_attention_have_feature_maps_too():
    g = gspaces.rot2dOnR2(4)
    network = HybridNet(g, 1, 3, widths=(2,), convolutions=(2,), attention=(0,))
    figure = plot_feature_maps(torch.randn(1, 1, 6, 6), network)
    assert {t.split("\n")[0] for t in texts(figure) if "(field" in t} == {
        "stages.convolution_1_1.0",
        "stages.convolution_1_2",
    }
    # What the first convolution gave, and not what the ReLU behind it, which works in place, made of it.
    assert min(shown(ax).min() for ax in figure.axes[4:20]) < 0


def test_mistakes_are_named():
    x, lifting, attention = system()
    sequence = nn.SequentialModule(lifting, attention)
    with pytest.raises(TypeError, match="x: got Tensor"):
        plot_feature_maps(x.tensor, {})
    with pytest.raises(ValueError, match="stages: got none"):
        plot_feature_maps(x, {})
    with pytest.raises(TypeError, match="stages: got int"):
        plot_feature_maps(x, {"one": 1})
    for options, error, message in (
        ({"fields": {"nonsense": 3}}, ValueError, "fields: got 'nonsense', needed names of stages: '0', '1'"),
        ({"fields": {"1": 0.5}}, TypeError, "field of '1': got 0.5, needed an integer"),
        ({"fields": 3}, TypeError, "fields: got int, needed a mapping"),
        ({"fields": {"1": 9}}, ValueError, "'1': got 9"),
    ):
        with pytest.raises(error, match=message):
            plot_feature_maps(x, sequence, **options)
    pooled = nn.SequentialModule(lifting, nn.GroupPooling(lifting.out_type))
    for arguments, error, message in (
        (([lifting],), TypeError, "stages: got list"),
        (({"pooled": pooled},), ValueError, "'pooled' .*regular fields"),
        (({"lifting": lifting}, "0"), ValueError, "layers: .*modules of a"),
        ((sequence, ["5"]), ValueError, "has no module '5'"),
        ((sequence, []), ValueError, "layers: got none"),
        ((nn.IdentityModule(x.type),), ValueError, "gives regular fields"),
    ):
        with pytest.raises(error, match=message):
            plot_feature_maps(x, *arguments)


def animation_of(model, x, **options):
    """The animation, and what it shows at each step: input, maps, maps rotated back, and the numbers of the frames."""
    animation = animate_feature_maps(x, model, **options)
    steps = []
    for step in range(animation._save_count):
        animation._draw_frame(step)
        first, *panels = animation._fig.axes
        poses = len(panels) // 2
        steps.append(
            (
                shown(first).copy(),
                np.array([shown(ax).copy() for ax in panels[:poses]]),
                np.array([shown(ax).copy() for ax in panels[poses:]]),
                [number(ax) for ax in panels[:poses]],
                float(animation._fig.texts[-1].get_text().split()[-1]),
            )
        )
    animation._draw_was_started = True  # nobody is to be warned
    return steps


def test_the_animation_rotates_maps_and_puts_them_back():
    x, lifting, attention = system()
    angles = [0, 30, 90, 180, 270, 360]
    steps = animation_of(nn.SequentialModule(lifting, attention), x, layer="1", angles=angles, field=1)
    image, maps, _, numbers, change = steps[0]
    assert numbers == [0, 1, 2, 3]
    np.testing.assert_array_equal(image, x.tensor[0, 0])
    with torch.no_grad():
        np.testing.assert_allclose(maps, attention(lifting(x)).tensor[0, 4:8], atol=1e-6)
    for angle, (rotated, found, back, numbers, change) in zip(angles, steps, strict=True):
        if angle % 90:
            assert change > 0.01
            continue
        quarters = angle // 90
        np.testing.assert_array_equal(rotated, np.rot90(image, quarters))
        np.testing.assert_allclose(back, maps, atol=1e-5)
        assert change == 0
        for pose in range(4):
            np.testing.assert_allclose(found[pose], np.rot90(maps[numbers[pose]], quarters), atol=1e-5)
    assert [step[3][0] for step in steps] == [0, 0, 3, 2, 1, 0]


def test_the_animation_catches_a_layer_that_is_not_equivariant():
    x, lifting, _ = system()
    broken = Pointwise(lifting.out_type, lambda x: x * torch.linspace(0, 1, x.shape[-1]))
    steps = animation_of(nn.SequentialModule(lifting, broken), x, layer="1", angles=[90])
    assert steps[0][-1] > 0.1


@pytest.mark.slow
def test_the_animation_takes_reflections_and_plain_tensors_and_is_saved(tmp_path):
    x, lifting, attention = system(gspaces.flipRot2dOnR2(4))
    animation = animate_feature_maps(x.tensor, Wrapped(lifting, attention), angles=[0, 90])
    animation.save(tmp_path / "turning.gif", writer="pillow", dpi=30)
    image = pytest.importorskip("PIL.Image").open(tmp_path / "turning.gif")
    assert image.n_frames == 2
    assert len(animation._fig.axes) == 1 + 2 * 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_animations_in_any_precision(dtype):
    x, lifting, _ = system()
    expected = animation_of(lifting, x, angles=[30], field=1)[0]
    found = animation_of(lifting.to(dtype), x.to(dtype), angles=[30], field=1)[0]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)


def test_mistakes_in_animations_are_named():
    x, lifting, attention = system()
    sequence = nn.SequentialModule(lifting, attention)
    for arguments, options, error, message in (
        ((x, sequence), {"field": 9}, ValueError, "'0': got 9"),
        ((x, sequence), {"angles": []}, ValueError, "angles"),
        ((x, sequence), {"angles": [float("nan")]}, ValueError, "angles"),
        ((x.type(torch.randn(1, 1, 6, 7)), sequence), {}, ValueError, "image of scalar fields"),
        ((lifting(x), attention), {}, ValueError, "image of scalar fields"),
        ((x, lambda x: x), {}, TypeError, "stages: got function"),
    ):
        with pytest.raises(error, match=message):
            animate_feature_maps(*arguments, **options)
