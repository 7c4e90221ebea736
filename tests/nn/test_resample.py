import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, PointwiseMaxPool2D
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import Crop, HalvingPool
from tests import spaces

SPACES = list((spaces.PLANE | spaces.VOLUME).values())
IDS = list(spaces.PLANE | spaces.VOLUME)


@pytest.mark.parametrize("make", SPACES, ids=IDS)
@pytest.mark.parametrize("size", [4, 5])
def test_equivariant_at_even_and_odd_sizes(make, size):
    field_type = spaces.regular(make(), 2)
    x = spaces.random_field(field_type, *spaces.shape_of(field_type.gspace, size))
    for module in (Crop(field_type, 1), HalvingPool(field_type), HalvingPool(field_type, "avg")):
        assert spaces.grid_error(module, x) < 1e-12


def test_the_average_is_of_any_field():
    field_type = spaces.mixed(gspaces.flipRot2dOnR2(4))
    for size in (6, 7):
        x = spaces.random_field(field_type, size, size)
        assert spaces.grid_error(HalvingPool(field_type, "avg"), x) < 1e-12


def test_windows_of_two_on_an_odd_size_break_it():
    """The negative control, and the reason for the layer."""
    field_type = spaces.regular(gspaces.rot2dOnR2(4), 2)
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


def test_crop_takes_the_margin():
    field_type = spaces.scalars(gspaces.rot2dOnR2(2), 1)
    x = spaces.random_field(field_type, 6, 5)
    torch.testing.assert_close(Crop(field_type, 2)(x).tensor, x.tensor[:, :, 2:4, 2:3])
    torch.testing.assert_close(Crop(field_type, 0)(x).tensor, x.tensor)
    assert Crop(field_type, 2).evaluate_output_shape((3, 1, 6, 5)) == (3, 1, 2, 1)


def test_export():
    field_type = spaces.regular(gspaces.rot2dOnR2(4), 2)
    x = spaces.random_field(field_type, 7, 6)
    for module in (Crop(field_type, 2), HalvingPool(field_type)):
        torch.testing.assert_close(module.export()(x.tensor), module(x).tensor)


def test_mistakes():
    gspace = gspaces.rot2dOnR2(4)
    fields = spaces.regular(gspace, 1)
    vectors = FieldType(gspace, [gspace.irrep(1)])
    with pytest.raises(ValueError, match='in_type: kind="max" acts on every channel by itself, which irrep_1 does not'):
        HalvingPool(vectors)
    with pytest.raises(ValueError, match="kind: got 'min', needed one of 'max', 'avg'"):
        HalvingPool(fields, "min")
    with pytest.raises(ValueError, match="no base space"):
        HalvingPool(spaces.regular(spaces.POINT["D4 on a point"](), 1))
    with pytest.raises(ValueError, match="a grid of 1×4 cannot be halved"):
        HalvingPool(fields)(spaces.random_field(fields, 1, 4))
    with pytest.raises(ValueError, match="margin: got -1, needed at least 0"):
        Crop(fields, -1)
    with pytest.raises(ValueError, match="a margin of 2 leaves nothing of a grid of 4×5"):
        Crop(fields, 2)(spaces.random_field(fields, 4, 5))
    with pytest.raises(TypeError, match="input: Crop got Tensor"):
        Crop(fields, 1)(torch.zeros(1, 4, 5, 5))
