import torch

from escnn_attention.plain.transformer import TransformerBlock


def test_is_two_residual_branches():
    attention, shortcut, feed_forward = (torch.nn.Linear(3, 3) for _ in range(3))
    block = TransformerBlock(attention, shortcut, feed_forward)
    x = torch.randn(4, 3)
    y = shortcut(x) + attention(x)
    torch.testing.assert_close(block(x), y + feed_forward(y))
    assert len(list(block.parameters())) == 6
