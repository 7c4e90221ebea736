import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import FeatureAttention, equivariance_report
from escnn_attention.models import DenseBlock
from escnn_attention.models.convolutions import options_of
from tests import spaces
from tests.models.networks import assert_exported, broken, few_examples, settled

EXACT = 1e-10
P4 = gspaces.rot2dOnR2(4)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_is_the_formula(kernel_size):
    block = settled(DenseBlock(spaces.regular(P4, 2), 3, kernel_size), 4, 8, 7, 7)
    x = spaces.random_field(block.in_type, 7, 7)
    (norm,) = block.branch.norm.children()
    kernel = block.branch.convolution.plain.kernel()
    y = F.conv2d(norm(x.tensor.unflatten(1, (2, 4))).relu().flatten(1, 2), kernel.flatten(0, 1).flatten(1, 2))
    margin = kernel_size // 2
    expected = torch.cat([y, x.tensor[..., margin : 7 - margin, margin : 7 - margin]], 1)
    got = block(x)
    torch.testing.assert_close(got.tensor, expected)
    assert len(got.type) == 5
    assert block.evaluate_output_shape(tuple(x.shape)) == tuple(expected.shape)


@few_examples
@given(st.data())
def test_equivariant(data):
    gspace = (spaces.PLANE | spaces.VOLUME)[
        data.draw(st.sampled_from(["trivial", "flip", "C2", "C3", "C4", "C8", "D4", "mirror", "C4 3D"]))
    ]()
    attention = data.draw(st.sampled_from([None, "full", "channel", "spatial", "features", "poses"]))
    in_type = spaces.regular(gspace, data.draw(st.integers(1, 2)))
    block = DenseBlock(
        in_type,
        data.draw(st.integers(1, 2)),
        attention=attention,
        **options_of(attention, attention_size=3, attention_dilation=data.draw(st.integers(1, 2))),
    )
    shape = (in_type.size, *spaces.shape_of(gspace, data.draw(st.integers(4, 6))))
    block = settled(block, 2, *shape, spread=2)
    assert equivariance_report(block, (1, *shape)).relative_error < EXACT
    assert_exported(block, 2, *shape)


def test_a_broken_kernel_is_found_out():
    block = broken(settled(DenseBlock(spaces.regular(P4, 2), 2), 4, 8, 6, 6), "kernel")
    assert equivariance_report(block, (1, 8, 6, 6)).relative_error > 1e-3


def test_options_reach_the_attention():
    block = DenseBlock(spaces.regular(P4, 9), 2, attention="features", hidden=3, attention_size=5, attention_dilation=4)
    (attention,) = [m for m in block.modules() if isinstance(m, FeatureAttention)]
    assert (attention.kernel_size, attention.plain.dilation, len(attention.plain.squeeze.weight)) == (5, 4, 3)


def test_mistakes():
    fields = spaces.regular(P4, 2)
    with pytest.raises(ValueError, match="in_type: a dense block needs regular fields only, got also irrep_0"):
        DenseBlock(spaces.scalars(P4, 2), 2)
    with pytest.raises(ValueError, match="growth: got 0, needed at least 1"):
        DenseBlock(fields, 0)
    with pytest.raises(ValueError, match="kernel_size: got 2, needed an odd width"):
        DenseBlock(fields, 1, 2)
    with pytest.raises(ValueError, match="is smaller than the kernel"):
        DenseBlock(fields, 1)(spaces.random_field(fields, 2, 2, dtype=torch.float32))
    with pytest.raises(TypeError, match="input: DenseBlock got Tensor"):
        DenseBlock(fields, 1)(torch.zeros(1, 8, 5, 5))
