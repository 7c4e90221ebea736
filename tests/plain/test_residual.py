import torch

from escnn_attention.plain.residual import ResidualBlock


def test_is_a_sum():
    branch, shortcut = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(ResidualBlock(branch, shortcut)(x), branch(x) + shortcut(x))
