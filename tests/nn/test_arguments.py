"""Arguments and inputs that are wrong are named, for self-attention as for the other layers."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, MLPEncoding, SeparableEncoding, TransformerBlock
from tests.spaces import ALL, PLANE, random_field, regular, scalars

D4 = PLANE["D4"]

BAD_ARGUMENTS = {
    "in_type: got int": (TypeError, lambda t: GroupSelfAttention(3, t, kernel_size=None)),
    "out_type: got str": (TypeError, lambda t: GroupSelfAttention(t, "regular", kernel_size=None)),
    "out_type: its gspace is C4": (
        ValueError,
        lambda t: GroupSelfAttention(t, regular(PLANE["C4"](), 4), kernel_size=None),
    ),
    "num_heads: the 4 regular fields": (ValueError, lambda t: GroupSelfAttention(t, t, 3, kernel_size=None)),
    "num_heads: got 0": (ValueError, lambda t: GroupSelfAttention(t, t, 0, kernel_size=None)),
    "num_heads: got 1.5": (TypeError, lambda t: GroupSelfAttention(t, t, 1.5, kernel_size=None)),
    "head_fields: got -1": (ValueError, lambda t: GroupSelfAttention(t, t, head_fields=-1, kernel_size=None)),
    "kernel_size: got 4, needed an odd": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 4)),
    "kernel_size: got -3": (ValueError, lambda t: GroupSelfAttention(t, t, 1, -3)),
    "kernel_size: got '3'": (TypeError, lambda t: GroupSelfAttention(t, t, 1, "3")),
    "query: got 'each'": (ValueError, lambda t: GroupSelfAttention(t, t, query="each", kernel_size=None)),
    "window: got 'round'": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 3, window="round")),
    "dilation: got 0": (ValueError, lambda t: GroupSelfAttention(t, t, 1, 3, dilation=0)),
    "dilation: got 2, but attention is global": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, dilation=2, kernel_size=None),
    ),
    "projection: got 'full'": (ValueError, lambda t: GroupSelfAttention(t, t, projection="full", kernel_size=None)),
    "dropout: got 1.0": (ValueError, lambda t: GroupSelfAttention(t, t, dropout=1.0, kernel_size=None)),
    "dropout: got 'much'": (ValueError, lambda t: GroupSelfAttention(t, t, dropout="much", kernel_size=None)),
    "backend: got 'fast'": (ValueError, lambda t: GroupSelfAttention(t, t, backend="fast", kernel_size=None)),
    "encoding: got 'spiral'": (ValueError, lambda t: GroupSelfAttention(t, t, encoding="spiral", kernel_size=None)),
    "encoding: RotaryEncoding rotates 2 channels and a head has 1": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, 4, encoding="rotary", kernel_size=None),
    ),
    "keys: got 'none'": (ValueError, lambda t: GroupSelfAttention(t, t, keys="none", kernel_size=None)),
    "encoding: got int": (TypeError, lambda t: GroupSelfAttention(t, t, encoding=3, kernel_size=None)),
    "encoding: SeparableEncoding divides": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, 4, encoding=SeparableEncoding(), kernel_size=None),
    ),
    "encoding: this MLPEncoding belongs to a layer": (
        ValueError,
        lambda t: GroupSelfAttention(t, t, encoding=MLPEncoding().bind(2, 1, 4, 8), kernel_size=None),
    ),
    'in_type: projection="pointwise" needs regular fields': (
        ValueError,
        lambda t: GroupSelfAttention(scalars(D4(), 2), t, projection="pointwise", kernel_size=None),
    ),
    'out_type: projection="pointwise" needs regular fields': (
        ValueError,
        lambda t: GroupSelfAttention(t, scalars(D4(), 2), projection="pointwise", kernel_size=None),
    ),
    "in_type: LiftingSelfAttention needs trivial .*GroupSelfAttention lifts": (
        ValueError,
        lambda t: LiftingSelfAttention(t, t, kernel_size=None),
    ),
    "query: LiftingSelfAttention has no such option, needed some of .*encoding,": (
        TypeError,
        lambda t: LiftingSelfAttention(scalars(D4(), 2), t, query="own", kernel_size=None),
    ),
    "gspace: the fiber group SO\\(2\\) is continuous": (
        NotImplementedError,
        lambda t: GroupSelfAttention(*2 * [scalars(gspaces.rot2dOnR2(-1), 2)], kernel_size=None),
    ),
    "kernel_size: got 3, but D4 has no base space": (
        ValueError,
        lambda t: GroupSelfAttention(*2 * [regular(ALL["D4 on a point"](), 1)], 1, 3),
    ),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments(message):
    error, make = BAD_ARGUMENTS[message]
    with pytest.raises(error, match=message):
        make(regular(D4(), 4))


class TestBadInput:
    def setup_method(self):
        self.fields = regular(D4(), 2)
        self.layer = GroupSelfAttention(self.fields, self.fields, 2, 3)

    def test_positions_and_poses_of_maps(self):
        x = random_field(self.fields, 4, 4, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"positions: .*needed 2"):
            self.layer.attention_maps(x, [(0, 0, 0)])
        with pytest.raises(ValueError, match=r"positions: .*below \(4, 4\)"):
            self.layer.attention_maps(x, [(0, 4)])
        for positions in ([], [(0.5, 0.0)]):
            with pytest.raises(ValueError, match=r"positions: .*needed whole numbers"):
                self.layer.attention_maps(x, positions)
        for pose in (8, 0.5, "1"):
            with pytest.raises(ValueError, match=r"poses: .*index from 0"):
                self.layer.attention_maps(x, [(0, 0)], [pose])
        with pytest.raises(ValueError, match=r"poses: .*None for all"):
            self.layer.attention_maps(x, [(0, 0)], [])
        with pytest.raises(ValueError, match=r"poses: .*needed D4"):
            self.layer.attention_maps(x, [(0, 0)], [PLANE["C4"]().fibergroup.identity])


@pytest.mark.parametrize("layer", [GroupSelfAttention, LiftingSelfAttention, TransformerBlock])
def test_a_window_is_said(layer):
    """Global attention, which can take hundreds of times as long, is not what one gets by leaving an argument out."""
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, [space.regular_repr])
    in_type = FieldType(space, [space.trivial_repr]) if layer is LiftingSelfAttention else fields
    with pytest.raises(TypeError, match=r"kernel_size: .*odd width"):
        layer(in_type, fields)
    assert "global" in repr(layer(in_type, fields, kernel_size=None))
    nowhere = gspaces.no_base_space(space.fibergroup)
    poses = FieldType(nowhere, [nowhere.regular_repr])
    in_type = FieldType(nowhere, [nowhere.trivial_repr]) if layer is LiftingSelfAttention else poses
    layer(in_type, poses)  # there is nothing to say
