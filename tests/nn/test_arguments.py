"""Arguments and inputs that are wrong are named, for self-attention as for the other layers."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import GroupSelfAttention, LiftingSelfAttention, MLPEncoding, SeparableEncoding, TransformerBlock
from tests.spaces import ALL, PLANE, random_field, regular, scalars

D4 = PLANE["D4"]

OF_FOUR_FIELDS = [
    (ValueError, "num_heads: the 4 regular fields", {"num_heads": 3}),
    (ValueError, "num_heads: got 0", {"num_heads": 0}),
    (TypeError, "num_heads: got 1.5", {"num_heads": 1.5}),
    (ValueError, "head_fields: got -1", {"head_fields": -1}),
    (ValueError, "kernel_size: got 4, needed an odd", {"kernel_size": 4}),
    (ValueError, "kernel_size: got -3", {"kernel_size": -3}),
    (TypeError, "kernel_size: got '3'", {"kernel_size": "3"}),
    (ValueError, "query: got 'each'", {"query": "each"}),
    (ValueError, "window: got 'round'", {"kernel_size": 3, "window": "round"}),
    (ValueError, "dilation: got 0", {"kernel_size": 3, "dilation": 0}),
    (ValueError, "dilation: got 2, but attention is global", {"dilation": 2}),
    (ValueError, "projection: got 'full'", {"projection": "full"}),
    (ValueError, "dropout: got 1.0", {"dropout": 1.0}),
    (ValueError, "dropout: got 'much'", {"dropout": "much"}),
    (ValueError, "backend: got 'fast'", {"backend": "fast"}),
    (ValueError, "keys: got 'none'", {"keys": "none"}),
    (ValueError, "encoding: got 'spiral'", {"encoding": "spiral"}),
    (TypeError, "encoding: got int", {"encoding": 3}),
    (
        ValueError,
        "encoding: RotaryEncoding rotates 2 .* head has 1",
        {"num_heads": 4, "encoding": "rotary"},
    ),
    (ValueError, "encoding: SeparableEncoding divides", {"num_heads": 4, "encoding": SeparableEncoding()}),
    (ValueError, "encoding: this MLPEncoding belongs to", {"encoding": MLPEncoding().bind(2, 1, 4, 8)}),
]


@pytest.mark.parametrize(("error", "message", "options"), OF_FOUR_FIELDS)
def test_bad_arguments(error, message, options):
    fields = regular(D4(), 4)
    with pytest.raises(error, match=message):
        GroupSelfAttention(fields, fields, **{"kernel_size": None, **options})


def test_bad_types():
    fields, few, circle = regular(D4(), 4), scalars(D4(), 2), scalars(gspaces.rot2dOnR2(-1), 2)
    group, lifting, point = GroupSelfAttention, LiftingSelfAttention, regular(ALL["D4 on a point"](), 1)
    for error, message, layer, types, options in (
        (TypeError, "in_type: got int", group, (3, fields), {}),
        (TypeError, "out_type: got str", group, (fields, "regular"), {}),
        (ValueError, "out_type: its gspace is C4", group, (fields, regular(PLANE["C4"](), 4)), {}),
        (ValueError, 'in_type: projection="pointwise" needs', group, (few, fields), {"projection": "pointwise"}),
        (ValueError, 'out_type: projection="pointwise" needs', group, (fields, few), {"projection": "pointwise"}),
        (NotImplementedError, r"gspace: the fiber group SO\(2\) is continuous", group, (circle, circle), {}),
        (ValueError, "kernel_size: got 3, but D4 has no base", group, (point, point), {"kernel_size": 3}),
        (ValueError, "in_type: .* needs trivial .*GroupSelfAttention lifts", lifting, (fields, fields), {}),
        (TypeError, "query: .* no such option, needed .*encoding,", lifting, (few, fields), {"query": "own"}),
    ):
        with pytest.raises(error, match=message):
            layer(*types, **{"kernel_size": None, **options})


def test_positions_and_poses_of_maps():
    fields = regular(D4(), 2)
    layer, x = GroupSelfAttention(fields, fields, 2, 3), random_field(fields, 4, 4, dtype=torch.float32)
    for positions, poses, message in (
        ([(0, 0, 0)], None, "positions: .*needed 2"),
        ([(0, 4)], None, r"positions: .*below \(4, 4\)"),
        ([], None, "positions: .*needed whole numbers"),
        ([(0.5, 0.0)], None, "positions: .*needed whole numbers"),
        ([(0, 0)], [8], "poses: .*index from 0"),
        ([(0, 0)], [0.5], "poses: .*index from 0"),
        ([(0, 0)], ["1"], "poses: .*index from 0"),
        ([(0, 0)], [], "poses: .*None for all"),
        ([(0, 0)], [PLANE["C4"]().fibergroup.identity], "poses: .*needed D4"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.attention_maps(x, positions, poses)


@pytest.mark.parametrize("layer", [GroupSelfAttention, LiftingSelfAttention, TransformerBlock])
def test_a_window_is_said(layer):
    """Global attention, which can take hundreds of times as long, is not what one gets by leaving an argument out."""
    space = gspaces.rot2dOnR2(4)
    fields = FieldType(space, [space.regular_repr])
    in_type = FieldType(space, [space.trivial_repr]) if layer is LiftingSelfAttention else fields
    with pytest.raises(TypeError, match=r"kernel_size: .*odd width"):
        layer(in_type, fields)
    assert "global" in repr(layer(in_type, fields, kernel_size=None))
    for name, value in {"window": "disc", "dilation": 2}.items():
        with pytest.raises(ValueError, match=f"^{name}: .*global"):
            layer(in_type, fields, kernel_size=None, **{name: value})
    nowhere = gspaces.no_base_space(space.fibergroup)
    poses = FieldType(nowhere, [nowhere.regular_repr])
    in_type = FieldType(nowhere, [nowhere.trivial_repr]) if layer is LiftingSelfAttention else poses
    layer(in_type, poses)  # there is nothing to say
