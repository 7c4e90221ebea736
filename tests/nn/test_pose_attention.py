import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.pose_attention import PoseAttention
from tests import spaces

EXACT = 1e-12
SPACES = spaces.ALL


def attention_on(field_type, **options):
    module = PoseAttention(field_type, **options)
    with torch.no_grad():
        module.plain.weight.weight.normal_()
    return module.double()


def input_of(module, size=3):
    return spaces.random_field(module.in_type, *spaces.shape_of(module.in_type.gspace, size))


@pytest.mark.parametrize("residual", [True, False])
def test_the_formula_for_a_cyclic_group(residual):
    """The matrices of the poses are circulant."""
    module = attention_on(spaces.regular(gspaces.rot2dOnR2(4), 3), residual=residual)
    x = input_of(module, 5)
    f = x.tensor.unflatten(1, (3, 4))
    weight = module.plain.weight.weight[0]  # fields, relative poses
    circulant = torch.stack([weight.roll(i, 1) for i in range(4)], dim=1)  # fields, output poses, input poses
    alpha = torch.einsum("cij,bcjxy->bixy", circulant, f).sigmoid()
    torch.testing.assert_close(module.attention_maps(x), alpha)
    expected = (1 - alpha if residual else alpha).unsqueeze(1) * f
    torch.testing.assert_close(module(x).tensor, expected.flatten(1, 2))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SPACES)
def test_equivariant(name):
    gspace = SPACES[name]()
    for field_type in spaces.regular(gspace, 2), spaces.scalars(gspace, 3):
        module = attention_on(field_type)
        assert spaces.grid_error(module, input_of(module)) < EXACT


@given(st.data())
def test_every_element_acts_on_the_fibers(data):
    """It works position by position, so that the elements between the points of the grid are exact on the fibers."""
    gspace = data.draw(st.sampled_from(list(spaces.PLANE.values())))()
    module = attention_on(spaces.regular(gspace, data.draw(st.integers(1, 4))), residual=data.draw(st.booleans()))
    x = input_of(module)
    y = module(x)
    g = data.draw(st.sampled_from(list(gspace.fibergroup.elements)))
    torch.testing.assert_close(module(x.transform_fibers(g)).tensor, y.transform_fibers(g).tensor)


def test_theorem_1_an_attention_operator_that_is_not_equivariant_breaks_it():
    module = attention_on(spaces.regular(gspaces.rot2dOnR2(4), 2))
    x = input_of(module)
    assert spaces.grid_error(module, x) < EXACT
    orbits = module.plain.weight.orbits
    module.plain.weight.orbits = orbits.flatten()[torch.randperm(16)].view_as(orbits)
    assert spaces.grid_error(module, x) > 1e-3


def test_maps_are_equivariant():
    gspace = gspaces.flipRot2dOnR2(4)
    module = attention_on(spaces.regular(gspace, 2))
    x = input_of(module, 5)
    maps = FieldType(gspace, [gspace.regular_repr])(module.attention_maps(x))
    for g in fibers(gspace).elements:
        torch.testing.assert_close(module.attention_maps(x.transform(g)), maps.transform(g).tensor)


def test_as_many_parameters_as_published():
    """24,851 of the p4 network on rotated MNIST with attention over the poses, 24,610 without."""
    gspace = gspaces.rot2dOnR2(4)
    layers = [PoseAttention(spaces.scalars(gspace, 1)), *[PoseAttention(spaces.regular(gspace, 10))] * 6]
    assert sum(p.numel() for m in layers for p in m.parameters()) == 24_851 - 24_610


def test_gradients():
    module = attention_on(spaces.regular(gspaces.rot2dOnR2(2), 2))
    x = input_of(module).tensor.requires_grad_()
    torch.autograd.gradcheck(module.plain, (x,))


def test_state_export_and_precision():
    module, other = (attention_on(spaces.regular(gspaces.rot2dOnR2(8), 2)) for _ in range(2))
    x = input_of(module)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x).tensor, module(x).tensor)
    assert module.evaluate_output_shape(tuple(x.shape)) == tuple(module(x).shape)
    torch.testing.assert_close(module.export()(x.tensor), module(x).tensor)
    assert spaces.grid_error(module.to(torch.bfloat16).double(), x) < EXACT


def test_mistakes():
    gspace = gspaces.rot2dOnR2(4)
    with pytest.raises(TypeError, match="in_type: got NoneType"):
        PoseAttention(None)
    with pytest.raises(ValueError, match="in_type: PoseAttention needs regular fields only, or trivial fields only"):
        PoseAttention(spaces.mixed(gspace))
    with pytest.raises(TypeError, match="residual: got 1, needed True or False"):
        PoseAttention(spaces.regular(gspace, 1), residual=1)
    fields = spaces.regular(gspace, 1)
    with pytest.raises(TypeError, match="input: PoseAttention got a tensor of float64, but its parameters are float32"):
        PoseAttention(fields).attention_maps(spaces.random_field(fields, 3, 3))
    with pytest.raises(TypeError, match="input: PoseAttention got a tensor of float64, but its parameters are float32"):
        PoseAttention(fields)(spaces.random_field(fields, 3, 3))
    with pytest.raises(TypeError, match="input: PoseAttention got Tensor"):
        PoseAttention(spaces.regular(gspace, 1))(torch.zeros(1, 4, 3, 3))
    assert "residual=False" in repr(PoseAttention(spaces.regular(gspace, 1), residual=False))
    continuous = gspaces.rot2dOnR2(-1)
    with pytest.raises(NotImplementedError, match=r"in_type: .*, which is continuous"):
        PoseAttention(FieldType(continuous, [continuous.trivial_repr]))
