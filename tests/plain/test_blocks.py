import torch

from escnn_attention.plain.blocks import DenseBlock, ResidualBlock, TransformerBlock
from escnn_attention.plain.resample import Crop


def test_a_residual_block_is_a_sum():
    branch, shortcut = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(ResidualBlock(branch=branch, shortcut=shortcut)(x), branch(x) + shortcut(x))


def test_new_channels_of_a_dense_block_come_first():
    convolution = torch.nn.Conv2d(2, 3, 3)
    x = torch.randn(4, 2, 6, 6)
    y = DenseBlock(branch=convolution, crop=Crop(1))(x)
    torch.testing.assert_close(y, torch.cat([convolution(x), x[..., 1:-1, 1:-1]], 1))


def test_a_transformer_block_is_two_residual_branches():
    before, attention, after, shortcut, feed_forward = (torch.nn.Linear(3, 3) for _ in range(5))
    parts = {"before": before, "attention": attention, "after": after, "shortcut": shortcut}
    block = TransformerBlock(**parts, crop=torch.nn.Identity(), feed_forward=feed_forward)
    x = torch.randn(4, 3)
    y = shortcut(x) + after(attention(before(x)))
    torch.testing.assert_close(block(x), y + feed_forward(y))
    assert len(list(block.parameters())) == 10


def test_the_second_branch_sees_the_cropped_grid():
    same, total = torch.nn.Identity(), torch.nn.AvgPool1d(3)
    parts = dict.fromkeys(("before", "attention", "after", "shortcut"), same)
    block = TransformerBlock(**parts, crop=Crop(1), feed_forward=torch.nn.Sequential(total, torch.nn.Upsample(3)))
    x = torch.tensor([[[100.0, 1.0, 2.0, 3.0, 100.0]]])
    torch.testing.assert_close(block(x), torch.tensor([[[6.0, 8.0, 10.0]]]))
