import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import GELU, SiLU
from escnn_attention.nn.activations import activation_of, plain_activation
from tests import spaces

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "relu": lambda x: x * (x > 0),
}
every_activation = pytest.mark.parametrize("name", FORMULAS)


def permutation_fields(gspace):
    fields = [gspace.regular_repr, gspace.regular_repr]
    if "pointwise" in gspace.trivial_repr.supported_nonlinearities:  # not of escnn's products of groups
        fields.insert(1, gspace.trivial_repr)
    return FieldType(gspace, fields)


@pytest.mark.sampled(8)
@every_activation
@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_equivariant(make, name):
    field_type = permutation_fields(make())
    x = spaces.random_field(field_type, *spaces.shape_of(field_type.gspace, 4))
    assert spaces.grid_error(activation_of(field_type, name), x) < 1e-12


@every_activation
def test_is_the_formula(name):
    gspace = gspaces.rot2dOnR2(4)
    field_type = FieldType(gspace, [gspace.quotient_repr(2), gspace.regular_repr])
    x = spaces.random_field(field_type, 3, 3)
    expected = FORMULAS[name](x.tensor)
    torch.testing.assert_close(activation_of(field_type, name)(x).tensor, expected)
    torch.testing.assert_close(plain_activation(name)(x.tensor), expected)
    torch.testing.assert_close(activation_of(field_type, name).export()(x.tensor), expected)
    assert (x.tensor < 0).any()  # and the input is left as it was


def test_names():
    fields = spaces.regular(gspaces.rot2dOnR2(4), 1)
    assert isinstance(activation_of(fields, "silu"), SiLU)
    assert isinstance(activation_of(fields, "gelu"), GELU)
    for make in (lambda name: activation_of(fields, name), plain_activation):
        with pytest.raises(ValueError, match="activation: got 'tanh', needed one of 'silu', 'gelu', 'relu'"):
            make("tanh")


def test_fields_without_pointwise_nonlinearities_are_refused():
    """Rightly: on them the function does not commute with the group."""
    gspace = gspaces.flipRot2dOnR2(4)
    field_type = FieldType(gspace, [gspace.regular_repr, gspace.irrep(1, 0), gspace.irrep(1, 1)])
    with pytest.raises(
        ValueError, match="in_type: SiLU acts on every channel by itself, which irrep_1,0, irrep_1,1 does"
    ):
        SiLU(field_type)
    for name in FORMULAS:
        with pytest.raises(ValueError, match="acts on every channel by itself, which irrep_1,0, irrep_1,1 does not"):
            activation_of(field_type, name)
    module = SiLU(spaces.regular(gspace, 1))
    module.in_type = module.out_type = FieldType(gspace, [gspace.irrep(1, 1)])
    assert spaces.grid_error(module, spaces.random_field(module.in_type, 3, 3)) > 1e-2


def test_wrong_type_is_refused():
    with pytest.raises(TypeError, match="in_type: got int"):
        SiLU(3)
