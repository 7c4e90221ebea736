import math
from collections import OrderedDict

import pytest
import torch
from escnn import gspaces
from escnn.group import cyclic_group
from escnn.nn import ReLU

from escnn_attention import AttentiveConv, FeatureAttention, PoseAttention
from escnn_attention.models import AllCNNC, GroupCNN, GroupDenseNet, ResNet44
from escnn_attention.models.convolutions import (
    attended,
    check_attention,
    draw_as_published,
    drop,
    image_type,
    norm_and_relu,
    sequence,
    width_for,
)
from tests import spaces

P4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(P4, 4)


@pytest.mark.parametrize(
    ("attention", "in_front", "channel", "spatial"),
    [
        (None, None, False, False),
        ("full", None, True, True),
        ("channel", None, True, False),
        ("spatial", None, False, True),
        ("features", FeatureAttention, False, False),
        ("poses", PoseAttention, False, False),
    ],
)
def test_attended(attention, in_front, channel, spatial):
    modules = attended(
        FIELDS, spaces.regular(P4, 3), 5, attention, padding=2, ratio=2, attention_size=3, attention_dilation=2
    )
    convolution = modules.pop("convolution")
    assert isinstance(convolution, AttentiveConv)
    assert (convolution.kernel_size, convolution.plain.padding) == (5, 2)
    assert convolution.plain.bias is None
    assert (convolution.plain.squeeze is not None, convolution.plain.spatial is not None) == (channel, spatial)
    assert [type(m) for m in modules.values()] == ([] if in_front is None else [in_front])
    for module in (convolution, *modules.values()):
        if isinstance(module, FeatureAttention) or channel:
            assert module.ratio == 2
        if isinstance(module, FeatureAttention):
            assert (module.kernel_size, module.plain.dilation) == (3, 2)
    if spatial:
        assert (convolution.attention_size, convolution.plain.attention_dilation) == (3, 2)


def test_an_unknown_attention_is_refused():
    check_attention(None)
    with pytest.raises(
        ValueError, match="attention: got 'all', needed None or one of 'full', 'channel', 'spatial', 'f"
    ):
        check_attention("all")
    with pytest.raises(ValueError, match="attention: got 'all'"):
        attended(FIELDS, FIELDS, 3, "all")


def test_norm_and_relu():
    module = sequence(norm_and_relu(FIELDS))
    x = spaces.random_field(FIELDS, 5, 5, batch=3, dtype=torch.float32)
    f = x.tensor.unflatten(1, (4, 4))
    mean = f.mean((0, 2, 3, 4), keepdim=True)
    variance = f.var((0, 2, 3, 4), unbiased=False, keepdim=True)
    expected = ((f - mean) / (variance + 2e-5).sqrt()).relu().flatten(1, 2)
    torch.testing.assert_close(module(x).tensor, expected)


def test_sequence_numbers_names_that_come_again():
    parts = [OrderedDict(relu=ReLU(FIELDS)) for _ in range(3)]
    module = sequence(parts[0], {}, {"other": ReLU(FIELDS)}, *parts[1:])
    assert [name for name, _ in module.named_children()] == ["relu", "other", "relu_2", "relu_3"]


def test_drop():
    assert drop(FIELDS, 0.0) == {}
    assert drop(FIELDS, 0.25)["dropout"].p == 0.25
    with pytest.raises(ValueError, match=r"input_dropout: got -0\.1, needed a probability"):
        drop(FIELDS, -0.1, "input_dropout")


def test_image_type():
    assert image_type(P4, 3) == spaces.scalars(P4, 3)
    with pytest.raises(TypeError, match="gspace: got str, needed a gspace of escnn, for example"):
        image_type("p4", 3)
    with pytest.raises(ValueError, match="gspace: the network needs a grid of 2 or 3 dimensions, got C4"):
        image_type(gspaces.no_base_space(cyclic_group(4)), 3)
    with pytest.raises(ValueError, match="in_channels: got 0, needed at least 1"):
        image_type(P4, 0)


@pytest.mark.parametrize("network", [GroupCNN, AllCNNC, ResNet44, GroupDenseNet])
def test_networks_name_a_wrong_gspace(network):
    with pytest.raises(TypeError, match="gspace: got str"):
        network("p4", 3, 10)
    with pytest.raises(NotImplementedError, match=r"gspace: the network needs a finite fiber group, got SO\(2\)"):
        network(gspaces.rot2dOnR2(-1), 3, 10, width=(1, 1, 1) if network is ResNet44 else 1)


def test_width_for():
    assert width_for(P4, None, 20) == 10
    assert width_for(gspaces.flipRot2dOnR2(4), None, 26) == 9
    assert width_for(P4, 7, 20) == 7
    assert width_for(gspaces.octaOnR3(), None, 2) == 1
    with pytest.raises(ValueError, match="width: got 0, needed at least 1"):
        width_for(P4, 0, 20)


def test_the_gain_scales_kernels_and_not_the_layers_of_channel_attention():
    torch.manual_seed(0)
    module = sequence(attended(FIELDS, FIELDS, 3, "features"))
    draw_as_published(module, 0.01)
    attention, convolution = (m.plain for m in module)
    assert convolution.kernel.weight.abs().max() <= 0.01 / math.sqrt(4 * 9)
    assert attention.spatial.weight.abs().max() <= 0.01 / math.sqrt(2 * 49)
    assert 0.5 / math.sqrt(16) < attention.squeeze.weight.abs().max() <= 1 / math.sqrt(16)
