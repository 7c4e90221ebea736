import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import FieldType
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import PoseLinear
from tests import spaces


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.double()


def field(field_type):
    return spaces.random_field(field_type, *spaces.shape_of(field_type.gspace, 3))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_equivariant_to_and_from_regular_fields(make):
    gspace = make()
    mixed, regular = spaces.mixed(gspace), spaces.regular(gspace, 2)
    for types in (mixed, regular), (regular, mixed), (regular, regular):
        assert spaces.grid_error(drawn(PoseLinear(*types)), field(types[0])) < 1e-12


@pytest.mark.sampled(8)
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_equivariant_pointwise(make):
    regular = spaces.regular(make(), 2)
    assert spaces.grid_error(drawn(PoseLinear(regular, regular, projection="pointwise")), field(regular)) < 1e-12


@given(st.data())
def test_equivariant_for_types_drawn(data):
    gspace = data.draw(st.sampled_from(list(spaces.PLANE.values())))()
    other, regular = data.draw(spaces.field_types(gspace)), spaces.regular(gspace, data.draw(st.integers(1, 3)))
    for types in (other, regular), (regular, other):
        assert spaces.grid_error(drawn(PoseLinear(*types)), field(types[0])) < 1e-12


def test_a_weight_of_its_own_for_every_pose_would_break_it():
    """The negative control: an ordinary 1×1 convolution is not equivariant."""

    class Ordinary(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = torch.nn.Linear(size, size)

        def forward(self, x):
            return self.linear(x.movedim(1, -1)).movedim(-1, 1)

    regular = spaces.regular(gspaces.rot2dOnR2(4), 2)
    module = PoseLinear(regular, regular).double()
    module.plain = Ordinary(8).double()
    assert spaces.grid_error(module, field(regular)) > 1e-2


@pytest.mark.parametrize("make", [lambda: gspaces.flipRot2dOnR2(3), lambda: gspaces.rot2dOnR2(8)])
def test_as_many_parameters_as_the_complete_basis_of_escnn(make):
    gspace = make()
    mixed, regular = spaces.mixed(gspace), spaces.regular(gspace, 2)
    for types in (mixed, regular), (regular, mixed), (regular, regular):
        theirs = nn.R2Conv(*types, 1, bias=False).basisexpansion.dimension()
        assert sum(p.numel() for p in PoseLinear(*types, bias=False).parameters()) == theirs


def test_biases():
    gspace = gspaces.rot2dOnR2(4)
    regular, vectors = spaces.regular(gspace, 2), FieldType(gspace, [gspace.irrep(1)])
    assert PoseLinear(vectors, regular).plain.projection.bias.shape == (2,)
    assert PoseLinear(regular, spaces.mixed(gspace)).plain.projection.bias.shape == (2,)
    assert len(list(PoseLinear(regular, vectors).parameters())) == 1  # nothing invariant to add
    for types in (vectors, regular), (regular, spaces.mixed(gspace)):
        module = PoseLinear(*types, bias=False)
        assert len(list(module.parameters())) == 1
        zero = types[0](torch.zeros(1, types[0].size, 2, 2))
        assert not module(zero).tensor.any()


def test_wrong_arguments():
    gspace, other = gspaces.rot2dOnR2(4), gspaces.rot2dOnR2(3)
    regular, mixed = spaces.regular(gspace, 1), spaces.mixed(gspace)
    with pytest.raises(TypeError, match="in_type: got str"):
        PoseLinear("regular", regular)
    with pytest.raises(TypeError, match="out_type: got NoneType"):
        PoseLinear(regular, None)
    with pytest.raises(ValueError, match=r"out_type: its gspace is C3.*, needed that of in_type, C4"):
        PoseLinear(regular, spaces.regular(other, 1))
    with pytest.raises(ValueError, match=r"in_type: a map to .*, which is not regular, needs regular fields only"):
        PoseLinear(mixed, mixed)
    with pytest.raises(
        ValueError, match='in_type: projection="pointwise" needs regular fields only, got also irrep_0, irrep_2'
    ):
        PoseLinear(mixed, regular, projection="pointwise")
    with pytest.raises(ValueError, match='out_type: projection="pointwise" needs regular'):
        PoseLinear(regular, mixed, projection="pointwise")
    with pytest.raises(ValueError, match="projection: got 'none', needed one of 'group', 'pointwise'"):
        PoseLinear(regular, regular, projection="none")
    continuous = gspaces.rot2dOnR2(-1)
    vectors = FieldType(continuous, [continuous.irrep(1)])
    with pytest.raises(NotImplementedError, match=r"gspace: .* continuous"):
        PoseLinear(vectors, vectors)
