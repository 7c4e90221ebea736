"""Sums of values, weighed."""

import torch

from escnn_attention.functional.points.weights import sum_values


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_values_of_poses_by_themselves():
    p, v = random(3, 2, 4, 6, 1, 5), random(3, 2, 4, 1, 5, 6)
    torch.testing.assert_close(sum_values(p, v), torch.einsum("gmhapk,gmhpkc->gmhac", p, v))
    p, v = random(3, 2, 4, 6, 7, 5), random(3, 2, 1, 7, 5, 6)
    torch.testing.assert_close(sum_values(p, v), torch.einsum("gmhapk,gmpkc->gmhac", p, v[:, :, 0]))
