import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import SiLU
from tests import spaces


def permutation_fields(gspace):
    fields = [gspace.regular_repr, gspace.regular_repr]
    if "pointwise" in gspace.trivial_repr.supported_nonlinearities:  # not of escnn's products of groups
        fields.insert(1, gspace.trivial_repr)
    return FieldType(gspace, fields)


@pytest.mark.parametrize("make", spaces.ALL.values(), ids=spaces.ALL)
def test_equivariant(make):
    field_type = permutation_fields(make())
    x = spaces.random_field(field_type, *spaces.shape_of(field_type.gspace, 4))
    assert spaces.grid_error(SiLU(field_type), x) < 1e-12


def test_is_the_formula():
    gspace = gspaces.rot2dOnR2(4)
    field_type = FieldType(gspace, [gspace.quotient_repr(2), gspace.regular_repr])
    x = spaces.random_field(field_type, 3, 3)
    torch.testing.assert_close(SiLU(field_type)(x).tensor, x.tensor / (1 + (-x.tensor).exp()))
    assert (x.tensor < 0).any()  # and the input is left as it was


def test_fields_without_pointwise_nonlinearities_are_refused():
    """Rightly: on them the function does not commute with the group."""
    gspace = gspaces.flipRot2dOnR2(4)
    field_type = FieldType(gspace, [gspace.regular_repr, gspace.irrep(1, 0), gspace.irrep(1, 1)])
    with pytest.raises(
        ValueError, match="in_type: SiLU acts on every channel by itself, which irrep_1,0, irrep_1,1 does"
    ):
        SiLU(field_type)
    module = SiLU(spaces.regular(gspace, 1))
    module.in_type = module.out_type = FieldType(gspace, [gspace.irrep(1, 1)])
    assert spaces.grid_error(module, spaces.random_field(module.in_type, 3, 3)) > 1e-2


def test_wrong_type_is_refused():
    with pytest.raises(TypeError, match="in_type: got int"):
        SiLU(3)
