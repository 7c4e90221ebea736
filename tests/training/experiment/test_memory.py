"""The peak of the memory."""

import sys

import pytest
import torch

from escnn_attention.training.experiment.memory import PeakMemory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems never forget a peak")
def test_a_peak_is_found_and_forgotten():
    size = 200_000_000
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(size, dtype=torch.uint8)
    assert 0.9 * size < memory.read() < 1.5 * size
    assert PeakMemory(torch.device("cpu")).read() < 0.1 * size
