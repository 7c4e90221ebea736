import torch

from escnn_attention.plain.image_networks import Classifier, PoseMean, invariant


def test_maximum_over_poses_and_mean_over_positions():
    x = torch.tensor([[[1.0, 5.0], [3.0, 2.0], [0.0, -1.0], [-4.0, -2.0]]])  # two fields of two poses, two positions
    torch.testing.assert_close(invariant(x, 2), torch.tensor([[4.0, -0.5]]))


def test_is_stages_pooling_and_head():
    stages, head = torch.nn.Conv2d(1, 6, 1), torch.nn.Linear(3, 2)
    x = torch.randn(2, 1, 4, 5)
    torch.testing.assert_close(Classifier(stages, 2, head)(x), head(invariant(stages(x), 2)))


def test_every_pose_gets_the_mean():
    x = torch.tensor([0.0, 2.0, 5.0, 5.0]).view(1, 4, 1)
    torch.testing.assert_close(PoseMean(2)(x).flatten(), torch.tensor([1.0, 1.0, 5.0, 5.0]))
    torch.testing.assert_close(PoseMean(1)(x), x)
