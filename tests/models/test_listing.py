import pytest
from escnn import gspaces, nn

from escnn_attention.models import HybridNet
from escnn_attention.models.listing import shortened

SPACES = [gspaces.flipRot2dOnR2(4), gspaces.dihedralOnR3(3), gspaces.rot2dOnR2(-1), gspaces.octaOnR3()]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_types_are_named_by_their_fields(space):
    scalars = nn.FieldType(space, 3 * [space.trivial_repr])
    mixed = nn.FieldType(space, [space.trivial_repr, space.fibergroup.irreps()[-1], space.fibergroup.irreps()[-1]])
    name, vectors = space.trivial_repr.name, space.fibergroup.irreps()[-1].name
    assert shortened(f"A({scalars}, {mixed}, b=1)") == f"A(3 {name}, 1 {name}, 2 {vectors}, b=1)"


def test_what_does_nothing_is_left_out():
    network = HybridNet(gspaces.rot2dOnR2(4), 1, 3, widths=(4,), convolutions=(1,), attention=(1,), kernel_size=3)
    text = repr(network)
    assert text.splitlines()[1] == f"  C4_on_R2[(None, 4)], {sum(p.numel() for p in network.parameters()):,} parameters"
    assert "(attention): GroupSelfAttention(4 regular, num_heads=4" in text
    assert "(before): FieldLayerNorm(4 regular" in text
    assert "R2Conv(1 irrep_0, 4 regular, kernel_size=5, padding=2, bias=False)" in text
    assert not any(word in text for word in ("Identity", "margin=0", "stride", "SequentialModule()"))
    assert text.count("(") == text.count(")")


def test_other_text_is_left_alone():
    text = "Linear(in_features=2, out_features=[3], bias=True)"
    assert shortened(text) == text
