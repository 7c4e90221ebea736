import torch

from escnn_attention.plain.resample import Crop
from escnn_attention.plain.transformer import TransformerBlock


def test_is_two_residual_branches():
    attention, shortcut, feed_forward = (torch.nn.Linear(3, 3) for _ in range(3))
    block = TransformerBlock(attention, shortcut, torch.nn.Identity(), feed_forward)
    x = torch.randn(4, 3)
    y = shortcut(x) + attention(x)
    torch.testing.assert_close(block(x), y + feed_forward(y))
    assert len(list(block.parameters())) == 6


def test_the_second_branch_sees_the_cropped_grid():
    ones, total = torch.nn.Identity(), torch.nn.AvgPool1d(3)
    block = TransformerBlock(ones, ones, Crop(1), torch.nn.Sequential(total, torch.nn.Upsample(3)))
    x = torch.tensor([[[100.0, 1.0, 2.0, 3.0, 100.0]]])
    torch.testing.assert_close(block(x), torch.tensor([[[6.0, 8.0, 10.0]]]))
