import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.nn import FieldType, IdentityModule
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import AttentiveConv, FeatureAttention, HalvingPool, equivariance_report
from escnn_attention.models import ResidualBlock
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, few_examples, settled

EXACT = 1e-10
P4 = gspaces.rot2dOnR2(4)


@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("wider", [False, True])
def test_is_the_formula(halve, wider):
    in_type = spaces.regular(P4, 2)
    block = settled(ResidualBlock(in_type, spaces.regular(P4, 3) if wider else in_type, halve=halve), 4, 8, 6, 6)
    x = spaces.random_field(in_type, 6, 6)

    def pooled(y):
        return F.max_pool2d(y, 2) if halve else y

    def convolve(name, y, padding=1):
        kernel = block.get_submodule(name).plain.kernel()
        return F.conv2d(y, kernel.flatten(0, 1).flatten(1, 2), padding=padding)

    def normed(name, y):
        (norm,) = block.branch.get_submodule(name).children()
        f = y.unflatten(1, (-1, 4))
        return norm(f).relu().flatten(1, 2)

    y = pooled(convolve("branch.convolution", normed("norm", x.tensor)))
    y = convolve("branch.convolution_2", normed("norm_2", y))
    if halve or wider:
        expected = y + pooled(convolve("shortcut.convolution", x.tensor, 0))
    else:
        assert isinstance(block.shortcut, IdentityModule)
        expected = y + x.tensor
    torch.testing.assert_close(block(x).tensor, expected)
    assert block.evaluate_output_shape(tuple(x.shape)) == tuple(expected.shape)


@few_examples
@given(st.data())
def test_equivariant(data):
    names = ["trivial", "flip", "C2", "C3", "C4", "C8", "D4", "mirror"]
    gspace = (spaces.PLANE | spaces.VOLUME)[data.draw(st.sampled_from(names))]()
    ins, outs = (spaces.regular(gspace, data.draw(st.integers(1, 2))) for _ in range(2))
    attention = data.draw(st.sampled_from([None, "full", "channel", "spatial", "features", "poses"]))
    block = ResidualBlock(
        ins, outs, halve=data.draw(st.booleans()), attention=attention, **options_of(attention, attention_size=3)
    )
    shape = (ins.size, *spaces.shape_of(gspace, data.draw(st.integers(4, 6))))
    block = settled(block, 2, *shape, spread=2)
    assert equivariance_report(block, (1, *shape)).relative_error < EXACT
    assert_exported(block, 2, *shape)


def test_a_stride_in_place_of_the_pooling_is_found_out():
    fields = spaces.regular(P4, 1)
    block = settled(ResidualBlock(fields, fields, halve=True), 4, 4, 6, 6)
    assert equivariance_report(block, (1, 4, 6, 6)).relative_error < EXACT
    assert len(block.check_equivariance()) == 4
    for module in (block.branch.convolution, block.shortcut.convolution):
        module.plain.stride = 2
    for part in (block.branch, block.shortcut):
        part.pool = IdentityModule(fields)
    assert equivariance_report(block, (1, 4, 6, 6)).relative_error > 1e-3
    assert equivariance_report(block, (1, 4, 7, 7)).relative_error < EXACT


def test_a_broken_kernel_is_found_out():
    fields = spaces.regular(P4, 2)
    block = broken(settled(ResidualBlock(fields, fields), 4, 8, 6, 6), "kernel")
    assert equivariance_report(block, (1, 8, 6, 6)).relative_error > 1e-3


def test_all_convolutions_attend():
    block = ResidualBlock(spaces.regular(P4, 6), spaces.regular(P4, 9), halve=True, attention="features", hidden=3)
    attentions = [m for m in block.modules() if isinstance(m, FeatureAttention)]
    assert [len(m.plain.squeeze.weight) for m in attentions] == [3, 3, 3]
    assert [m.kernel_size for m in attentions] == [7, 7, 7]
    assert [m.kernel_size for m in block.modules() if isinstance(m, AttentiveConv)] == [3, 3, 1]
    assert len([m for m in block.modules() if isinstance(m, HalvingPool)]) == 2
    assert "halve=True" in repr(block)


def test_mistakes():
    fields = spaces.regular(P4, 2)
    with pytest.raises(ValueError, match="in_type: a residual block needs regular fields only, got also irrep_0"):
        ResidualBlock(spaces.scalars(P4, 2), fields)
    with pytest.raises(ValueError, match="out_type: a residual block needs regular fields only, got also irrep_1"):
        ResidualBlock(fields, FieldType(P4, [P4.irrep(1)]))
    with pytest.raises(ValueError, match="out_type: its gspace"):
        ResidualBlock(fields, spaces.regular(gspaces.rot2dOnR2(2), 2))
    with pytest.raises(ValueError, match="kernel_size: got 4, needed an odd width"):
        ResidualBlock(fields, fields, 4)
    with pytest.raises(ValueError, match="hidden: got 0, needed at least 1"):
        ResidualBlock(fields, fields, attention="features", hidden=0)
    with pytest.raises(ValueError, match="attention: got 'x'"):
        ResidualBlock(fields, fields, attention="x")
    with pytest.raises(TypeError, match="input: ResidualBlock got Tensor"):
        ResidualBlock(fields, fields)(torch.zeros(1, 8, 5, 5))
