import torch

from escnn_attention.plain.pose_mean import PoseMean


def test_every_pose_gets_the_mean():
    x = torch.tensor([0.0, 2.0, 5.0, 5.0]).view(1, 4, 1)
    torch.testing.assert_close(PoseMean(2)(x).flatten(), torch.tensor([1.0, 1.0, 5.0, 5.0]))
    torch.testing.assert_close(PoseMean(1)(x), x)
