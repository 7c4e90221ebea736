import copy

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import FieldLayerNorm, GroupSelfAttention, PairKernel, PointSelfAttention, PoseLinear
from escnn_attention.functional.layout import LAYOUT, without_prefix

GSPACE = gspaces.rot2dOnR2(4)
FIELDS = FieldType(GSPACE, 2 * [GSPACE.regular_repr])
LAYERS = {
    "plain.project_in": lambda: GroupSelfAttention(FIELDS, FIELDS, 2, 3),
    "plain.project_out": lambda: GroupSelfAttention(FIELDS, FIELDS, 2, 3, projection="pointwise"),
    "plain.encoding": lambda: GroupSelfAttention(FIELDS, FIELDS, 2, 3, encoding="fourier"),
    "plain": lambda: FieldLayerNorm(FIELDS),
    "plain.projection": lambda: PoseLinear(FIELDS, FIELDS),
    "plain.encoding ": lambda: PointSelfAttention(FIELDS, FIELDS, 2, encoding=PairKernel()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_newer_layouts_are_refused_and_others_load(name):
    layer, name = LAYERS[name](), name.strip()
    state = layer.state_dict()
    assert state._metadata[name]["version"] == LAYOUT == 1
    layer.load_state_dict(state)
    for older in (None, 1):
        earlier = copy.deepcopy(state)
        earlier._metadata[name] = {} if older is None else {"version": older}
        layer.load_state_dict(earlier)
    layer.load_state_dict(dict(state))  # without any
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    newer = type(state)((n, t + 1) for n, t in state.items())
    newer._metadata = copy.deepcopy(state._metadata)
    newer._metadata[name]["version"] = LAYOUT + 1
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"{name}: its weights are in layout 2, and this version .* up to 1"):
            layer.load_state_dict(newer, strict=strict)
    own = [n for n in before if n.startswith(name) and "." not in n.removeprefix(f"{name}.")]
    assert own
    assert all(torch.equal(layer.state_dict()[n], before[n]) for n in own)


def test_parts_of_a_state_dict_keep_their_layouts():
    inner = GroupSelfAttention(FIELDS, FIELDS, 2, 3)
    part = without_prefix(
        torch.nn.ModuleDict({"network": inner, "other": torch.nn.Linear(1, 1)}).state_dict(), "network."
    )
    assert list(part) == list(inner.state_dict())
    assert part._metadata == inner.state_dict()._metadata
    assert not hasattr(without_prefix(dict(part), "plain."), "_metadata")
