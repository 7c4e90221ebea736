import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType, PointwiseMaxPool2D
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import AntialiasedPool, Crop, HalvingPool, assert_equivariant, equivariance_report
from tests import spaces

C4 = gspaces.rot2dOnR2(4)

SPACES = spaces.PLANE | spaces.VOLUME


@pytest.mark.sampled(7)
@pytest.mark.parametrize("make", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("size", [4, 5])
def test_equivariant_at_even_and_odd_sizes(make, size):
    gspace = make()
    for module in (
        Crop(spaces.mixed(gspace), 1),
        HalvingPool(spaces.regular(gspace, 2)),
        HalvingPool(spaces.mixed(gspace), "avg"),
        AntialiasedPool(spaces.mixed(gspace)).double(),
        AntialiasedPool(spaces.regular(gspace, 2), "max").double(),
    ):
        x = spaces.random_field(module.in_type, *spaces.shape_of(gspace, size))
        assert spaces.grid_error(module, x) < 1e-12
        assert module(x).shape == module.evaluate_output_shape(x.shape)


def test_windows_of_two_on_an_odd_size_break_it():
    """The negative control, and the reason for the layer."""
    field_type = spaces.regular(C4, 2)
    x = spaces.random_field(field_type, 7, 7)
    assert spaces.grid_error(PointwiseMaxPool2D(field_type, kernel_size=2, stride=2), x) > 1e-2


@given(shape=st.lists(st.integers(2, 9), min_size=2, max_size=2), kind=st.sampled_from(["max", "avg"]))
def test_halves_by_windows_about_the_centre(shape, kind):
    field_type = spaces.regular(gspaces.rot2dOnR2(2), 1)
    x = spaces.random_field(field_type, *shape)
    module = HalvingPool(field_type, kind)
    y = module(x).tensor
    assert y.shape == module.evaluate_output_shape(tuple(x.shape)) == (2, 2, shape[0] // 2, shape[1] // 2)
    window = x.tensor[:, :, : 2 + shape[0] % 2, : 2 + shape[1] % 2].flatten(2)
    torch.testing.assert_close(y[:, :, 0, 0], window.amax(2) if kind == "max" else window.mean(2))


def test_means_in_space():
    field_type = spaces.regular(gspaces.trivialOnR3(), 1)
    x = spaces.random_field(field_type, 4, 5, 6)
    y = HalvingPool(field_type, "avg")(x).tensor
    torch.testing.assert_close(y, torch.nn.functional.avg_pool3d(x.tensor, (2, 3, 2), 2))


def test_crop_takes_the_margin():
    field_type = spaces.scalars(gspaces.rot2dOnR2(2), 1)
    x = spaces.random_field(field_type, 6, 5)
    torch.testing.assert_close(Crop(field_type, 2)(x).tensor, x.tensor[:, :, 2:4, 2:3])
    torch.testing.assert_close(Crop(field_type, 0)(x).tensor, x.tensor)
    assert Crop(field_type, 2).evaluate_output_shape((3, 1, 6, 5)) == (3, 1, 2, 1)


def test_mistakes():
    fields, nowhere = spaces.regular(C4, 1), spaces.regular(spaces.POINT["D4 on a point"](), 1)
    for error, message, call in (
        (ValueError, "in_type: .*every channel", lambda: HalvingPool(FieldType(C4, [C4.irrep(1)]))),
        (ValueError, "kind: .*'max'", lambda: HalvingPool(fields, "min")),
        (ValueError, "no base space", lambda: HalvingPool(nowhere)),
        (ValueError, "1×4 cannot be halved", lambda: HalvingPool(fields)(spaces.random_field(fields, 1, 4))),
        (ValueError, "margin: .*at least 0", lambda: Crop(fields, -1)),
        (ValueError, "nothing of a grid of 4×5", lambda: Crop(fields, 2)(spaces.random_field(fields, 4, 5))),
        (TypeError, "input: Crop got Tensor", lambda: Crop(fields, 1)(torch.zeros(1, 4, 5, 5))),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_blur_of_one_width_is_not_exact_and_the_report_says_what_is():
    fields = FieldType(C4, [C4.regular_repr])
    pool = nn.PointwiseAvgPoolAntialiased2D(fields, sigma=0.66, stride=2)
    report = equivariance_report(nn.SequentialModule(nn.ReLU(fields), pool), (1, 4, 8, 8))
    assert report.relative_error > 0.1
    assert "AntialiasedPool are exact at every size" in str(report)
    assert "AntialiasedPool" not in str(equivariance_report(nn.ReLU(fields), (1, 4, 8, 8)))


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_antialiased_pooling_of_a_torus(kind):
    fields = FieldType(C4, 2 * [C4.regular_repr])
    pool = AntialiasedPool(fields, kind, padding_mode="circular")
    assert_equivariant(pool, (1, 8, 6, 6), tolerance=1e-12)
    x = torch.randn(1, 8, 6, 8, dtype=torch.float64)
    wide = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="circular")
    expected = AntialiasedPool(fields, kind)(fields(wide)).tensor[:, :, 2:-2, 2:-2]
    torch.testing.assert_close(pool(fields(x)).tensor, expected)
    rolled = pool(fields(x.roll(2, 2))).tensor
    torch.testing.assert_close(rolled, pool(fields(x)).tensor.roll(1, 2))
    assert (AntialiasedPool(fields, kind)(fields(x.roll(2, 2))).tensor - rolled).abs().max() > 1e-3
    for torus in (pool, HalvingPool(fields, kind, padding_mode="circular")):
        torch.testing.assert_close(torus(fields(x.roll(2, 2))).tensor, torus(fields(x)).tensor.roll(1, 2))
        with pytest.raises(ValueError, match=r"input: got a torus .* even"):
            torus(fields(x[:, :, :5]))
    assert "circular" in repr(torus)
    with pytest.raises(ValueError, match=r"padding_mode: .*subgroup of D4"):
        AntialiasedPool(spaces.regular(gspaces.rot2dOnR2(8), 1), padding_mode="circular")
