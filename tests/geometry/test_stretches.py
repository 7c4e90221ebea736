"""Stretches of equal numbers."""

import pytest
import torch

from escnn_attention.geometry.stretches import stretches, where


@pytest.mark.parametrize("numbers", [[4, 4, 7, 5, 5], [2], [], [1, 1, 1], [1, 2, 1]], ids=str)
def test_stretches(numbers):
    which, start = stretches(torch.tensor(numbers, dtype=torch.long))
    _, expected, counts = torch.unique_consecutive(
        torch.tensor(numbers, dtype=torch.long), return_inverse=True, return_counts=True
    )
    assert torch.equal(which, expected)
    assert torch.equal(start, counts.cumsum(0) - counts)


def test_where():
    flags = torch.tensor([False, True, True, False])
    assert where(flags).tolist() == [1, 2]
    assert where(~flags).tolist() == [0, 3]
    assert where(flags[:1]).tolist() == []
