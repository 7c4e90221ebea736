import numpy as np
import pytest
import torch
from escnn import gspaces, nn

from escnn_attention.models import EquivariantClassifier
from escnn_attention.plotting import animate_feature_maps
from tests.plotting.pictures import Wrapped, number, shown, system

pytest.importorskip("matplotlib")


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

    class Broken(nn.EquivariantModule):
        def __init__(self):
            super().__init__()
            self.in_type = self.out_type = lifting.out_type

        def forward(self, x):
            return self.out_type(x.tensor * torch.linspace(0, 1, x.shape[-1]))

        def evaluate_output_shape(self, input_shape):
            return input_shape

    steps = animation_of(nn.SequentialModule(lifting, Broken()), x, layer="1", angles=[90])
    assert steps[0][-1] > 0.1


def test_the_animation_takes_reflections_and_plain_tensors_and_is_saved(tmp_path):
    x, lifting, attention = system(gspaces.flipRot2dOnR2(4))
    animation = animate_feature_maps(x.tensor, Wrapped(lifting, attention), angles=[0, 90])
    animation.save(tmp_path / "turning.gif", writer="pillow", dpi=30)
    image = pytest.importorskip("PIL.Image").open(tmp_path / "turning.gif")
    assert image.n_frames == 2
    assert len(animation._fig.axes) == 1 + 2 * 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_precision(dtype):
    x, lifting, _ = system()
    expected = animation_of(lifting, x, angles=[30], field=1)[0]
    found = animation_of(lifting.to(dtype), x.to(dtype), angles=[30], field=1)[0]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)


def test_exported_networks_are_said_to_know_no_group():
    x, lifting, attention = system()
    exported = EquivariantClassifier({"0": lifting, "1": attention}, 3).export()
    for given in (x, x.tensor):
        with pytest.raises(ValueError, match=r"model: the Classifier was exported, .* needed the network"):
            animate_feature_maps(given, exported)


def test_mistakes_are_named():
    x, lifting, attention = system()
    sequence = nn.SequentialModule(lifting, attention)
    with pytest.raises(ValueError, match="field of '0': got 9"):
        animate_feature_maps(x, sequence, field=9)
    with pytest.raises(ValueError, match="angles"):
        animate_feature_maps(x, sequence, angles=[])
    with pytest.raises(ValueError, match="angles"):
        animate_feature_maps(x, sequence, angles=[float("nan")])
    with pytest.raises(ValueError, match="square image of scalar fields"):
        animate_feature_maps(x.type(torch.randn(1, 1, 6, 7)), sequence)
    with pytest.raises(ValueError, match="square image of scalar fields"):
        animate_feature_maps(lifting(x), attention)
    with pytest.raises(TypeError, match="stages: got function"):
        animate_feature_maps(x, lambda x: x)
