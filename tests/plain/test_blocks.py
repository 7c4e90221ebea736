import torch

from escnn_attention.plain.blocks import TransformerBlock
from escnn_attention.plain.resample import Crop


def test_the_second_branch_sees_the_cropped_grid():
    same, total = torch.nn.Identity(), torch.nn.AvgPool1d(3)
    parts = dict.fromkeys(("before", "attention", "after", "shortcut"), same)
    block = TransformerBlock(**parts, crop=Crop(1), feed_forward=torch.nn.Sequential(total, torch.nn.Upsample(3)))
    x = torch.tensor([[[100.0, 1.0, 2.0, 3.0, 100.0]]])
    torch.testing.assert_close(block(x), torch.tensor([[[6.0, 8.0, 10.0]]]))
