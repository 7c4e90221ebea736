"""The precision in which numbers are worked out."""

import torch

from escnn_attention._precision import working_precision


def test_at_least_single():
    kept = torch.float16, torch.bfloat16, torch.float32, torch.float64
    assert [working_precision(dtype) for dtype in kept] == [*3 * [torch.float32], torch.float64]
